// SPDX-License-Identifier: MIT
// The rooms of the library: a header includes only from its own room or from lower ones. Read from the #include lines.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

struct header {
  std::string text;                ///< without comments
  std::vector<std::string> own;    ///< included headers of the library, as paths from its root
  std::vector<std::string> other;  ///< included names in angle brackets
};

std::map<std::string, header> read_headers() {
  const fs::path root = fs::path(DIFFATTN_INCLUDE_DIR) / "diffattn";
  std::map<std::string, header> all;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path());
    header h;
    for (std::string line; std::getline(file, line);) {
      static const std::regex include(R"(^\s*#\s*include\s*([<"])([^>"]+)[>"])");
      std::smatch match;
      if (std::regex_search(line, match, include)) {
        if (match[1] == "<")
          h.other.push_back(match[2]);
        else
          h.own.push_back(
              (entry.path().parent_path() / match[2].str()).lexically_normal().lexically_relative(root).generic_string());
      }
      h.text += line.substr(0, line.find("//")) + "\n";
    }
    all[entry.path().lexically_relative(root).generic_string()] = h;
  }
  return all;
}

enum room { descriptions, simd, kernel, schedule, calls, models, edges, unknown };

room room_of(const std::string& path) {
  static const std::set<std::string> described = {"config.hpp",   "tensor.hpp", "heads.hpp",     "lambda.hpp", "mask.hpp",
                                                  "logits.hpp",   "norm.hpp",   "arguments.hpp", "status.hpp", "workspace.hpp",
                                                  "executor.hpp", "rope.hpp",   "storage.hpp",   "kv_view.hpp"};
  static const std::set<std::string> called = {"check.hpp",           "check_memory.hpp", "check_masks.hpp",
                                               "check_keys.hpp",      "forward.hpp",      "attention.hpp",
                                               "kv_cache_config.hpp", "kv_cache.hpp",     "merge.hpp"};
  if (described.count(path)) return descriptions;
  if (path.rfind("simd/", 0) == 0) return simd;
  if (path.rfind("kernel/", 0) == 0) return kernel;
  if (path.rfind("schedule/", 0) == 0) return schedule;
  if (called.count(path)) return calls;
  if (path.rfind("models/", 0) == 0) return models;
  if (path == "eigen.hpp" || path == "diffattn.hpp" || path.rfind("executor/", 0) == 0) return edges;
  return unknown;
}

TEST(Layering, EveryHeaderHasARoom) {
  const auto headers = read_headers();
  EXPECT_GE(headers.size(), 25u);
  for (const auto& [path, h] : headers) EXPECT_NE(room_of(path), unknown) << path << ": give it a room";
}

TEST(Layering, IncludesGoDown) {
  const auto headers = read_headers();
  for (const auto& [path, h] : headers)
    for (const std::string& included : h.own) {
      EXPECT_TRUE(headers.count(included)) << path << " includes " << included << ", which is not there";
      EXPECT_LE(room_of(included), room_of(path)) << path << " includes " << included;
      // Only the umbrella includes an edge.
      if (room_of(included) == edges) {
        EXPECT_EQ(path, "diffattn.hpp") << "includes " << included;
      }
    }
}

TEST(Layering, NoHeaderIncludesItselfThroughOthers) {
  const auto headers = read_headers();
  for (const auto& [start, unused] : headers) {
    std::set<std::string> reached;
    std::vector<std::string> open = {start};
    while (!open.empty()) {
      const std::string at = open.back();
      open.pop_back();
      const auto found = headers.find(at);
      if (found == headers.end()) continue;
      for (const std::string& next : found->second.own) {
        EXPECT_NE(next, start) << "through " << at;
        if (reached.insert(next).second) open.push_back(next);
      }
    }
  }
}

// Code that is compiled for one instruction set must not bring inline functions of others into the program.
TEST(Layering, KernelsUseNoEigenAndLittleOfTheStandardLibrary) {
  static const std::set<std::string> allowed = {"cmath", "cstddef",     "cstdint", "cstring",        "limits",
                                                "new",   "type_traits", "utility", "xsimd/xsimd.hpp"};
  for (const auto& [path, h] : read_headers()) {
    const room r = room_of(path);
    if (r == simd || r == kernel || r == schedule) {
      for (const std::string& name : h.other) EXPECT_TRUE(allowed.count(name)) << path << " includes <" << name << ">";
      EXPECT_EQ(h.text.find("Eigen"), std::string::npos) << path;
    }
    for (const std::string& name : h.other) {
      EXPECT_TRUE(r == edges || r == models || name.find("Eigen") == std::string::npos) << path << " includes <" << name << ">";
    }
  }
}

TEST(Layering, OnlySimdKnowsXsimdAndIntrinsics) {
  static const std::regex intrinsic(R"(xsimd|\b_mm\d*_|\b__m\d+|immintrin|arm_neon|\bv(ld|st)1q_)");
  for (const auto& [path, h] : read_headers())
    if (room_of(path) != simd) {
      std::smatch match;
      EXPECT_FALSE(std::regex_search(h.text, match, intrinsic)) << path << ": " << match.str();
    }
}

TEST(Layering, EveryHeaderIsGuardedAndLicensed) {
  for (const auto& [path, h] : read_headers()) {
    EXPECT_NE(h.text.find("#pragma once"), std::string::npos) << path;
    std::ifstream file(fs::path(DIFFATTN_INCLUDE_DIR) / "diffattn" / path);
    std::string first;
    std::getline(file, first);
    EXPECT_EQ(first, "// SPDX-License-Identifier: MIT") << path;
  }
}

}  // namespace
