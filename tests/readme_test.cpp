// SPDX-License-Identifier: MIT

// What the README shows is what the examples compile and run.

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

namespace {

std::string read(const std::string& path) {
  std::ifstream file(std::string(DIFFATTN_INCLUDE_DIR) + "/../" + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

TEST(Readme, ShowsTheFirstExample) {
  const std::string example = read("examples/01_forward.cpp"), begin = "// [readme]\n", end = "// [/readme]";
  const std::size_t from = example.find(begin), to = example.find(end);
  ASSERT_NE(from, std::string::npos);
  ASSERT_NE(to, std::string::npos);
  const std::string shown = example.substr(from + begin.size(), to - from - begin.size());
  EXPECT_NE(read("README.md").find("```cpp\n" + shown + "```"), std::string::npos);
}

TEST(Readme, GivesTheCommands) {
  const std::string text = read("README.md");
  for (const char* preset : {"test", "bench"})
    EXPECT_NE(text.find(std::string("sh cmake/install-deps.sh && cmake --workflow --preset ") + preset), std::string::npos);
}

}  // namespace
