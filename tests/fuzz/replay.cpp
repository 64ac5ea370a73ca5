// SPDX-License-Identifier: MIT
// Runs a fuzz target over files, and over those in directories, for compilers without libFuzzer.
//
//   replay corpus/checkpoint crash-1234

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  namespace fs = std::filesystem;
  std::vector<fs::path> files;
  for (int i = 1; i < argc; ++i) {
    if (!fs::is_directory(argv[i])) {
      files.emplace_back(argv[i]);
      continue;
    }
    for (const auto& entry : fs::recursive_directory_iterator(argv[i]))
      if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const fs::path& path : files) {
    std::ifstream file(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    if (!file) {
      std::fprintf(stderr, "replay: cannot read %s\n", path.string().c_str());
      return 1;
    }
    // Flushed before the call: after a crash it is the last line.
    std::printf("%s\n", path.string().c_str());
    std::fflush(stdout);
    // Of exactly that size, so that a sanitizer sees what is read beyond.
    std::vector<std::uint8_t> bytes(text.size());
    std::copy(text.begin(), text.end(), bytes.begin());
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("replay: %zu files\n", files.size());
  return files.empty() ? 1 : 0;  // a misspelt directory must not pass
}
