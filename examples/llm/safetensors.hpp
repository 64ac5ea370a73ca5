// SPDX-License-Identifier: MIT
#pragma once

// Reads safetensors files: 8 bytes of header length (little-endian), a JSON object that describes the tensors, their data.
//
//   llm::safetensors file("model.safetensors");
//   std::vector<float> w = file.read<float>("lm_head.weight");  // file.at("lm_head.weight").shape: [vocabulary, width]
//
// The file is mapped, so only what is read is loaded. It is taken for hostile: the whole header is checked when opening, by
// the rules of the format (the data of the tensors fill the file without overlaps, holes or rest). What is wrong is thrown as
// a load_error, whose message is one line that names the file and the tensor.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <Eigen/Core>
#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "strict_json.hpp"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors files are little-endian, and so must be the machine"
#endif

namespace llm {

/// A file in memory, read-only. Nobody may shorten it meanwhile: reading what is gone raises SIGBUS.
class mapped_file {
 public:
  mapped_file() = default;
  explicit mapped_file(const std::string& file) {
    const auto system_error = [&](const char* what) { return load_error(file, what + std::generic_category().message(errno)); };
    // A pipe must give an error, not wait for a writer.
    const int handle = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (handle < 0) throw system_error("cannot open: ");
    const std::unique_ptr<const int, closer> guard(&handle);
    struct stat about;
    if (::fstat(handle, &about) != 0) throw system_error("cannot open: ");
    if (!S_ISREG(about.st_mode)) throw load_error(file, "not a regular file");
    if (about.st_size == 0) return;  // which cannot be mapped
    const auto bytes = static_cast<std::size_t>(about.st_size);
    void* const data = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, handle, 0);
    if (data == MAP_FAILED) throw system_error("cannot map: ");
    memory_ = {static_cast<const char*>(data), unmapper{bytes}};
  }

  std::string_view bytes() const { return {memory_.get(), memory_.get_deleter().bytes}; }

 private:
  struct closer {
    void operator()(const int* handle) const { ::close(*handle); }
  };
  struct unmapper {
    std::size_t bytes;
    void operator()(const char* data) const { ::munmap(const_cast<char*>(data), bytes); }
  };
  std::unique_ptr<const char, unmapper> memory_;
};

enum class dtype { boolean, u8, i8, u16, i16, f16, bf16, u32, i32, f32, u64, i64, f64 };

struct dtype_description {
  std::string_view name;
  std::size_t bytes;
};
inline const dtype_description& describe(dtype type) {
  static constexpr dtype_description all[] = {{"BOOL", 1}, {"U8", 1},   {"I8", 1},  {"U16", 2}, {"I16", 2},
                                              {"F16", 2},  {"BF16", 2}, {"U32", 4}, {"I32", 4}, {"F32", 4},
                                              {"U64", 8},  {"I64", 8},  {"F64", 8}};
  return all[static_cast<int>(type)];
}

struct tensor_info {
  dtype type;
  std::vector<std::int64_t> shape;  ///< none negative; [] is one number
  const unsigned char* data;        ///< row-major, little-endian, of any alignment
  std::size_t bytes;
  std::int64_t count;  ///< numbers, the product of the shape
};

/// Writes all `t.count` numbers to out, rounded to T where it has not got them. T is float or double.
template <class T>
void read_into(const tensor_info& t, T* out) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>);
  const auto convert = [&](auto stored) {
    for (std::int64_t i = 0; i < t.count; ++i) {
      std::memcpy(&stored, t.data + static_cast<std::size_t>(i) * sizeof stored, sizeof stored);
      out[i] = static_cast<T>(stored);
    }
  };
  switch (t.type) {
    case dtype::boolean:
    case dtype::u8: return convert(std::uint8_t{});
    case dtype::i8: return convert(std::int8_t{});
    case dtype::u16: return convert(std::uint16_t{});
    case dtype::i16: return convert(std::int16_t{});
    case dtype::f16: return convert(Eigen::half{});
    case dtype::bf16: return convert(Eigen::bfloat16{});
    case dtype::u32: return convert(std::uint32_t{});
    case dtype::i32: return convert(std::int32_t{});
    case dtype::f32: return convert(float{});
    case dtype::u64: return convert(std::uint64_t{});
    case dtype::i64: return convert(std::int64_t{});
    case dtype::f64: return convert(double{});
  }
}

/// One file. Move-only; the data of its tensors stay where they are when it is moved.
class safetensors {
 public:
  explicit safetensors(const std::string& file) : name_(file), memory_(file) { parse(memory_.bytes()); }
  /// Bytes of the caller, who keeps them; `name` is for messages.
  safetensors(std::string_view bytes, std::string name) : name_(std::move(name)) { parse(bytes); }

  const std::string& file() const { return name_; }
  /// In the order of their data.
  const std::vector<std::string>& names() const { return names_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  bool has(std::string_view tensor) const { return find(tensor) != nullptr; }
  const tensor_info* find(std::string_view tensor) const {
    const auto found = tensors_.find(tensor);
    return found == tensors_.end() ? nullptr : &found->second;
  }
  const tensor_info& at(std::string_view tensor) const {
    const tensor_info* const found = find(tensor);
    if (!found) throw load_error(name_, "has no tensor " + in_quotes(tensor));
    return *found;
  }

  template <class T>
  void read_into(std::string_view tensor, T* out) const {
    llm::read_into(at(tensor), out);
  }
  template <class T>
  std::vector<T> read(std::string_view tensor) const {
    std::vector<T> result(static_cast<std::size_t>(at(tensor).count));
    read_into(tensor, result.data());
    return result;
  }

 private:
  using json = nlohmann::json;

  void parse(std::string_view bytes) {
    constexpr std::uint64_t most = 100'000'000;  // the limit of the format
    if (bytes.size() < 8) throw load_error(name_, "shorter than the 8 bytes of the header length");
    std::uint64_t length;
    std::memcpy(&length, bytes.data(), sizeof length);
    if (length > most) throw load_error(name_, "header of " + std::to_string(length) + " bytes, more than 100 MB");
    if (length > bytes.size() - 8)
      throw load_error(name_, "header of " + std::to_string(length) + " bytes, longer than the file");
    const std::string_view header = bytes.substr(8, length), data = bytes.substr(8 + length);
    if (header.empty() || header[0] != '{') throw load_error(name_, "header does not begin with {");

    const json object = parse_object(header, name_, 8);
    for (const auto& [key, value] : object.items()) {
      if (key == "__metadata__") {
        read_metadata(value);
      } else {
        tensors_.emplace(key, describe_tensor(key, value, data));
        names_.push_back(key);
      }
    }
    check_cover(data);
  }

  void read_metadata(const json& object) {
    if (!object.is_object()) throw load_error(name_, "__metadata__ is not an object");
    for (const auto& [key, value] : object.items()) {
      if (!value.is_string()) throw load_error(name_, "__metadata__: the value of " + in_quotes(key) + " is not a string");
      metadata_[key] = value.get<std::string>();
    }
  }

  tensor_info describe_tensor(const std::string& tensor, const json& value, std::string_view data) const {
    const auto fail = [&](const std::string& wrong) { return load_error(name_, "tensor " + in_quotes(tensor) + ": " + wrong); };
    if (!value.is_object()) throw fail("is not described by an object");
    const auto member = [&](const char* key) -> const json& {
      const auto found = value.find(key);
      if (found == value.end()) throw fail(std::string("has no ") + key);
      return *found;
    };
    const auto sizes = [&](const char* key) {
      const json& list = member(key);
      if (!list.is_array()) throw fail(std::string(key) + " is not an array");
      std::vector<std::int64_t> result;
      for (const json& number : list) {
        if (!number.is_number_integer()) throw fail(std::string(key) + " has an entry that is not an integer");
        const auto size = number.get<std::int64_t>();  // from 2^63 on it would be negative as well
        if (size < 0) throw fail(std::string(key) + " has an entry that is negative or too large");
        result.push_back(size);
      }
      return result;
    };

    tensor_info t{};
    const json& type = member("dtype");
    if (!type.is_string()) throw fail("dtype is not a string");
    const auto& type_name = type.get_ref<const std::string&>();
    int index = 0;
    while (index <= static_cast<int>(dtype::f64) && describe(dtype(index)).name != type_name) ++index;
    if (index > static_cast<int>(dtype::f64)) throw fail("dtype " + in_quotes(type_name) + " is not supported");
    t.type = dtype(index);

    t.shape = sizes("shape");
    t.count = 1;
    const auto size = static_cast<std::int64_t>(describe(t.type).bytes);
    const std::int64_t most = std::numeric_limits<std::int64_t>::max() / size;
    for (const std::int64_t n : t.shape) {
      if (n > 0 && t.count > most / n) throw fail("shape is too large");
      t.count *= n;
    }

    const std::vector<std::int64_t> offsets = sizes("data_offsets");
    if (offsets.size() != 2) throw fail("data_offsets are not a begin and an end");
    const auto begin = static_cast<std::size_t>(offsets[0]), end = static_cast<std::size_t>(offsets[1]);
    if (begin > end) throw fail("data_offsets begin after their end");
    if (end > data.size()) throw fail("data_offsets reach beyond the file");
    t.bytes = end - begin;
    if (t.bytes != static_cast<std::size_t>(t.count * size))
      throw fail("has " + std::to_string(t.bytes) + " bytes of data, its shape needs " + std::to_string(t.count * size));
    t.data = reinterpret_cast<const unsigned char*>(data.data()) + begin;
    return t;
  }

  /// Every byte of the data belongs to exactly one tensor. Also sorts names_.
  void check_cover(std::string_view data) {
    std::vector<std::pair<const tensor_info*, std::string>> sorted;
    for (const std::string& name : names_) sorted.emplace_back(&tensors_.find(name)->second, name);
    std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
      return std::tie(a.first->data, a.first->bytes, a.second) < std::tie(b.first->data, b.first->bytes, b.second);
    });
    names_.clear();
    const auto* next = reinterpret_cast<const unsigned char*>(data.data());
    const unsigned char* const end = next + data.size();
    for (const auto& [tensor, name] : sorted) {
      if (tensor->data < next) throw load_error(name_, "tensor " + in_quotes(name) + " overlaps " + in_quotes(names_.back()));
      if (tensor->data > next) throw load_error(name_, "data before tensor " + in_quotes(name) + " belong to no tensor");
      next += tensor->bytes;
      names_.push_back(name);
    }
    if (next != end) throw load_error(name_, std::to_string(end - next) + " bytes after the last tensor");
  }

  std::string name_;
  mapped_file memory_;
  std::map<std::string, tensor_info, std::less<>> tensors_;
  std::vector<std::string> names_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace llm
