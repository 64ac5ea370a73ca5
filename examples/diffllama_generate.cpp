// SPDX-License-Identifier: MIT

// Runs a language model from its Hugging Face checkpoint: DiffLlamaForCausalLM by differential attention, LlamaForCausalLM by
// standard attention, everything else being equal. The text goes to standard output, what it cost to standard error.
//
//   diffllama_generate CHECKPOINT.safetensors --prompt "In the beginning"

#define EIGEN_USE_THREADS

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <diffattn/executor/eigen_thread_pool.hpp>
#include <fstream>
#include <iostream>
#include <iterator>

#include "llm/decoder.hpp"
#include "llm/standard_check.hpp"

namespace {

using diffattn::index_t;
using token_list = std::vector<std::int32_t>;

struct options {
  std::string checkpoint, prompt, prompt_file;
  token_list prompt_ids;
  index_t tokens = 100, context = 0;
  diffattn::storage cache = diffattn::storage::f32;
  int threads = 1;
  bool standard_check = false;
};

/// Prompt tokens of a call: enough to fill the kernels, few enough for the bar to move and the buffers to stay small.
constexpr std::size_t chunk = 512;

const std::map<std::string, diffattn::storage> storages = {{"f32", diffattn::storage::f32},
                                                           {"f16", diffattn::storage::f16},
                                                           {"bf16", diffattn::storage::bf16},
                                                           {"int8", diffattn::storage::int8},
                                                           {"q6", diffattn::storage::q6}};

/// One line on the terminal, redrawn; nothing into files.
void show_progress(std::size_t done, std::size_t all) {
  if (all <= chunk || !isatty(STDERR_FILENO)) return;
  constexpr std::size_t width = 40;
  const std::size_t filled = done * width / all;
  std::fprintf(stderr, "\rprompt [%s%s] %zu/%zu%s", std::string(filled, '#').c_str(), std::string(width - filled, ' ').c_str(),
               done, all, done == all ? "\n" : "");
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

token_list read_prompt(const options& o, const llm::checkpoint& from) {
  if (!o.prompt_ids.empty()) return o.prompt_ids;
  const llm::config& c = from.configuration();
  if (c.text("tokenizer", c.integer("vocab_size") == 256 ? "byte" : "") != "byte")
    throw std::runtime_error(
        "this checkpoint does not use bytes as tokens, and tokenizers are not part of this example: give "
        "--prompt-ids, and read the tokens that are printed");
  std::string text = o.prompt;
  if (!o.prompt_file.empty()) {
    std::ifstream file(o.prompt_file, std::ios::binary);
    if (!file) throw std::runtime_error("cannot read " + o.prompt_file);
    text.assign(std::istreambuf_iterator<char>(file), {});
  }
  if (text.empty()) throw std::runtime_error("the prompt is empty");
  token_list ids;
  for (const char byte : text) ids.push_back(static_cast<unsigned char>(byte));
  return ids;
}

template <class Executor>
bool check_against_standard(llm::decoder& model, const token_list& prompt, Executor& executor) {
  const token_list part(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(std::min(prompt.size(), chunk)));
  bool good = true;
  model.forward(part, executor, 1, [&](index_t layer, const llm::decoder::layer_args& args) {
    // Both sides round each of the model_width terms of a projection and of the keys of a sum: 2^-24 for each term would be the
    // worst case of a sum; the norm enlarges what the difference of the maps has lost by 1/(1 - λ) at most a few times.
    const double bound = 4 * 0x1p-24 * static_cast<double>(args.config.model_width + args.x.tokens);
    const double found = llm::standard_difference(args);
    std::fprintf(stderr, "layer %2ld: differs from standard attention by %.1e of its size (bound %.1e)\n",
                 static_cast<long>(layer), found, bound);
    good &= found <= bound;
  });
  model.truncate(0);
  return good;
}

template <class Executor>
int generate(const options& o, Executor executor) {
  const llm::checkpoint from(o.checkpoint);
  const token_list prompt = read_prompt(o, from);
  const bool bytes = o.prompt_ids.empty();
  llm::decoder model(from, std::max(o.context, static_cast<index_t>(prompt.size()) + o.tokens), o.cache,
                     static_cast<index_t>(prompt.size()) + o.tokens);
  const llm::model_config& c = model.configuration();
  if (c.trained_positions > 0 && static_cast<index_t>(prompt.size()) + o.tokens > c.trained_positions)
    std::fprintf(stderr, "warning: more tokens than the %ld positions that the model was trained on\n",
                 static_cast<long>(c.trained_positions));
  if (o.standard_check && !check_against_standard(model, prompt, executor)) {
    std::fprintf(stderr, "the layers do not agree with standard attention\n");
    return 1;
  }

  const auto emit = [bytes](std::int32_t token) {
    if (bytes)
      std::cout.put(static_cast<char>(token));
    else
      std::cout << token << ' ';
    std::cout.flush();
  };
  for (const std::int32_t token : prompt) emit(token);

  auto start = std::chrono::steady_clock::now();
  std::int32_t next = 0;
  for (std::size_t at = 0; at < prompt.size(); at += chunk) {
    const std::size_t end = std::min(at + chunk, prompt.size());
    const token_list part(prompt.begin() + static_cast<std::ptrdiff_t>(at), prompt.begin() + static_cast<std::ptrdiff_t>(end));
    next = llm::argmax(model.forward(part, executor));
    show_progress(end, prompt.size());
  }
  const double prefill = seconds_since(start);

  start = std::chrono::steady_clock::now();
  index_t made = 0, steps = 0;
  for (; made < o.tokens && std::find(c.ends.begin(), c.ends.end(), next) == c.ends.end(); ++made) {
    emit(next);
    if (made + 1 < o.tokens) next = llm::argmax(model.forward({next}, executor)), ++steps;
  }
  const double decode = seconds_since(start);
  std::cout << '\n';

  const auto rate = [](auto n, double seconds) { return seconds > 0 ? static_cast<double>(n) / seconds : 0.0; };
  std::fprintf(
      stderr, "%s attention, %ld layers; prefill %zu tokens, %.0f tokens/s; decode %ld tokens, %.0f tokens/s; caches %.1f MB\n",
      c.differential ? "differential" : "standard", static_cast<long>(c.layers), prompt.size(), rate(prompt.size(), prefill),
      static_cast<long>(made), rate(steps, decode), static_cast<double>(model.cache_bytes()) / 1e6);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  options o;
  CLI::App app("Generates text with a DiffLlama or Llama checkpoint");
  app.add_option("checkpoint", o.checkpoint, "a .safetensors file, its index, or the directory of a model")->required();
  auto* const prompt = app.add_option("--prompt", o.prompt, "text to continue");
  auto* const file = app.add_option("--prompt-file", o.prompt_file, "file with the text to continue")->excludes(prompt);
  app.add_option("--prompt-ids", o.prompt_ids, "tokens to continue, as numbers")
      ->delimiter(',')
      ->excludes(prompt)
      ->excludes(file);
  app.add_option("--tokens", o.tokens, "tokens to generate")->check(CLI::Range(0, 1 << 24))->capture_default_str();
  app.add_option("--context", o.context, "room for this many tokens (default: prompt and tokens)")
      ->check(CLI::Range(0, 1 << 24));
  std::string type = "f32";
  app.add_option("--cache", type, "storage of keys and values")->check(CLI::IsMember(storages))->capture_default_str();
  app.add_option("--threads", o.threads, "threads")->check(CLI::Range(1, 1024))->capture_default_str();
  app.add_flag(
      "--standard-check", o.standard_check,
      "first recompute every attention layer, on up to 512 tokens of the prompt, by calls of standard attention (not for "
      "an odd number of key heads)");
  CLI11_PARSE(app, argc, argv);
  o.cache = storages.at(type);
  if (o.prompt.empty() && o.prompt_file.empty() && o.prompt_ids.empty()) {
    std::fprintf(stderr, "give --prompt, --prompt-file or --prompt-ids\n");
    return 2;
  }
  try {
    if (o.threads == 1) return generate(o, diffattn::serial_executor());
    Eigen::ThreadPool pool(o.threads);
    const Eigen::ThreadPoolDevice device(&pool, o.threads);
    return generate(o, diffattn::eigen_executor(device));
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr,
                 "diffllama_generate: not enough memory; fewer --tokens, a smaller --context or another --cache need less\n");
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "diffllama_generate: %s\n", error.what());
    return 1;
  }
}
