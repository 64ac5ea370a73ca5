// SPDX-License-Identifier: MIT
#pragma once

// A language model of the Llama family: LlamaForCausalLM with standard attention or DiffLlamaForCausalLM with differential
// attention (transformers, modeling_llama.py and modeling_diffllama.py). Everything but attention is the same, and here it is
// Eigen: x += attention(norm(x)), x += down(silu(gate(norm(x))) · up(norm(x))), for each layer, then norm and logits.

#include <diffattn/diffattn.hpp>
#include <functional>
#include <memory>

#include "checkpoint.hpp"

namespace llm {

using diffattn::index_t;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// What the configuration of a checkpoint says.
struct model_config {
  bool differential = false;
  index_t layers = 0, mlp_width = 0, vocabulary = 0;
  diffattn::layer_shape attention;
  double eps = 0;
  diffattn::rope_config rope;
  bool tied = false;              ///< logits by the embedding
  bool attention_bias = false;    ///< the projections of attention must have biases
  index_t trained_positions = 0;  ///< 0: not said
  std::vector<index_t> ends;      ///< tokens that end a text

  explicit model_config(const config& c) {
    const std::string architecture = c.architecture();
    differential = architecture == "DiffLlamaForCausalLM";
    if (!differential && architecture != "LlamaForCausalLM")
      throw c.error("architecture",
                    "is " + in_quotes(architecture) + "; only LlamaForCausalLM and DiffLlamaForCausalLM run here");
    if (c.has("quantization_config")) throw c.error("quantization_config", "is not supported");
    if (const std::string act = c.text("hidden_act", "silu"); act != "silu" && act != "swish")
      throw c.error("hidden_act", "is " + in_quotes(act) + ", not silu");
    const auto count = [&c](const char* key, index_t otherwise = 0) {
      const index_t n = otherwise > 0 ? c.integer(key, otherwise) : c.integer(key);
      if (n < 1 || n > (index_t{1} << 24)) throw c.error(key, "is not within 1 and 2^24");
      return n;
    };
    layers = count("num_hidden_layers"), mlp_width = count("intermediate_size"), vocabulary = count("vocab_size");
    attention.model_width = count("hidden_size"), attention.query_heads = count("num_attention_heads");
    attention.key_heads = count("num_key_value_heads", attention.query_heads);
    if (!c.has("head_dim") && attention.model_width % attention.query_heads != 0)
      throw c.error("hidden_size", "is no multiple of num_attention_heads, and head_dim is missing");
    attention.head_width = count("head_dim", std::max<index_t>(1, attention.model_width / attention.query_heads));
    eps = c.number("rms_norm_eps", differential ? 1e-5 : 1e-6);  // the defaults of transformers differ
    if (!(eps >= 0 && eps < 1)) throw c.error("rms_norm_eps", "is not within 0 and 1");
    tied = c.flag("tie_word_embeddings", false);
    attention_bias = c.flag("attention_bias", false);
    trained_positions = c.integer("max_position_embeddings", 0);
    read_rope(c);
    if (const nlohmann::json* end = c.find("eos_token_id")) {
      for (const nlohmann::json& token : end->is_array() ? *end : nlohmann::json::array({*end})) {
        if (!token.is_number_integer()) throw c.error("eos_token_id", "is not a list of integers");
        ends.push_back(token.get<index_t>());
      }
    }
  }

 private:
  void read_rope(const config& c) {
    // Newer files keep all of it in rope_parameters, older ones the base outside and the rest in rope_scaling.
    const std::optional<config> newer = c.section("rope_parameters"), older = c.section("rope_scaling");
    const config& s = newer ? *newer : older ? *older : c;
    rope.base = newer && newer->has("rope_theta") ? newer->number("rope_theta") : c.number("rope_theta", 10000);
    const config& parts = newer && newer->has("partial_rotary_factor") ? *newer : c;
    const double part = parts.number("partial_rotary_factor", 1);
    if (!(part > 0 && part <= 1)) throw parts.error("partial_rotary_factor", "is not within 0 and 1");
    rope.width = static_cast<index_t>(static_cast<double>(attention.head_width) * part);
    const std::string type = newer || older ? s.text("rope_type", s.text("type", "default")) : "default";
    if (type != "default") {
      using diffattn::rope_scaling;
      const std::pair<const char*, rope_scaling> known[] = {{"linear", rope_scaling::linear},
                                                            {"dynamic", rope_scaling::dynamic_ntk},
                                                            {"yarn", rope_scaling::yarn},
                                                            {"llama3", rope_scaling::llama3}};
      for (const auto& [name, rule] : known)
        if (type == name) rope.scaling = rule;
      if (rope.scaling == rope_scaling::none) throw s.error("rope_type", "is " + in_quotes(type) + ", which is not known here");
      rope.factor = s.number("factor");
      rope.original_positions = s.integer("original_max_position_embeddings", c.integer("max_position_embeddings", 0));
      rope.low_freq_factor = s.number("low_freq_factor", rope.low_freq_factor);
      rope.high_freq_factor = s.number("high_freq_factor", rope.high_freq_factor);
      rope.beta_fast = s.number("beta_fast", rope.beta_fast), rope.beta_slow = s.number("beta_slow", rope.beta_slow);
      rope.truncate = s.flag("truncate", true);
      rope.attention_factor = s.number("attention_factor", 0);
      rope.mscale = s.number("mscale", 0), rope.mscale_all_dim = s.number("mscale_all_dim", 0);
    }
    if (check(rope) != diffattn::status::ok) throw s.error("rope_theta", "and its companions give no rotation");
  }
};

/// A model with the caches of one sequence.
class decoder {
 public:
  using layer_args = diffattn::layer_args<float>;
  /// Sees every attention layer after it has run.
  using observer = std::function<void(index_t layer, const layer_args&)>;

  /// `capacity` tokens fit into the caches; a rotation that depends on the length of the text takes it for `length` (0: the
  /// capacity). The checkpoint must live as long: float32 weights are used where they lie.
  decoder(const checkpoint& from, index_t capacity, diffattn::storage cache = diffattn::storage::f32, index_t length = 0)
      : config_(from.configuration()), capacity_(capacity) {
    const index_t width = config_.attention.model_width, mlp = config_.mlp_width;
    embedding_ = weights(from, "model.embed_tokens.weight", {config_.vocabulary, width});
    norm_ = weights(from, "model.norm.weight", {width});
    head_ = config_.tied ? embedding_ : weights(from, "lm_head.weight", {config_.vocabulary, width});
    if (from.has("model.layers." + std::to_string(config_.layers) + ".input_layernorm.weight"))
      throw from.configuration().error("num_hidden_layers", "is less than the layers of the file");

    // One by one: no memory is taken for what the file does not have.
    for (index_t i = 0; i < config_.layers; ++i) {
      layer& l = layers_.emplace_back();
      const std::string name = "model.layers." + std::to_string(i) + '.';
      l.attention_norm = weights(from, name + "input_layernorm.weight", {width});
      l.mlp_norm = weights(from, name + "post_attention_layernorm.weight", {width});
      l.gate = linear(from, name + "mlp.gate_proj", mlp, width), l.up = linear(from, name + "mlp.up_proj", mlp, width);
      l.down = linear(from, name + "mlp.down_proj", width, mlp);
      l.attention = attention(from, name + "self_attn.", i);

      diffattn::kv_cache_config c = to_cache_config(l.attention.config);
      c.keys = c.values = cache, c.capacity = capacity;
      throw_if_error(check(c));
      l.memory = std::make_unique<diffattn::owned_workspace>(kv_cache_bytes(c));
      throw_if_error(l.cache.open(c, l.memory->view()));
    }

    const index_t pairs = config_.rope.width / 2;
    cos_.resize(static_cast<std::size_t>(capacity * pairs)), sin_.resize(cos_.size());
    config_.rope.sequence_length = length > 0 ? length : capacity;
    throw_if_error(fill_rope_table(config_.rope, 0, capacity, cos_.data(), sin_.data()));
  }

  const model_config& configuration() const { return config_; }
  index_t length() const { return layers_.front().cache.length(0); }
  std::size_t cache_bytes() const { return layers_.front().memory->view().bytes * layers_.size(); }
  /// Forgets the tokens from `length` on.
  void truncate(index_t length) {
    for (layer& l : layers_) throw_if_error(l.cache.truncate(0, length));
  }

  /// Appends tokens; the logits [last, vocabulary] of the last ones.
  template <class Executor>
  const matrix& forward(const std::vector<std::int32_t>& tokens, Executor& executor, index_t last = 1,
                        const observer& observe = {}) {
    if (tokens.empty()) throw std::invalid_argument("no tokens");
    const index_t n = static_cast<index_t>(tokens.size()), width = config_.attention.model_width, mlp = config_.mlp_width;
    if (n > capacity_ - length()) throw std::length_error("more tokens than the cache has room for");
    x_.resize(n, width), y_.resize(n, width), z_.resize(n, width), gate_.resize(n, mlp), up_.resize(n, mlp);
    for (index_t t = 0; t < n; ++t) {
      const std::int32_t token = tokens[static_cast<std::size_t>(t)];
      if (token < 0 || token >= config_.vocabulary)
        throw std::out_of_range("token " + std::to_string(token) + " is not in the vocabulary");
      x_.row(t) = Eigen::Map<const Eigen::RowVectorXf>(embedding_ + token * width, width);
    }
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      layer& l = layers_[i];
      norm(x_, l.attention_norm, y_);
      l.attention.cache = &l.cache;
      l.attention.x = std::as_const(*this).rows(y_), l.attention.out = rows(z_);
      l.attention.rope = {cos_.data(), sin_.data(), capacity_, config_.rope.width, diffattn::rope_style::half};
      scratch_.resize(std::max(scratch_.size(), workspace_bytes(l.attention, executor.workers(), capacity_)));
      throw_if_error(diffattn::forward(l.attention, {scratch_.data(), scratch_.size()}, executor));
      if (observe) observe(static_cast<index_t>(i), l.attention);
      x_ += z_;

      norm(x_, l.mlp_norm, y_);
      multiply(y_, {{l.gate, mlp, {gate_.data(), mlp}}, {l.up, mlp, {up_.data(), mlp}}}, executor);
      up_.array() *= gate_.array() / (1 + (-gate_.array()).exp());  // silu
      multiply(up_, {{l.down, width, {z_.data(), width}}}, executor);
      x_ += z_;
    }
    const index_t wanted = std::min(last, n);
    y_.resize(wanted, width), logits_.resize(wanted, config_.vocabulary);
    norm(x_.bottomRows(wanted), norm_, y_);
    multiply(y_, {{{head_, nullptr}, config_.vocabulary, {logits_.data(), config_.vocabulary}}}, executor);
    return logits_;
  }

 private:
  struct layer {
    const float *attention_norm = nullptr, *mlp_norm = nullptr;
    diffattn::linear<float> gate, up, down;
    layer_args attention;
    diffattn::kv_cache cache;
    std::unique_ptr<diffattn::owned_workspace> memory;
  };

  layer_args attention(const checkpoint& from, const std::string& name, index_t i) {
    const diffattn::layer_shape& s = config_.attention;
    const index_t q = s.query_heads * s.head_width, kv = s.key_heads * s.head_width;
    layer_args a;
    a.config = config_.differential ? diffattn::models::diffllama(s, i, config_.eps) : diffattn::models::llama(s);
    a.weights.q = linear(from, name + "q_proj", q, s.model_width),
    a.weights.k = linear(from, name + "k_proj", kv, s.model_width);
    a.weights.v = linear(from, name + "v_proj", kv, s.model_width),
    a.weights.out = linear(from, name + "o_proj", s.model_width, q);
    if (config_.attention_bias && !from.has(name + "q_proj.bias"))
      throw from.configuration().error("attention_bias", "is true, but the file has no " + name + "q_proj.bias");
    if (!config_.differential && from.has(name + "lambda_q1"))
      throw from.configuration().error("architecture", "is LlamaForCausalLM, but the file has " + name + "lambda_q1");
    if (config_.differential) {
      a.weights.lambda_q1 = weights(from, name + "lambda_q1", {s.head_width});
      a.weights.lambda_k1 = weights(from, name + "lambda_k1", {s.head_width});
      a.weights.lambda_q2 = weights(from, name + "lambda_q2", {s.head_width});
      a.weights.lambda_k2 = weights(from, name + "lambda_k2", {s.head_width});
    }
    return a;
  }

  diffattn::linear<float> linear(const checkpoint& from, const std::string& name, index_t outputs, index_t inputs) {
    diffattn::linear<float> l;
    l.weight = weights(from, name + ".weight", {outputs, inputs});
    if (from.has(name + ".bias")) l.bias = weights(from, name + ".bias", {outputs});
    return l;
  }

  /// Where the numbers of a tensor lie as floats: in the file if they can be used there, else converted.
  const float* weights(const checkpoint& from, const std::string& name, const std::vector<std::int64_t>& shape) {
    const tensor_info& t = from.expect(name, shape);
    if (t.type == dtype::f32 && reinterpret_cast<std::uintptr_t>(t.data) % alignof(float) == 0)
      return reinterpret_cast<const float*>(t.data);
    converted_.push_back(from.read<float>(name, shape));
    return converted_.back().data();
  }

  diffattn::tensor_view<float> rows(matrix& m) const { return diffattn::view(m, 1); }
  diffattn::tensor_view<const float> rows(const matrix& m) const { return diffattn::view(m, 1); }

  template <class X>
  void norm(const X& x, const float* weight, matrix& y) const {
    const Eigen::Map<const Eigen::RowVectorXf> w(weight, x.cols());
    for (index_t t = 0; t < x.rows(); ++t) {
      const float mean = x.row(t).squaredNorm() / static_cast<float>(x.cols());
      y.row(t) = x.row(t).cwiseProduct(w) / std::sqrt(mean + static_cast<float>(config_.eps));
    }
  }

  template <int N, class Executor>
  static void multiply(const matrix& x, const diffattn::layers::projection<float> (&products)[N], Executor& executor) {
    diffattn::layers::project<float>({x.data(), x.cols()}, x.rows(), x.cols(), products, executor);
  }

  model_config config_;
  index_t capacity_;
  const float *embedding_ = nullptr, *norm_ = nullptr, *head_ = nullptr;
  std::vector<layer> layers_;  // complete when the constructor is done: their addresses do not change any more
  std::vector<std::vector<float>> converted_;
  std::vector<float> cos_, sin_;
  std::vector<unsigned char> scratch_;
  matrix x_, y_, z_, gate_, up_, logits_;
};

/// The most probable token after the last one. Throws std::runtime_error if they are not finite: broken weights.
inline std::int32_t argmax(const matrix& logits) {
  if (!logits.row(logits.rows() - 1).allFinite()) throw std::runtime_error("the logits are not finite");
  index_t best = 0;
  logits.row(logits.rows() - 1).maxCoeff(&best);
  return static_cast<std::int32_t>(best);
}

}  // namespace llm
