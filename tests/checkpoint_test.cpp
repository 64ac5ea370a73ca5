// SPDX-License-Identifier: MIT
// The loader of the examples: what it reads from good files, and that bad ones give errors that say what is wrong.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "llm/checkpoint.hpp"
#include "support/cache.hpp"

namespace {

namespace fs = std::filesystem;
using llm::checkpoint;
using llm::config;
using llm::safetensors;
using sizes = std::vector<std::int64_t>;

/// A safetensors file of that header.
std::string with_header(const std::string& header, const std::string& data = "") {
  const std::uint64_t length = header.size();
  std::string bytes(8, '\0');
  std::memcpy(&bytes[0], &length, sizeof length);
  return bytes + header + data;
}

template <class T>
std::string bytes_of(const std::vector<T>& numbers) {
  std::string bytes(numbers.size() * sizeof(T), '\0');
  if (!numbers.empty()) std::memcpy(&bytes[0], numbers.data(), bytes.size());
  return bytes;
}

/// A file of one tensor "x".
template <class T>
std::string with_tensor(const std::string& type, const std::vector<T>& numbers) {
  const std::string data = bytes_of(numbers);
  return with_header(R"({"x":{"dtype":")" + type + R"(","shape":[)" + std::to_string(numbers.size()) +
                         R"(],"data_offsets":[0,)" + std::to_string(data.size()) + "]}}",
                     data);
}

/// The message of the load_error of f, or "" without one. It must be one short line that begins with the name of the file.
std::string error_of(const std::string& file, const std::function<void()>& f) {
  try {
    f();
  } catch (const llm::load_error& e) {
    const std::string message = e.what();
    EXPECT_EQ(message.rfind(file + ": ", 0), 0u) << message;
    EXPECT_LT(message.size(), 1000u) << message;
    for (const char c : message) EXPECT_TRUE(static_cast<unsigned char>(c) >= 32 && c != 127) << message;
    return message;
  }
  return "";
}

/// Parses a copy that ends where its memory ends, reads all of it, and gives the error.
std::string parse(const std::string& bytes) {
  const std::unique_ptr<char[]> copy(new char[bytes.size()]);
  std::memcpy(copy.get(), bytes.data(), bytes.size());
  return error_of("f", [&] {
    const safetensors file(std::string_view(copy.get(), bytes.size()), "f");
    for (const std::string& name : file.names()) file.read<double>(name);
  });
}

#define EXPECT_SAYS(message, words) EXPECT_NE((message).find(words), std::string::npos) << "message: " << (message)

const std::string good = with_header(
    R"({"__metadata__":{"format":"pt","n":"3"},"b":{"dtype":"F32","shape":[2,1],"data_offsets":[2,10]},)"
    R"("a":{"dtype":"I16","shape":[],"data_offsets":[0,2]},"none":{"dtype":"F64","shape":[3,0],"data_offsets":[2,2]}}  )",
    bytes_of<std::int16_t>({-7}) + bytes_of<float>({1.5f, -2}));

TEST(Safetensors, GoodFile) {
  const safetensors file(good, "f");
  EXPECT_EQ(file.names(), (std::vector<std::string>{"a", "none", "b"}));
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"n", "3"}}));
  EXPECT_EQ(file.at("b").type, llm::dtype::f32);
  EXPECT_EQ(file.at("b").shape, (sizes{2, 1}));
  EXPECT_EQ(file.at("b").count, 2);
  EXPECT_EQ(file.at("b").bytes, 8u);
  EXPECT_EQ(file.read<float>("b"), (std::vector<float>{1.5f, -2}));
  EXPECT_EQ(file.read<double>("b"), (std::vector<double>{1.5, -2}));
  EXPECT_EQ(file.at("a").shape, sizes{});
  EXPECT_EQ(file.read<float>("a"), std::vector<float>{-7});
  EXPECT_EQ(file.at("none").count, 0);
  EXPECT_TRUE(file.read<double>("none").empty());
  float one = 0;
  file.read_into("a", &one);
  EXPECT_EQ(one, -7);
  EXPECT_TRUE(file.has("a"));
  EXPECT_FALSE(file.has("__metadata__"));
  EXPECT_EQ(file.find("c"), nullptr);
  EXPECT_EQ(error_of("f", [&] { file.at("c"); }), R"(f: has no tensor "c")");
  EXPECT_EQ(error_of("f", [&] { file.read<float>("c"); }), R"(f: has no tensor "c")");
  EXPECT_EQ(parse(with_header("{}")), "");
}

/// A file of tensor "x" with this description, and `bytes` bytes of data.
std::string described(const std::string& description, std::size_t bytes) {
  return with_header(R"({"x":)" + description + "}", std::string(bytes, '\1'));
}

TEST(Safetensors, HostileFiles) {
  const std::string one = R"("dtype":"F32","shape":[1],"data_offsets":[0,4])";
  const std::string deep(1 << 20, '[');
  std::string objects;
  for (int i = 0; i < 100000; ++i) objects += R"({"a":)";
  const std::pair<std::string, const char*> cases[] = {
      {"", "shorter than the 8 bytes"},
      {"1234567", "shorter than the 8 bytes"},
      {std::string(8, '\0'), "does not begin with {"},
      {std::string(8, '\xff'), "header of 18446744073709551615 bytes, more than 100 MB"},
      {std::string("\x01\xe1\xf5\x05\0\0\0\0", 8) + "{}", "header of 100000001 bytes, more than 100 MB"},
      {std::string("\x00\xe1\xf5\x05\0\0\0\0", 8) + "{}", "header of 100000000 bytes, longer than the file"},
      {std::string("\3\0\0\0\0\0\0\0", 8) + "{}", "header of 3 bytes, longer than the file"},
      {with_header("[]"), "does not begin with {"},
      {with_header(" {}"), "does not begin with {"},
      {with_header("\xef\xbb\xbf{}"), "does not begin with {"},
      {with_header("{"), "invalid JSON"},
      {with_header("{}}"), "invalid JSON"},
      {with_header("{\"x"), "invalid JSON"},
      {with_header("{\"x\n"), "invalid JSON"},
      {with_header("{\"" + std::string(10000, 'x')), "invalid JSON"},
      {with_header("{\"\xff\":1}"), "invalid JSON"},
      {with_header("{\"\xc3\":1}"), "invalid JSON"},
      {with_header("{\"\xed\xa0\x80\":1}"), "invalid JSON"},
      {with_header(R"({"\ud800":1})"), "invalid JSON"},
      {with_header(R"({"x":1e999})"), "invalid JSON"},
      {with_header(R"({"x":NaN})"), "invalid JSON"},
      {with_header("{}/**/"), "invalid JSON"},
      {with_header(std::string("{}\0", 3)), "NUL byte"},
      {with_header(std::string("{}\0rest", 7)), "NUL byte"},
      {with_header(R"({"x":)" + deep), "nested too deeply"},
      {with_header(objects), "nested too deeply"},
      {with_header("{\"x\":{" + one + "},\"x\":{" + one + "}}", "1234"), R"(duplicate key "x")"},
      {with_header("{\"x\":{" + one + "},\"\\u0078\":{" + one + "}}", "1234"), R"(duplicate key "x")"},
      {with_header(R"({"__metadata__":{},"__metadata__":{}})"), R"(duplicate key "__metadata__")"},
      {with_header(R"({"__metadata__":{"a":"1","a":"2"}})"), R"(duplicate key "a")"},
      {described("{" + one + R"(,"dtype":"I32"})", 4), R"(duplicate key "dtype")"},
      {with_header(R"({"__metadata__":[]})"), "__metadata__ is not an object"},
      {with_header(R"({"__metadata__":null})"), "__metadata__ is not an object"},
      {with_header(R"({"__metadata__":{"a":1}})"), R"(__metadata__: the value of "a" is not a string)"},
      {with_header(R"({"__metadata__":{"a":{}}})"), R"(__metadata__: the value of "a" is not a string)"},
      {described("1", 0), R"(tensor "x": is not described by an object)"},
      {described("{}", 0), R"(tensor "x": has no dtype)"},
      {described(R"({"shape":[1],"data_offsets":[0,4]})", 4), R"(tensor "x": has no dtype)"},
      {described(R"({"dtype":"F32","data_offsets":[0,4]})", 4), R"(tensor "x": has no shape)"},
      {described(R"({"dtype":"F32","shape":[1]})", 4), R"(tensor "x": has no data_offsets)"},
      {described(R"({"dtype":1,"shape":[1],"data_offsets":[0,4]})", 4), R"(tensor "x": dtype is not a string)"},
      {described(R"({"dtype":"f32","shape":[1],"data_offsets":[0,4]})", 4), R"(tensor "x": dtype "f32" is not supported)"},
      {described(R"({"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]})", 1), R"(dtype "F8_E4M3" is not supported)"},
      {described(R"({"dtype":"","shape":[1],"data_offsets":[0,4]})", 4), R"(dtype "" is not supported)"},
      {described(R"({"dtype":"F32","shape":1,"data_offsets":[0,4]})", 4), R"(tensor "x": shape is not an array)"},
      {described(R"({"dtype":"F32","shape":{"a":1},"data_offsets":[0,4]})", 4), "shape is not an array"},
      {described(R"({"dtype":"F32","shape":["1"],"data_offsets":[0,4]})", 4), "shape has an entry that is not an integer"},
      {described(R"({"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})", 4), "shape has an entry that is not an integer"},
      {described(R"({"dtype":"F32","shape":[true],"data_offsets":[0,4]})", 4), "shape has an entry that is not an integer"},
      {described(R"({"dtype":"F32","shape":[[1]],"data_offsets":[0,4]})", 4), "shape has an entry that is not an integer"},
      {described(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})", 4), "shape has an entry that is negative"},
      {described(R"({"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]})", 4), "shape has an entry that is negative"},
      {described(R"({"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4]})", 4), "too large"},
      {described(R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]})", 4), "too large"},
      {described(R"({"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]})", 4), "not an integer"},
      {described(R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]})", 0), "shape is too large"},
      {described(R"({"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]})", 4), "shape is too large"},
      {described(R"({"dtype":"U8","shape":[9223372036854775807,3,0],"data_offsets":[0,0]})", 0), "shape is too large"},
      {described(R"({"dtype":"F32","shape":[1],"data_offsets":4})", 4), "data_offsets is not an array"},
      {described(R"({"dtype":"F32","shape":[1],"data_offsets":[4]})", 4), "data_offsets are not a begin and an end"},
      {described(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4,8]})", 4), "data_offsets are not a begin and an end"},
      {described(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4.0]})", 4),
       "data_offsets has an entry that is not an integer"},
      {described(R"({"dtype":"F32","shape":[1],"data_offsets":[-4,0]})", 4), "data_offsets has an entry that is negative"},
      {described(R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})", 4), "data_offsets begin after their end"},
      {described(R"({"dtype":"F32","shape":[1],"data_offsets":[1,5]})", 4), "data_offsets reach beyond the file"},
      {described(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", 4), "data_offsets reach beyond the file"},
      {described(R"({"dtype":"F32","shape":[],"data_offsets":[9223372036854775803,9223372036854775807]})", 4),
       "beyond the file"},
      {described(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})", 4), "has 4 bytes of data, its shape needs 8"},
      {described(R"({"dtype":"F16","shape":[1],"data_offsets":[0,4]})", 4), "has 4 bytes of data, its shape needs 2"},
      {described(R"({"dtype":"F32","shape":[],"data_offsets":[0,0]})", 0), "has 0 bytes of data, its shape needs 4"},
      {described(R"({"dtype":"F32","shape":[0],"data_offsets":[0,4]})", 4), "has 4 bytes of data, its shape needs 0"},
      {described("{" + one + "}", 5), "1 bytes after the last tensor"},
      {with_header("{}", "1"), "1 bytes after the last tensor"},
      {described(R"({"dtype":"F32","shape":[1],"data_offsets":[1,5]})", 5), R"(data before tensor "x" belong to no tensor)"},
      {with_header("{\"x\":{" + one + "},\"y\":{" + one + "}}", "1234"), R"(tensor "y" overlaps "x")"},
      {with_header("{\"y\":{" + one + R"(},"x":{"dtype":"U8","shape":[3],"data_offsets":[3,6]}})", "123456"),
       R"(tensor "x" overlaps "y")"},
      {with_header("{\"y\":{" + one + R"(},"x":{"dtype":"F32","shape":[0],"data_offsets":[2,2]}})", "1234"),
       R"(tensor "x" overlaps "y")"},
      {with_header("{\"y\":{" + one + R"(},"x":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}})", "123456"),
       R"(data before tensor "x" belong to no tensor)"},
  };
  for (const auto& [bytes, words] : cases) {
    SCOPED_TRACE(bytes.substr(0, 200));
    EXPECT_SAYS(parse(bytes), words);
  }
}

TEST(Safetensors, MessagesStayShortLines) {
  const std::string message = parse(with_header("{\"\\n\\u001b[2J" + std::string(5000, 'x') + "\":1}"));
  EXPECT_SAYS(message, R"(tensor "??[2Jxxx)");
  EXPECT_SAYS(message, R"(xxx...": is not described by an object)");
}

TEST(Safetensors, UnknownMembersAreAllowed) {
  EXPECT_EQ(parse(described(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1],"later":[[{"a":null}]]})", 1)), "");
}

TEST(Safetensors, EveryTruncation) {
  for (std::size_t size = 0; size < good.size(); ++size) EXPECT_NE(parse(good.substr(0, size)), "") << size;
  EXPECT_EQ(parse(good), "");
  EXPECT_SAYS(parse(good + "!"), "1 bytes after the last tensor");
}

TEST(Safetensors, EveryCorruptionOfAHeaderByte) {
  const std::size_t header = good.size() - 10;
  int loaded = 0;
  for (std::size_t i = 0; i < header; ++i)
    for (int value = 0; value < 256; ++value) {
      std::string bad = good;
      bad[i] = static_cast<char>(value);
      if (parse(bad).empty()) ++loaded;
    }
  EXPECT_GT(loaded, static_cast<int>(header));  // the right value of each byte, other names, other metadata
}

TEST(Safetensors, ManyTensorsInLinearTime) {
  std::string header = "{";
  for (int i = 0; i < 50000; ++i)
    header += (i ? ",\"" : "\"") + std::to_string(i) + R"(":{"dtype":"U8","shape":[1],"data_offsets":[)" + std::to_string(i) +
              "," + std::to_string(i + 1) + "]}";
  const std::string bytes = with_header(header + "}", std::string(50000, '\5'));
  const safetensors file(bytes, "f");
  EXPECT_EQ(file.names().size(), 50000u);
  EXPECT_EQ(file.names()[49999], "49999");
}

template <class T>
void expect_numbers(const std::string& type, const std::vector<T>& numbers) {
  SCOPED_TRACE(type);
  const std::string bytes = with_tensor(type, numbers);
  // At all alignments.
  for (std::size_t shift = 0; shift < 8; ++shift) {
    const std::string moved = std::string(shift, ' ') + bytes;
    const safetensors file(std::string_view(moved).substr(shift), "f");
    const std::vector<float> floats = file.read<float>("x");
    const std::vector<double> doubles = file.read<double>("x");
    ASSERT_EQ(floats.size(), numbers.size());
    ASSERT_EQ(doubles.size(), numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      EXPECT_EQ(floats[i], static_cast<float>(numbers[i]));
      EXPECT_EQ(doubles[i], static_cast<double>(numbers[i]));
    }
  }
}
template <class T>
void expect_integers(const std::string& type) {
  expect_numbers<T>(type, {0, 1, 2, 100, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()});
}

TEST(Dtypes, Numbers) {
  expect_numbers<std::uint8_t>("BOOL", {0, 1, 1});
  expect_integers<std::uint8_t>("U8");
  expect_integers<std::int8_t>("I8");
  expect_integers<std::uint16_t>("U16");
  expect_integers<std::int16_t>("I16");
  expect_integers<std::uint32_t>("U32");
  expect_integers<std::int32_t>("I32");
  expect_integers<std::uint64_t>("U64");
  expect_integers<std::int64_t>("I64");
  expect_numbers<float>("F32", {0, -1.5f, 1e-45f, std::numeric_limits<float>::max(), std::numeric_limits<float>::infinity()});
  expect_numbers<double>("F64", {0, -1.5, 0.1, 1e-320, 1e30, std::numeric_limits<double>::infinity()});
}

/// All patterns of a 16-bit type, against Eigen's type and against the definition of the format.
template <class Half>
void expect_all_patterns(const std::string& type, double (*value)(unsigned)) {
  std::vector<std::uint16_t> patterns(65536);
  for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint16_t>(i);
  const std::string bytes = with_tensor(type, patterns);
  const safetensors file(bytes, "f");
  const std::vector<float> floats = file.read<float>("x");
  const std::vector<double> doubles = file.read<double>("x");
  ASSERT_EQ(floats.size(), patterns.size());
  for (unsigned i = 0; i < 65536; ++i) {
    const auto eigen = static_cast<float>(Eigen::numext::bit_cast<Half>(patterns[i]));
    const double expected = value(i);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(floats[i]) && std::isnan(doubles[i]) && std::isnan(eigen)) << i;
    } else {
      EXPECT_TRUE(double(floats[i]) == expected && doubles[i] == expected && double(eigen) == expected) << i;
      EXPECT_EQ(std::signbit(floats[i]), std::signbit(expected)) << i;
    }
  }
}

TEST(Dtypes, EveryF16) {
  expect_all_patterns<Eigen::half>("F16", test::value_of_f16);
}
TEST(Dtypes, EveryBf16) {
  expect_all_patterns<Eigen::bfloat16>("BF16", test::value_of_bf16);
}

/// With an empty directory of its own.
class Checkpoint : public testing::Test {
 protected:
  Checkpoint() {
    const std::string test = testing::UnitTest::GetInstance()->current_test_info()->name();
    directory = fs::temp_directory_path() / ("diffattn_" + test + "_" + std::to_string(::getpid()));
    fs::remove_all(directory);
    fs::create_directories(directory);
  }
  ~Checkpoint() override {
    std::error_code ignored;
    fs::remove_all(directory, ignored);
  }

  std::string path(const std::string& name) const { return (directory / name).string(); }
  void write(const std::string& name, const std::string& bytes) const { std::ofstream(path(name), std::ios::binary) << bytes; }
  std::string open(const std::string& name) const {
    std::string message;
    try {
      checkpoint model(path(name));
    } catch (const llm::load_error& e) {
      message = e.what();
    }
    return message;
  }
  /// Two shards: "a" [3] in the first, "b" and, not in the index, "c" in the second.
  void write_shards() const {
    write("model-00001-of-00002.safetensors",
          with_header(R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}})",
                      bytes_of<float>({1, 2, 3})));
    write("model-00002-of-00002.safetensors", with_header(R"({"b":{"dtype":"F64","shape":[1,2],"data_offsets":[0,16]},)"
                                                          R"("c":{"dtype":"U8","shape":[1],"data_offsets":[16,17]}})",
                                                          bytes_of<double>({4, 5}) + "c"));
    write_index(R"({"metadata":{"total_size":28},"weight_map":{"a":"model-00001-of-00002.safetensors",)"
                R"("b":"model-00002-of-00002.safetensors"}})");
  }
  void write_index(const std::string& text) const { write("model.safetensors.index.json", text); }

  fs::path directory;
};

TEST_F(Checkpoint, OneFile) {
  write("model.safetensors", good);
  write("other.safetensors", good);
  for (const char* const name : {"model.safetensors", "", "other.safetensors"}) {
    checkpoint opened(path(name));
    const checkpoint model = std::move(opened);
    EXPECT_EQ(model.names(), (std::vector<std::string>{"a", "b", "none"}));
    EXPECT_TRUE(model.has("a"));
    EXPECT_FALSE(model.has("c"));
    EXPECT_EQ(model.read<float>("b", {2, 1}), (std::vector<float>{1.5f, -2}));
    EXPECT_EQ(model.expect("a", {}).count, 1);
    EXPECT_EQ(model.tensor("none").shape, (sizes{3, 0}));
    EXPECT_EQ(model.configuration().integer("n"), 3);
    const std::string file = path(*name ? name : "model.safetensors");
    EXPECT_EQ(error_of(file, [&] { model.tensor("c"); }), file + R"(: has no tensor "c")");
    EXPECT_EQ(error_of(file,
                       [&] {
                         model.read<float>("b", {1, 2});
                       }),
              file + R"(: tensor "b": found shape [2, 1], expected [1, 2])");
    EXPECT_EQ(error_of(file, [&] { model.expect("b", {}); }), file + R"(: tensor "b": found shape [2, 1], expected [])");
    EXPECT_SAYS(error_of(file, [&] { model.configuration().text("m"); }), R"(__metadata__: "m" is missing)");
  }
}

TEST_F(Checkpoint, Shards) {
  write_shards();
  for (const char* const name :
       {"", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}) {
    const checkpoint model(path(name));
    EXPECT_EQ(model.names(), (std::vector<std::string>{"a", "b"}));
    EXPECT_EQ(model.read<float>("a", {3}), (std::vector<float>{1, 2, 3}));
    EXPECT_EQ(model.read<double>("b", {1, 2}), (std::vector<double>{4, 5}));
    EXPECT_EQ(model.configuration().text("format"), "pt");
    EXPECT_SAYS(error_of(path("model-00002-of-00002.safetensors"), [&] { model.expect("b", {2}); }), "found shape [1, 2]");
    EXPECT_SAYS(error_of(path("model.safetensors.index.json"), [&] { model.tensor("c"); }), R"(has no tensor "c")");
  }
  // Without its index a shard is a file like any other.
  fs::remove(path("model.safetensors.index.json"));
  EXPECT_EQ(checkpoint(path("model-00002-of-00002.safetensors")).names(), (std::vector<std::string>{"b", "c"}));
}

TEST_F(Checkpoint, LinksAreFollowed) {
  write("blob", good);
  fs::create_directory(path("snapshot"));
  fs::create_symlink("../blob", path("snapshot/model.safetensors"));
  EXPECT_TRUE(checkpoint(path("snapshot")).has("a"));
}

TEST_F(Checkpoint, WhatCannotBeOpened) {
  EXPECT_SAYS(open(""), "holds neither model.safetensors nor model.safetensors.index.json");
  EXPECT_SAYS(open("nothing.safetensors"), "nothing.safetensors: cannot open: ");
  EXPECT_SAYS(open("nothing.safetensors.index.json"), "nothing.safetensors.index.json: cannot open: ");
  write("empty.safetensors", "");
  EXPECT_SAYS(open("empty.safetensors"), "empty.safetensors: shorter than the 8 bytes");
  EXPECT_SAYS(error_of(directory.string(), [&] { safetensors file(directory.string()); }), "not a regular file");
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_SAYS(open("pipe"), "pipe: not a regular file");
}

TEST_F(Checkpoint, HostileIndex) {
  write_shards();
  const auto shard = [](const std::string& name) { return R"({"weight_map":{"a":")" + name + R"("}})"; };
  const std::pair<std::string, const char*> cases[] = {
      {"", "invalid JSON"},
      {"{", "invalid JSON"},
      {"[]", "not a JSON object"},
      {"{}", "has no object weight_map"},
      {std::string(1 << 20, '['), "nested too deeply"},
      {R"({"weight_map":[]})", "has no object weight_map"},
      {R"({"weight_map":{}})", "weight_map is empty"},
      {R"({"weight_map":{"a":1}})", R"(tensor "a": the name of its file is not a string)"},
      {R"({"weight_map":{"a":"x.safetensors","a":"y.safetensors"}})", R"(duplicate key "a")"},
      {shard("/etc/x.safetensors"), "is not a plain name"},
      {shard("../x.safetensors"), "is not a plain name"},
      {shard("sub/x.safetensors"), "is not a plain name"},
      {shard("..\\\\x.safetensors"), "is not a plain name"},
      {shard("model-00001-of-00002.safetensors\\u0000.safetensors"), "is not a plain name"},
      {shard(""), "is not a .safetensors file"},
      {shard(".."), "is not a .safetensors file"},
      {shard(".safetensors"), "is not a .safetensors file"},
      {shard("pytorch_model.bin"), "is not a .safetensors file"},
      {shard("model.safetensors.index.json"), "is an index: cyclic shards"},
      {shard("other.safetensors.index.json"), "is an index: cyclic shards"},
      {shard("missing.safetensors"), "missing.safetensors: cannot open"},
      {shard("link.safetensors"), "link.safetensors: header of"},
      {shard("model-00002-of-00002.safetensors"),
       R"(promises tensor "a" in "model-00002-of-00002.safetensors", which has it not)"},
  };
  fs::create_symlink("model.safetensors.index.json", path("link.safetensors"));
  for (const auto& [text, words] : cases) {
    SCOPED_TRACE(text.substr(0, 200));
    write_index(text);
    EXPECT_SAYS(open(""), words);
  }
}

TEST_F(Checkpoint, ConfigFile) {
  write("model.safetensors", good);
  write("config.json", R"({"hidden_size":128})");
  EXPECT_EQ(checkpoint(path("")).configuration().integer("hidden_size"), 128);
  EXPECT_FALSE(checkpoint(path("model.safetensors")).configuration().has("n")) << "metadata beside a config.json";
  write("config.json", "{");
  EXPECT_SAYS(open(""), "config.json: invalid JSON");
  write("config.json", "");
  EXPECT_SAYS(open(""), "config.json: invalid JSON");
  write("config.json", "3");
  EXPECT_SAYS(open(""), "config.json: not a JSON object");
}

TEST(Config, Values) {
  const config c =
      config::parse(R"({"int":3,"negative":-3,"whole":4e2,"real":1.5,"text":"abc","int_text":"128","real_text":"1e-05",
    "whole_text":"10000.0","yes":true,"no":"False","none":null,"least":-9223372036854775808,"most":9223372036854775807,
    "architectures":["DiffLlamaForCausalLM"],"rope_scaling":{"factor":8.0,"rope_type":"llama3"}})",
                    "f");
  EXPECT_EQ(c.integer("int"), 3);
  EXPECT_EQ(c.integer("negative"), -3);
  EXPECT_EQ(c.integer("whole"), 400);
  EXPECT_EQ(c.integer("int_text"), 128);
  EXPECT_EQ(c.integer("whole_text"), 10000);
  EXPECT_EQ(c.integer("least"), std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(c.integer("most"), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(c.number("int"), 3);
  EXPECT_EQ(c.number("real"), 1.5);
  EXPECT_EQ(c.number("real_text"), 1e-5);
  EXPECT_EQ(c.text("text"), "abc");
  EXPECT_TRUE(c.flag("yes"));
  EXPECT_FALSE(c.flag("no"));
  EXPECT_FALSE(c.has("none"));
  EXPECT_EQ(c.integer("none", 7), 7);
  EXPECT_EQ(c.integer("int", 7), 3);
  EXPECT_EQ(c.number("absent", 0.5), 0.5);
  EXPECT_EQ(c.number("real", 0.5), 1.5);
  EXPECT_EQ(c.text("absent", "x"), "x");
  EXPECT_EQ(c.text("text", "x"), "abc");
  EXPECT_TRUE(c.flag("absent", true));
  EXPECT_FALSE(c.flag("no", true));
  EXPECT_EQ(c.architecture(), "DiffLlamaForCausalLM");
  EXPECT_EQ(config::parse(R"({"architecture":"LlamaForCausalLM"})", "f").architecture(), "LlamaForCausalLM");
  ASSERT_TRUE(c.section("rope_scaling"));
  EXPECT_EQ(c.section("rope_scaling")->number("factor"), 8);
  EXPECT_EQ(error_of("f", [&] { c.section("rope_scaling")->number("low"); }), R"(f: rope_scaling: "low" is missing)");
  EXPECT_FALSE(c.section("none"));
}

TEST(Config, Errors) {
  const auto number = [](const config& c) { c.number("x"); };
  const auto integer = [](const config& c) { c.integer("x"); };
  const auto text = [](const config& c) { c.text("x"); };
  const auto flag = [](const config& c) { c.flag("x"); };
  const auto section = [](const config& c) { c.section("x"); };
  const auto architecture = [](const config& c) { c.architecture(); };
  const struct {
    const char* json;
    void (*read)(const config&);
    const char* words;
  } cases[] = {
      {R"({})", number, R"("x" is missing)"},
      {R"({"x":null})", integer, R"("x" is missing)"},
      {R"({})", text, R"("x" is missing)"},
      {R"({"x":true})", number, R"("x" is not a number)"},
      {R"({"x":[1]})", integer, R"("x" is not a number)"},
      {R"({"x":""})", number, R"("x" is not a number)"},
      {R"({"x":"nan"})", number, R"("x" is not a number)"},
      {R"({"x":"NaN"})", integer, R"("x" is not a number)"},
      {R"({"x":"inf"})", number, R"("x" is not a number)"},
      {R"({"x":"12 "})", integer, R"("x" is not a number)"},
      {R"({"x":"0x10"})", integer, R"("x" is not a number)"},
      {R"({"x":"1-2"})", integer, R"("x" is not a number)"},
      {R"({"x":"12\u0000"})", integer, R"("x" is not a number)"},
      {R"({"x":"[[["})", integer, R"("x" is not a number)"},
      {R"({"x":"1e999"})", number, R"("x" is out of range)"},
      {R"({"x":"-1e999"})", integer, R"("x" is out of range)"},
      {R"({"x":1.5})", integer, R"("x" is not an integer)"},
      {R"({"x":"1e-05"})", integer, R"("x" is not an integer)"},
      {R"({"x":9223372036854775808})", integer, R"("x" is out of range)"},
      {R"({"x":-9223372036854775809})", integer, R"("x" is out of range)"},
      {R"({"x":"1e19"})", integer, R"("x" is out of range)"},
      {R"({"x":-1e300})", integer, R"("x" is out of range)"},
      {R"({"x":1})", text, R"("x" is not a string)"},
      {R"({"x":1})", flag, R"("x" is not true or false)"},
      {R"({"x":[]})", section, R"("x" is not an object)"},
      {R"({})", architecture, R"("architecture" is missing)"},
      {R"({"architecture":1})", architecture, R"("architecture" is not a string)"},
      {R"({"architectures":[]})", architecture, R"("architectures" does not begin with a string)"},
      {R"({"architectures":"A"})", architecture, R"("architectures" does not begin with a string)"},
      {R"({"architectures":[1]})", architecture, R"("architectures" does not begin with a string)"},
  };
  for (const auto& [json, read, words] : cases) {
    SCOPED_TRACE(json);
    const config c = config::parse(json, "f");
    EXPECT_SAYS(error_of("f", [&, f = read] { f(c); }), words);
  }
  EXPECT_SAYS(error_of("f", [] { config::parse(R"({"x":1e999})", "f"); }), "invalid JSON");
  EXPECT_SAYS(error_of("f", [] { config::parse(R"({"x":1,"x":2})", "f"); }), R"(duplicate key "x")");
  EXPECT_SAYS(error_of("f", [] { config::parse(std::string(1 << 20, '['), "f"); }), "nested too deeply");
  EXPECT_SAYS(error_of("f", [] { config::parse(std::string("{\"x\0\":1}", 8), "f"); }), "NUL byte");
}

}  // namespace
