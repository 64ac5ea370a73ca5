// SPDX-License-Identifier: MIT
// diffattn_golden FILE... [--out DIR] [--level kernel|layer]: runs files of the golden format (tests/golden) in float32, each
// as its metadata say, and compares with the results that they hold. Prints "case max_abs_err tolerance ok|FAIL" for each.

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "support/golden_layer.hpp"

namespace {

namespace fs = std::filesystem;

struct options {
  std::vector<std::string> files;
  std::string out, level = "kernel";
};

/// The name of a case, which becomes that of a file.
std::string name_of(const test::golden_file& f) {
  if (!f.says("case")) return fs::path(f.path()).stem().string();
  const std::string name = f.text("case");
  const bool is_plain =
      name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.+-") == name.npos;
  if (name.empty() || name[0] == '.' || !is_plain) throw f.error("case", "is not a plain name");
  return name;
}

void write(const fs::path& path, const std::vector<float>& numbers) {
  fs::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(numbers.data()), static_cast<std::streamsize>(numbers.size() * sizeof(float)));
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

/// Level is golden_case or golden_layer. Within the tolerance?
template <class Level>
bool measure(const test::golden_layout& c, const Level& level, const options& o) {
  const std::string name = name_of(c.file);
  const std::vector<float> at_once = level.run();
  const auto error_of = [&](const std::vector<float>& found) {
    return test::largest_error(found, c.expected(level.result(), std::vector<double>(found.begin(), found.end())));
  };
  const double tolerance = test::tolerance_of(c.file, level.result());
  double error = error_of(at_once);
  if (!c.pieces.empty())
    if (const double replayed = error_of(level.replay()); replayed > error || std::isnan(replayed)) error = replayed;
  const bool is_ok = error <= tolerance;
  if (!o.out.empty()) write(fs::path(o.out) / (name + ".bin"), at_once);
  std::printf("%s %.3e %.3e %s\n", name.c_str(), error, tolerance, is_ok ? "ok" : "FAIL");
  return is_ok;
}

bool run(const std::string& path, const options& o) {
  try {
    test::golden_case<float> c(path);
    return o.level == "kernel" ? measure(c, c, o) : measure(c, test::golden_layer<float>(c), o);
  } catch (const llm::load_error& e) {  // names the file
    std::fprintf(stderr, "%s\n", e.what());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", path.c_str(), e.what());
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  options o;
  CLI::App app("Runs golden files in float32 and prints for each: case max_abs_err tolerance ok|FAIL.");
  app.add_option("FILE", o.files, "safetensors files of format diffattn-golden/1")->required();
  app.add_option("--out", o.out, "directory for DIR/<case>.bin: the result as raw float32")->type_name("DIR");
  app.add_option("--level", o.level, "what is run: the attention call, or the whole layer")
      ->check(CLI::IsMember({"kernel", "layer"}))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  bool is_ok = true;
  for (const std::string& file : o.files) is_ok &= run(file, o);
  return is_ok ? 0 : 1;
}
