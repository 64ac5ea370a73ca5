// SPDX-License-Identifier: MIT
// Any bytes as a safetensors file, a config.json and an index: they are read or refused with a load_error, nothing else.
// For libFuzzer (-fsanitize=fuzzer), or with replay.cpp.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

#include "llm/checkpoint.hpp"

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
  });
  allow_errors([&] { read_settings(llm::config::parse(bytes, "config.json")); });
  allow_errors([&] { llm::parse_index(bytes, "index.json"); });
  return 0;
}
