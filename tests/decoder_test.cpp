// SPDX-License-Identifier: MIT
// A trained differential model and its standard twin (examples/data), run from their checkpoints by the example's decoder and
// held to the logits that PyTorch computes in double from the same weights.

#define EIGEN_USE_THREADS

#include <gtest/gtest.h>

#include <diffattn/executor/eigen_thread_pool.hpp>
#include <fstream>
#include <llm/decoder.hpp>
#include <llm/standard_check.hpp>
#include <unordered_map>

namespace {

using diffattn::index_t;
using diffattn::storage;
using token_list = std::vector<std::int32_t>;

diffattn::serial_executor serial;

struct prompt {
  token_list tokens, greedy;
  llm::matrix logits;  // of the last 8 tokens
};

class Decoder : public testing::TestWithParam<const char*> {
 protected:
  static std::string path(const std::string& prefix = "") {
    return std::string(DIFFATTN_MODEL_DATA) + "/" + prefix + GetParam() + ".safetensors";
  }

  std::vector<prompt> prompts() const {
    const llm::safetensors expected(path("expected_"));
    std::vector<prompt> all;
    for (int i = 0; expected.has("prompt" + std::to_string(i) + ".tokens"); ++i) {
      const std::string name = "prompt" + std::to_string(i);
      const auto integers = [&](const std::string& what) {
        const std::vector<double> values = expected.read<double>(name + what);
        return token_list(values.begin(), values.end());
      };
      const std::vector<double> logits = expected.read<double>(name + ".logits");
      using table = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
      all.push_back({integers(".tokens"), integers(".greedy"),
                     Eigen::Map<const table>(logits.data(), static_cast<index_t>(logits.size()) / 256, 256).cast<float>()});
    }
    return all;
  }

  llm::checkpoint checkpoint{path()};
};

/// What float may differ from double in a logit. Rounding errors of a sum of n terms grow as √n; a token passes, layer by
/// layer, five sums of `width` terms or fewer, one of the MLP and one over the keys, and its scores, some tens large, keep
/// their absolute error in the exponent. All relative to the largest logit.
double bound(const llm::decoder& model, index_t keys, const llm::matrix& logits) {
  const llm::model_config& c = model.configuration();
  const double width = static_cast<double>(c.attention.model_width), mlp = static_cast<double>(c.mlp_width);
  const double sums = 5 * std::sqrt(width) + std::sqrt(mlp) + std::sqrt(static_cast<double>(keys)) + 25;
  return 0x1p-24 * static_cast<double>(c.layers) * sums * static_cast<double>(logits.cwiseAbs().maxCoeff());
}

double distance(const llm::matrix& a, const llm::matrix& b) {
  return static_cast<double>((a - b).cwiseAbs().maxCoeff());
}

TEST_P(Decoder, LogitsAreThoseOfPyTorch) {
  for (const prompt& p : prompts()) {
    llm::decoder model(checkpoint, 400);
    const llm::matrix& found = model.forward(p.tokens, serial, 8);
    ASSERT_EQ(found.rows(), 8);
    EXPECT_LE(distance(found, p.logits), bound(model, model.length(), p.logits)) << p.tokens.size();
  }
}

TEST_P(Decoder, ContinuesAsPyTorchDoes) {
  for (const prompt& p : prompts()) {
    llm::decoder model(checkpoint, 400);
    token_list greedy = {llm::argmax(model.forward(p.tokens, serial))};
    while (greedy.size() < p.greedy.size()) greedy.push_back(llm::argmax(model.forward({greedy.back()}, serial)));
    EXPECT_EQ(greedy, p.greedy);
  }
}

// One call, chunks of any size and single tokens are the same model.
TEST_P(Decoder, DecodingEqualsPrefill) {
  for (const prompt& p : prompts())
    for (const std::size_t chunk : {1u, 2u, 7u, 8u, 9u, 64u}) {
      llm::decoder model(checkpoint, static_cast<index_t>(p.tokens.size()));
      llm::matrix all(0, 256);
      for (std::size_t at = 0; at < p.tokens.size(); at += chunk) {
        const std::size_t end = std::min(at + chunk, p.tokens.size());
        const token_list part(p.tokens.begin() + static_cast<long>(at), p.tokens.begin() + static_cast<long>(end));
        const llm::matrix& logits = model.forward(part, serial, static_cast<index_t>(chunk));
        all.conservativeResize(static_cast<index_t>(end), 256);
        all.bottomRows(logits.rows()) = logits;
      }
      EXPECT_LE(distance(all.bottomRows(8), p.logits), bound(model, model.length(), p.logits))
          << p.tokens.size() << " by " << chunk;
    }
}

// A stored number errs by a fraction e of itself, or of the largest one beside it. Through a layer that is e of the values and,
// in the exponent, e of scores whose terms are some times larger than their sum; both relative to what attention adds to the
// stream.
TEST_P(Decoder, EveryCacheTypeStaysWithinItsError) {
  const std::pair<storage, double> types[] = {
      {storage::f16, 0x1p-11}, {storage::bf16, 0x1p-8}, {storage::int8, 1.0 / 254}, {storage::q6, 1 / 61.5}};
  for (const auto& [type, error] : types)
    for (const prompt& p : prompts()) {
      llm::decoder model(checkpoint, 400, type);
      const double largest = static_cast<double>(p.logits.cwiseAbs().maxCoeff());
      const double found = distance(model.forward(p.tokens, serial, 8), p.logits);
      EXPECT_LE(found, 2 * static_cast<double>(model.configuration().layers) * error * largest)
          << "type " << static_cast<int>(type) << ", " << p.tokens.size();
    }
}

TEST_P(Decoder, ThreadsChangeNoBit) {
  const prompt p = prompts().back();
  llm::decoder model(checkpoint, 400);
  const llm::matrix expected = model.forward(p.tokens, serial, 8), next = model.forward({65}, serial);
  for (const int threads : {2, 3}) {
    Eigen::ThreadPool pool(threads);
    const Eigen::ThreadPoolDevice device(&pool, threads);
    const diffattn::eigen_executor executor(device);
    llm::decoder other(checkpoint, 400);
    EXPECT_EQ(other.forward(p.tokens, executor, 8), expected);
    EXPECT_EQ(other.forward({65}, executor), next);
  }
}

TEST_P(Decoder, ForgetsWhatIsTruncated) {
  const prompt p = prompts().front();
  llm::decoder model(checkpoint, 400);
  model.forward(p.tokens, serial);
  const llm::matrix expected = model.forward({65}, serial);
  for (const std::int32_t wrong : {1, 2, 3}) model.forward({wrong}, serial);
  model.truncate(static_cast<index_t>(p.tokens.size()));
  EXPECT_EQ(model.forward({65}, serial), expected);
}

// A checkpoint with one thing wrong: a few bytes of its header exchanged for as many others.
TEST_P(Decoder, RefusesACheckpointThatDoesNotFit) {
  std::ifstream file(path(), std::ios::binary);
  const std::string good((std::istreambuf_iterator<char>(file)), {});
  const auto error_of = [&](const std::string& from, const std::string& to) -> std::string {
    EXPECT_EQ(from.size(), to.size());
    std::string bad = good;
    const std::size_t at = bad.find(from);
    if (at == bad.npos) return "no " + from;
    const std::string name = testing::TempDir() + "diffattn_" + GetParam() + ".safetensors";
    std::ofstream(name, std::ios::binary) << bad.replace(at, from.size(), to);
    try {
      const llm::checkpoint broken(name);
      llm::decoder model(broken, 8);
      return "taken";
    } catch (const std::exception& e) {
      return e.what();
    }
  };
  const auto expect = [&](const std::string& from, const std::string& to, const std::string& word) {
    const std::string error = error_of(from, to);
    EXPECT_NE(error.find(word), std::string::npos) << from << " -> " << to << ": " << error;
  };
  expect("lm_head.weight", "xx_head.weight", "lm_head.weight");  // tied only if the configuration says so
  expect("model.norm.weight", "model.horn.weight", "model.norm.weight");
  expect("layers.3.self_attn.q_proj", "layers.3.self_attn.x_proj", "layers.3.self_attn.q_proj.weight");
  expect(R"("num_hidden_layers":"4")", R"("num_hidden_layers":"3")", "num_hidden_layers");
  expect(R"("num_hidden_layers":"4")", R"("num_hidden_layers":"5")", "layers.4");
  expect(R"("num_attention_heads":"8")", R"("num_attention_heads":"4")", "[128, 128]");
  expect(R"("vocab_size":"256")", R"("vocab_size":"255")", "[256, 128]");
  if (std::string(GetParam()) == "differential")
    expect("layers.0.self_attn.lambda_q1", "layers.0.self_attn.lambda_q9", "lambda_q1");
  else
    expect("layers.0.input_layernorm.weight", "layers.0.self_attn.lambda_q1xxx", "input_layernorm");
}

// The published way, map by map, is another order of the same sums.
TEST_P(Decoder, LayersEqualTheCompositionOfStandardAttention) {
  const prompt p = prompts().back();
  llm::decoder model(checkpoint, 400);
  index_t seen = 0;
  model.forward(p.tokens, serial, 1, [&](index_t, const llm::decoder::layer_args& args) {
    EXPECT_LE(llm::standard_difference(args), 1e-5);
    ++seen;
  });
  EXPECT_EQ(seen, 4);
}

TEST_P(Decoder, RefusesTokensThatItCannotTake) {
  llm::decoder model(checkpoint, 4);
  EXPECT_THROW(model.forward({256}, serial), std::out_of_range);
  EXPECT_THROW(model.forward({-1}, serial), std::out_of_range);
  EXPECT_THROW(model.forward({1, 2, 3, 4, 5}, serial), std::length_error);
  EXPECT_THROW(model.forward({}, serial), std::invalid_argument);
  EXPECT_NO_THROW(model.forward({1, 2, 3, 4}, serial));
  EXPECT_THROW(model.forward({1}, serial), std::length_error);
}

INSTANTIATE_TEST_SUITE_P(Twins, Decoder, testing::Values("differential", "standard"),
                         [](const auto& instance) { return std::string(instance.param); });

const nlohmann::json settings = {{"architectures", nlohmann::json::array({"DiffLlamaForCausalLM"})},
                                 {"hidden_size", 128},
                                 {"intermediate_size", 352},
                                 {"num_hidden_layers", 4},
                                 {"num_attention_heads", 8},
                                 {"vocab_size", 256}};

llm::model_config read(const nlohmann::json& changes) {
  nlohmann::json all = settings;
  all.merge_patch(changes);
  return llm::model_config(llm::config(all, "config.json"));
}

TEST(ModelConfig, FillsInWhatTransformersDoes) {
  const llm::model_config c = read(nlohmann::json::object());
  EXPECT_TRUE(c.differential);
  EXPECT_EQ(c.attention.key_heads, 8);
  EXPECT_EQ(c.attention.head_width, 16);
  EXPECT_EQ(c.rope.width, 16);
  EXPECT_EQ(c.rope.base, 10000);
  EXPECT_EQ(c.eps, 1e-5);
  EXPECT_FALSE(c.tied);
  EXPECT_EQ(read({{"architectures", nlohmann::json::array({"LlamaForCausalLM"})}}).eps, 1e-6);
  EXPECT_TRUE(c.ends.empty());
  EXPECT_FALSE(read({{"architectures", nlohmann::json::array({"LlamaForCausalLM"})}}).differential);
  EXPECT_EQ(read({{"eos_token_id", {1, 2}}}).ends, std::vector<index_t>({1, 2}));
  EXPECT_EQ(read({{"eos_token_id", 2}}).ends, std::vector<index_t>({2}));
}

TEST(ModelConfig, ReadsRotationsOldAndNew) {
  const nlohmann::json llama3 = {{"rope_type", "llama3"},
                                 {"factor", 8.0},
                                 {"low_freq_factor", 1.0},
                                 {"high_freq_factor", 4.0},
                                 {"original_max_position_embeddings", 8192}};
  const llm::model_config old = read({{"rope_theta", 500000.0}, {"rope_scaling", llama3}});
  EXPECT_EQ(old.rope.scaling, diffattn::rope_scaling::llama3);
  EXPECT_EQ(old.rope.base, 500000);
  EXPECT_EQ(old.rope.original_positions, 8192);
  nlohmann::json with_base = llama3;
  with_base["rope_theta"] = 500000.0;
  const llm::model_config now = read({{"rope_parameters", with_base}});
  EXPECT_EQ(now.rope.scaling, diffattn::rope_scaling::llama3);
  EXPECT_EQ(now.rope.base, 500000);
  EXPECT_EQ(read({{"rope_scaling", {{"type", "linear"}, {"factor", 2}}}}).rope.scaling, diffattn::rope_scaling::linear);
  EXPECT_EQ(read({{"rope_scaling", nullptr}}).rope.scaling, diffattn::rope_scaling::none);
}

TEST(ModelConfig, SaysWhatIsWrong) {
  const std::pair<nlohmann::json, const char*> wrong[] = {
      {{{"architectures", nlohmann::json::array({"MambaForCausalLM"})}}, "architecture"},
      {{{"hidden_size", nullptr}}, R"("hidden_size" is missing)"},
      {{{"hidden_size", 0}}, "hidden_size"},
      {{{"hidden_size", -128}}, "hidden_size"},
      {{{"hidden_size", 1e30}}, "hidden_size"},
      {{{"hidden_size", 100}}, "num_attention_heads"},
      {{{"num_attention_heads", 3.5}}, "num_attention_heads"},
      {{{"num_hidden_layers", "many"}}, "num_hidden_layers"},
      {{{"rms_norm_eps", -1}}, "rms_norm_eps"},
      {{{"rope_theta", 0}}, "rope_theta"},
      {{{"hidden_act", "gelu"}}, "hidden_act"},
      {{{"partial_rotary_factor", 2}}, "partial_rotary_factor"},
      {{{"partial_rotary_factor", 1e300}}, "partial_rotary_factor"},
      {{{"tie_word_embeddings", 3}}, "tie_word_embeddings"},
      {{{"quantization_config", {{"bits", 4}}}}, "quantization_config"},
      {{{"rope_scaling", {{"type", "longrope"}, {"factor", 2}}}}, "longrope"},
      {{{"rope_scaling", {{"type", "linear"}}}}, "factor"},
      {{{"rope_scaling", "linear"}}, "rope_scaling"},
      {{{"eos_token_id", "end"}}, "eos_token_id"}};
  for (const auto& [change, word] : wrong) {
    try {
      read(change);
      ADD_FAILURE() << change << " was taken";
    } catch (const llm::load_error& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  }
}

}  // namespace
