// SPDX-License-Identifier: MIT
// The program diffattn_golden, run as a user would: on all golden files, and on copies of them with something wrong.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/golden.hpp"

namespace {

namespace fs = std::filesystem;

const fs::path golden = DIFFATTN_GOLDEN_DIR;

/// A directory that goes with the test.
class scratch {
 public:
  scratch() {
    std::string name = (fs::temp_directory_path() / "diffattn_golden_XXXXXX").string();
    if (!::mkdtemp(name.data())) throw std::runtime_error("no temporary directory");
    path = name;
  }
  scratch(const scratch&) = delete;
  ~scratch() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  fs::path path;
};

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}
void write(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

struct outcome {
  int code = -1;  ///< -1: ended by a signal
  std::string out, error;
};

outcome run_tool(const std::vector<std::string>& arguments) {
  const scratch errors;
  std::string command = DIFFATTN_GOLDEN_TOOL;
  for (const std::string& a : arguments) command += " '" + a + "'";
  command += " 2>'" + (errors.path / "stderr").string() + "'";
  outcome result;
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  if (!pipe) return result;
  std::array<char, 4096> buffer;
  for (std::size_t n; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) result.out.append(buffer.data(), n);
  const int status = ::pclose(pipe);
  if (WIFEXITED(status)) result.code = WEXITSTATUS(status);
  result.error = contents(errors.path / "stderr");
  return result;
}

struct line {
  std::string name, verdict;
  double error = 0, tolerance = 0;
};
std::vector<line> lines_of(const std::string& text) {
  std::vector<line> lines;
  std::istringstream in(text);
  for (line l; in >> l.name >> l.error >> l.tolerance >> l.verdict;) lines.push_back(l);
  return lines;
}

std::vector<std::string> golden_files() {
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(golden))
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path().string());
  std::sort(files.begin(), files.end());
  return files;
}

/// A golden file taken apart, to be changed and put together again.
class copy_of {
 public:
  explicit copy_of(const std::string& name) {
    const std::string bytes = contents(golden / (name + ".safetensors"));
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    nlohmann::json header = nlohmann::json::parse(bytes.substr(8, length));
    metadata = header["__metadata__"];
    header.erase("__metadata__");
    for (const auto& [key, entry] : header.items()) {
      const std::size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
      tensors[key] = {entry["dtype"], entry["shape"], bytes.substr(8 + length + begin, end - begin)};
    }
  }

  struct tensor {
    std::string type;
    std::vector<std::int64_t> shape;
    std::string data;

    template <class T>
    T get(std::size_t i) const {
      T x;
      std::memcpy(&x, data.data() + i * sizeof x, sizeof x);
      return x;
    }
    template <class T>
    void set(std::size_t i, T x) {
      std::memcpy(data.data() + i * sizeof x, &x, sizeof x);
    }
  };
  std::map<std::string, std::string> metadata;
  std::map<std::string, tensor> tensors;

  std::string bytes() const {
    nlohmann::json header{{"__metadata__", metadata}};
    std::string data;
    for (const auto& [name, t] : tensors) {
      header[name] = {{"dtype", t.type}, {"shape", t.shape}, {"data_offsets", {data.size(), data.size() + t.data.size()}}};
      data += t.data;
    }
    const std::string text = header.dump();
    const std::uint64_t length = text.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof length) + text + data;
  }
};

class GoldenTool : public testing::TestWithParam<const char*> {};

TEST_P(GoldenTool, AllFilesPassAndAreWritten) {
  const scratch directory;
  const fs::path out = directory.path / "made" / "by the tool";
  const bool is_layer = std::string(GetParam()) == "layer";
  std::vector<std::string> files = golden_files();
  ASSERT_GE(files.size(), 29u);
  if (!is_layer) files.push_back(DIFFATTN_REAL_DATA);
  std::vector<std::string> arguments = files;
  arguments.insert(arguments.end(), {"--out", out.string(), "--level", GetParam()});
  const outcome o = run_tool(arguments);
  EXPECT_EQ(o.code, 0) << o.error;
  EXPECT_EQ(o.error, "");
  const std::vector<line> lines = lines_of(o.out);
  ASSERT_EQ(lines.size(), files.size()) << o.out;
  EXPECT_EQ(std::count(o.out.begin(), o.out.end(), '\n'), static_cast<std::ptrdiff_t>(files.size()));
  for (std::size_t i = 0; i < files.size(); ++i) {
    const test::golden_file file(files[i]);
    SCOPED_TRACE(files[i]);
    EXPECT_EQ(lines[i].name, file.text("case"));
    EXPECT_EQ(lines[i].verdict, "ok");
    EXPECT_LE(lines[i].tolerance, 3e-4);
    const std::string result = contents(out / (file.text("case") + ".bin"));
    const std::vector<double>& stored = file[is_layer ? "layer.out" : "kernel.out"].values;
    ASSERT_EQ(result.size(), stored.size() * sizeof(float));
    double largest = 0;
    for (std::size_t j = 0; j < stored.size(); ++j) {
      float x;
      std::memcpy(&x, result.data() + j * sizeof x, sizeof x);
      largest = std::max(largest, std::fabs(double(x) - stored[j]));
    }
    // What is written is the run at once; what is printed is the larger error of it and the replay.
    const std::string calls = file.text("calls");
    const bool is_replayed = calls != "1 call" && calls.find(',') != calls.npos;
    EXPECT_LE(largest, lines[i].error * 1.0006);
    if (!is_replayed) {
      EXPECT_GE(largest, lines[i].error * 0.9994);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, GoldenTool, testing::Values("kernel", "layer"),
                         [](const testing::TestParamInfo<const char*>& level) { return std::string(level.param); });

/// Runs a changed copy; the message must be there and name the file.
void expect_refused(const std::string& name, const std::function<void(copy_of&)>& change, const std::string& message,
                    const char* level = "kernel") {
  SCOPED_TRACE(name + ", " + level + ": " + message);
  const scratch directory;
  copy_of file(name);
  change(file);
  const std::string path = (directory.path / "changed.safetensors").string(), out = (directory.path / "out").string();
  write(path, file.bytes());
  const outcome o = run_tool({path, "--level", level, "--out", out});
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.out, "");
  EXPECT_NE(o.error.find(message), std::string::npos) << o.error;
  EXPECT_EQ(o.error.find(path), 0u) << o.error;
  EXPECT_EQ(std::count(o.error.begin(), o.error.end(), '\n'), 1) << o.error;
  EXPECT_FALSE(fs::exists(out));
}

TEST(GoldenToolErrors, Values) {
  const struct {
    const char *file, *key, *value;
    const char* named = nullptr;  ///< the key in the message, if it is another one
  } all[] = {{"unilm_v1_flash1_gqa2", "pairing", "spiral"},
             {"unilm_v1_flash1_gqa2", "pairing", "halves"},
             {"unilm_v1_flash1_gqa2", "gqa_map", "tiled"},
             {"unilm_v1_flash1_gqa2", "gqa_map", "shared_k", "pairing"},
             {"unilm_v1_flash1_gqa2", "v_layout", "narrow"},
             {"unilm_v1_flash1_gqa2", "lambda_init", "0.36"},
             {"unilm_v1_flash1_gqa2", "lambda_init", "nan"},
             {"unilm_v1_flash1_gqa2", "lambda_init_rule", "one_based"},
             {"unilm_v1_flash1_gqa2", "lambda_init_rule", "zero_based_minus_one", "lambda_init"},
             {"unilm_v1_flash1_gqa2", "layer_index", "2", "lambda_init"},
             {"unilm_v1_flash1_gqa2", "layer_index", "-1"},
             {"unilm_v1_flash1_gqa2", "layer_index", "1.5"},
             {"unilm_v1_flash1_gqa2", "lambda_kind", "relu"},
             {"unilm_v1_flash1_gqa2", "lambda_kind", "sigmoid_token_head"},
             {"unilm_v1_flash1_gqa2", "q1_index", "0,2,4,7"},
             {"unilm_v1_flash1_gqa2", "q2_index", "1,3,5"},
             {"unilm_v1_flash1_gqa2", "k1_index", "0,0,2,4"},
             {"unilm_v1_flash1_gqa2", "k2_index", "1,1,3,-1"},
             {"unilm_v1_flash1_gqa2", "k2_index", "1,1,3,"},
             {"unilm_v1_flash1_gqa2", "v_index", "0,0,1,1+0"},
             {"unilm_v1_flash1_gqa2", "v_index", "0+1,0+1,0+1,0+1", "out_head_dim"},
             {"unilm_v1_flash1_gqa2", "v_index", "0+1+0,0+1+0,0+1+0,0+1+0"},
             {"unilm_v1_flash1_gqa2", "n_out_heads", "0"},
             {"unilm_v1_flash1_gqa2", "n_out_heads", "99999999999999999999"},
             {"unilm_v1_flash1_gqa2", "n_q_heads", "10", "n_k_heads"},
             {"unilm_v1_flash1_gqa2", "head_dim", "0"},
             {"unilm_v1_flash1_gqa2", "norm", "layer"},
             {"unilm_v1_flash1_gqa2", "norm", "none"},
             {"unilm_v1_flash1_gqa2", "eps", "-1e-5"},
             {"unilm_v1_flash1_gqa2", "eps", "1e-6"},
             {"unilm_v1_flash1_gqa2", "affine", "false"},
             {"unilm_v1_flash1_gqa2", "affine", "maybe"},
             {"unilm_v1_flash1_gqa2", "out_scale", "1"},
             {"unilm_v1_flash1_gqa2", "causal", "True"},
             {"unilm_v1_flash1_gqa2", "causal", "false"},
             {"unilm_v1_flash1_gqa2", "causal_rule", "key j allowed iff j < i"},
             {"unilm_v1_flash1_gqa2", "causal_rule", "none"},
             {"unilm_v1_flash1_gqa2", "q_offset", "1"},
             {"unilm_v1_flash1_gqa2", "window", "0"},
             {"unilm_v1_flash1_gqa2", "window", "-2"},
             {"unilm_v1_flash1_gqa2", "window", "5"},
             {"unilm_v1_flash1_gqa2", "scale", "NaN"},
             {"unilm_v1_flash1_gqa2", "scale", "inf"},
             {"unilm_v1_flash1_gqa2", "scale", "0"},
             {"unilm_v1_flash1_gqa2", "scale", "0.25"},
             {"unilm_v1_flash1_gqa2", "scale", ""},
             {"unilm_v1_flash1_gqa2", "rope_style", "spiral"},
             {"unilm_v1_flash1_gqa2", "rope_style", "half"},
             {"unilm_v1_flash1_gqa2", "layout", "bhsd"},
             {"unilm_v1_flash1_gqa2", "layout", "packed"},
             {"unilm_v1_flash1_gqa2", "mask", "random"},
             {"unilm_v1_flash1_gqa2", "mask", "key_valid"},
             {"unilm_v1_flash1_gqa2", "pad_rows", "zero"},
             {"unilm_v1_flash1_gqa2", "calls", "twice"},
             {"unilm_v1_flash1_gqa2", "calls", ""},
             {"unilm_v1_flash1_gqa2", "calls", "6,5"},
             {"unilm_v1_flash1_gqa2", "calls", "13"},
             {"unilm_v1_flash1_gqa2", "calls", "-1,13"},
             {"unilm_v1_flash1_gqa2", "calls", "9223372036854775807,9223372036854775807"},
             {"unilm_v1_flash1_gqa2", "format", "diffattn-golden/2"},
             {"unilm_v1_flash1_gqa2", "case", "../elsewhere"},
             {"unilm_v1_flash1_gqa2", "case", ""},
             {"unilm_v1_flash1_gqa2", "ref_f32_kernel_diff", "small"},
             {"unilm_v1_flash1_gqa2", "implementation", "timm", "rope_style"},
             {"unilm_v1_naive_gqa_physical", "implementation", "unilm V1 MultiheadFlashDiff1", "k1_index"},
             {"unilm_v2_gqa", "implementation", "unilm V1 MultiheadFlashDiff2", "n_v_heads"},
             {"unilm_v2_gqa", "lambda_init", "0.2"},
             {"motif2_gda_4to1", "signal_per_noise", "0"},
             {"motif2_gda_4to1", "calls", "paged cache; prefix lengths 0,0, then new tokens 22"},
             {"motif2_gda_packed", "calls", "paged cache; prefix lengths 20,33,0, then new tokens 3,1,8"},
             {"motif2_gda_packed", "q_offset", "53"},
             {"motif2_gda_packed", "layout", "bshd"},
             {"phi4flash_window", "window_rule", "another"},
             {"phi4flash_window_leftpad", "pad_rows", "random"},
             {"phi4flash_window_leftpad", "mask", "none"},
             {"timm_vector_lambda_odd_d", "calls", "25,25"},
             {"timm_vector_lambda_odd_d", "window", "3"}};
  for (const auto& x : all)
    expect_refused(
        x.file, [&](copy_of& f) { f.metadata[x.key] = x.value; },
        std::string(x.named ? x.named : x.key) + (x.named ? " " : std::string(" \"") + x.value + '"'));
}

TEST(GoldenToolErrors, MissingKeys) {
  for (const char* key :
       {"format", "pairing", "gqa_map",    "v_layout", "q1_index",  "v_index",     "n_out_heads", "head_dim",
        "scale",  "norm",    "eps",        "affine",   "out_scale", "lambda_kind", "lambda_init", "lambda_init_rule",
        "causal", "window",  "rope_style", "layout",   "mask",      "q_offset"})
    expect_refused(
        "unilm_v1_flash1_gqa2", [&](copy_of& f) { f.metadata.erase(key); }, std::string(key) + " is missing");
  expect_refused(
      "phi4flash_window_leftpad", [](copy_of& f) { f.metadata.erase("pad_rows"); }, "pad_rows is missing");
  expect_refused(
      "unilm_v1_flash1_gqa2", [](copy_of& f) { f.metadata.erase("rope_theta"); }, "rope_theta is missing", "layer");
}

TEST(GoldenToolErrors, Tensors) {
  for (const char* name :
       {"kernel.q", "kernel.k", "kernel.v", "kernel.out", "kernel.lambda", "kernel.lambda_k2", "kernel.norm_weight"}) {
    const std::string quoted = '"' + std::string(name) + '"';
    expect_refused(
        "unilm_v1_flash1_gqa2", [&](copy_of& f) { f.tensors.erase(name); }, "has no tensor " + quoted);
    expect_refused(
        "unilm_v1_flash1_gqa2", [&](copy_of& f) { f.tensors[name].shape.push_back(1); }, "tensor " + quoted + ": has");
  }
  for (const char* name : {"layer.wq", "layer.wo", "layer.wv", "layer.cos", "layer.positions"}) {
    const std::string quoted = '"' + std::string(name) + '"';
    expect_refused(
        "unilm_v1_flash1_gqa2", [&](copy_of& f) { f.tensors.erase(name); }, quoted, "layer");
    expect_refused(
        "unilm_v1_flash1_gqa2", [&](copy_of& f) { f.tensors[name].shape.push_back(1); }, "tensor " + quoted + ": has", "layer");
  }
  expect_refused(
      "unilm_v1_flash1_gqa2", [](copy_of& f) { f.tensors.erase("layer.x"); }, "no tensors of the layer level", "layer");
  expect_refused(
      "unilm_v1_flash1_gqa4_lambda_gt1",
      [](copy_of& f) { std::swap(f.tensors["kernel.q"].shape[2], f.tensors["kernel.q"].shape[3]); },
      "\"kernel.q\": has the shape [1, 35, 12, 8], expected [1, 35, 8, 12]");
  expect_refused(
      "unilm_v1_flash1_gqa2",
      [](copy_of& f) {
        f.tensors["kernel.q"] = {"F32", {0, 12, 8, 8}, ""};
      },
      "\"kernel.q\": has not four axes that are not empty");
  expect_refused(
      "unilm_v1_flash1_gqa2", [](copy_of& f) { f.tensors["kernel.norm_weight"].type = "I32"; }, "is I32, not F32");
  expect_refused(
      "unilm_v1_flash1_gqa2", [](copy_of& f) { f.tensors["kernel.sink"] = f.tensors["kernel.lambda"]; },
      "\"kernel.sink\": is not understood");
  expect_refused(
      "unilm_v1_flash1_gqa2", [](copy_of& f) { f.tensors["kernel.lambda"].set(0, 0.5); },
      "\"kernel.lambda\": is not what exp_exp makes");
  expect_refused(
      "unilm_v1_flash1_gqa2", [](copy_of& f) { f.metadata["implementation"] = "somebody's", f.metadata["affine"] = "false"; },
      "affine \"false\" does not go with the tensors");
  expect_refused(
      "motif2_gda_packed", [](copy_of& f) { f.tensors["kernel.cu_k"].set(1, 60); }, "\"kernel.cu_k\": does not cut");
  expect_refused(
      "timm_fused_keypad", [](copy_of& f) { f.tensors["kernel.key_valid"].set(5, '\0'); }, "no boolean masks yet");
  expect_refused(
      "timm_fused_keypad", [](copy_of& f) { f.tensors["kernel.key_valid"].set(5, '\2'); }, "is not made of 0 and 1");
  expect_refused(
      "hf_diffllama_gqa_leftpad", [](copy_of& f) { f.tensors["kernel.bias"].set(1, 0.0f); },
      "\"kernel.bias\": is not what causal, window and key_valid say");
  expect_refused(
      "hf_diffllama_gqa_leftpad", [](copy_of& f) { f.tensors["kernel.row_valid"].set(3, '\0'); },
      "pad_rows \"uniform\" is said");
  expect_refused(
      "unilm_v1_flash1_gqa2", [](copy_of& f) { f.tensors["layer.positions"].set(4, std::int64_t{9}); }, "not consecutive",
      "layer");
  expect_refused(
      "unilm_v1_flash1_gqa2", [](copy_of& f) { f.tensors["layer.positions"].set(4, std::int64_t{1} << 62); }, "too large",
      "layer");
  for (const std::size_t i : {0u, 11u, 60u})
    expect_refused(
        "unilm_v1_flash1_gqa2",
        [&](copy_of& f) { f.tensors["layer.cos"].set(i, f.tensors["layer.cos"].get<float>(i) + 1e-4f); },
        "\"layer.cos\": is not what rope_theta makes", "layer");
  expect_refused(
      "unilm_v1_flash1_gqa2", [](copy_of& f) { f.metadata["rope_theta"] = "500"; }, "is not what rope_theta makes", "layer");
  expect_refused(
      "unilm_v1_flash1_gqa2",
      [](copy_of& f) {
        f.tensors["layer.w_lambda"] = {"F32", {4, 64}, std::string(1024, '\0')};
      },
      "a weight is given that its config does not have", "layer");
}

TEST(GoldenToolErrors, Files) {
  const scratch directory;
  const std::string path = (directory.path / "some.safetensors").string();
  const std::string whole = copy_of("unilm_v1_naive_mha").bytes();
  write(path, whole);
  EXPECT_EQ(run_tool({path}).code, 0);
  for (const std::size_t size : {std::size_t{0}, std::size_t{7}, std::size_t{500}, whole.size() - 1}) {
    write(path, whole.substr(0, size));
    const outcome o = run_tool({path});
    EXPECT_EQ(o.code, 1) << size;
    EXPECT_EQ(o.error.find(path), 0u) << o.error;
  }
  EXPECT_EQ(run_tool({(directory.path / "none").string()}).code, 1);
  EXPECT_EQ(run_tool({directory.path.string()}).code, 1);

  const outcome real = run_tool({DIFFATTN_REAL_DATA, "--level", "layer"});
  EXPECT_EQ(real.code, 1);
  EXPECT_NE(real.error.find("has no tensors of the layer level"), std::string::npos) << real.error;

  // The others are run all the same.
  const std::vector<std::string> files = golden_files();
  const outcome o = run_tool({files[0], path, files[1], (directory.path / "none").string()});
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(lines_of(o.out).size(), 2u) << o.out;
  EXPECT_EQ(std::count(o.error.begin(), o.error.end(), '\n'), 2) << o.error;
}

TEST(GoldenToolErrors, WrongResults) {
  for (const char* level : {"kernel", "layer"})
    for (const double wrong : {1e-3, std::numeric_limits<double>::quiet_NaN()}) {
      const scratch directory;
      copy_of file("hf_diffllama_gqa_cache");
      copy_of::tensor& t = file.tensors[std::string(level) + ".out"];
      t.set(5, t.get<double>(5) + wrong);
      const std::string path = (directory.path / "wrong.safetensors").string();
      write(path, file.bytes());
      const outcome o = run_tool({path, "--level", level});
      EXPECT_EQ(o.code, 1);
      EXPECT_NE(o.out.find(" FAIL\n"), std::string::npos) << o.out;
    }
}

TEST(GoldenToolErrors, Usage) {
  EXPECT_NE(run_tool({}).code, 0);
  EXPECT_NE(run_tool({}).error.find("FILE"), std::string::npos);
  const outcome help = run_tool({"--help"});
  EXPECT_EQ(help.code, 0);
  for (const char* word : {"FILE", "--out", "--level", "kernel", "layer"})
    EXPECT_NE(help.out.find(word), std::string::npos) << help.out;
  EXPECT_NE(run_tool({golden_files()[0], "--level", "model"}).code, 0);
  EXPECT_NE(run_tool({golden_files()[0], "--frobnicate"}).code, 0);
  EXPECT_EQ(run_tool({golden_files()[0], "--out", "/dev/null/directory"}).code, 1);
}

/// Runs a changed copy of a file at both levels; nothing may be wrong with it.
void expect_runs(const std::string& name, const std::function<void(copy_of&)>& change) {
  const scratch directory;
  copy_of file(name);
  change(file);
  const std::string path = (directory.path / "changed.safetensors").string();
  write(path, file.bytes());
  for (const char* level : {"kernel", "layer"}) {
    const outcome o = run_tool({path, "--level", level});
    EXPECT_EQ(o.code, 0) << name << ", " << level << ": " << o.out << o.error;
  }
}

// Of an implementation that nobody knows, the metadata say enough.
TEST(GoldenToolUnknownImplementation, Runs) {
  for (const std::string& path : golden_files())
    expect_runs(fs::path(path).stem().string(), [](copy_of& f) { f.metadata["implementation"] = "somebody's"; });
  for (const char* name : {"motif2_gda_packed", "hf_diffllama_chunk", "unilm_v1_flash1_gqa2"})  // lists without a name
    expect_runs(name,
                [](copy_of& f) { f.metadata["implementation"] = "somebody's", f.metadata["gqa_map"] = "per_physical_head"; });
  expect_runs("unilm_v1_naive_mha", [](copy_of& f) {  // λ_init of no rule
    f.metadata["implementation"] = "somebody's", f.metadata["lambda_init_rule"] = "none";
    f.metadata.erase("layer_index"), f.metadata.erase("calls"), f.metadata.erase("ref_f32_kernel_diff");
  });
  expect_runs("unilm_v1_naive_mha", [](copy_of& f) { f.metadata["calls"] = "4 then 5"; });
  expect_runs("phi4flash_window_leftpad", [](copy_of& f) { f.metadata["calls"] = "3,4,7"; });
  expect_runs("hf_diffllama_gqa_leftpad", [](copy_of& f) { f.metadata["calls"] = "1,1,1,8"; });
  expect_runs("phi4flash_window_leftpad", [](copy_of& f) { f.metadata["pad_rows"] = "unspecified"; });
}

// Positions may start anywhere: a head's rotation only matters relative to others.
TEST(GoldenToolUnknownImplementation, PaddingMayHaveAnyPosition) {
  expect_runs("hf_diffllama_gqa_leftpad", [](copy_of& f) { f.tensors["layer.positions"].set(22, std::int64_t{1} << 40); });
}

}  // namespace
