// SPDX-License-Identifier: MIT
// Any bytes as a safetensors file, a config.json and an index: they are read or refused with a load_error, nothing else. What a
// configuration says of a model and its rotation is possible then.
// For libFuzzer (-fsanitize=fuzzer), or with replay.cpp.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string_view>
#include <vector>

#include "llm/decoder.hpp"

namespace {

void allow_errors(const std::function<void()>& read) {
  try {
    read();
  } catch (const llm::load_error&) {
  }
}

void read_settings(const llm::config& config) {
  for (const char* const key : {"hidden_size", "rope_theta", "a", ""}) {
    allow_errors([&] { config.integer(key); });
    allow_errors([&] { config.number(key); });
    allow_errors([&] { config.text(key); });
    allow_errors([&] { config.flag(key); });
  }
  allow_errors([&] { config.architecture(); });
  allow_errors([&] {
    if (const auto section = config.section("rope_scaling")) section->number("factor");
  });
}

void read_model(const llm::config& config) {
  const llm::model_config model(config);
  if (model.attention.query_heads < 1 || model.attention.key_heads < 1 || model.attention.head_width < 1) std::abort();
  if (model.rope.width > 256) return;
  constexpr std::size_t positions = 3;
  std::vector<float> cos(positions * static_cast<std::size_t>(model.rope.width) / 2), sin(cos.size());
  if (fill_rope_table(model.rope, 0, positions, cos.data(), sin.data()) != diffattn::status::ok) std::abort();
  for (const std::vector<float>* table : {&cos, &sin})
    for (const float x : *table)
      if (std::isnan(x)) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  allow_errors([&] {
    const llm::safetensors file(bytes, "file");
    for (const std::string& name : file.names()) {
      file.read<float>(name);
      file.read<double>(name);
    }
    read_settings(llm::config(file.metadata(), "file"));
    read_model(llm::config(file.metadata(), "file"));
  });
  allow_errors([&] { read_settings(llm::config::parse(bytes, "config.json")); });
  allow_errors([&] { read_model(llm::config::parse(bytes, "config.json")); });
  allow_errors([&] { llm::parse_index(bytes, "index.json"); });
  return 0;
}
