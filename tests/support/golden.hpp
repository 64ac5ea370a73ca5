// SPDX-License-Identifier: MIT
#pragma once

// Files of the golden format: tensors of a published implementation as safetensors, and strings that say what they are.

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <llm/safetensors.hpp>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace test {

struct golden_tensor {
  llm::dtype type;
  std::vector<std::int64_t> shape;
  std::vector<double> values;

  template <class T>
  std::vector<T> as() const {
    return std::vector<T>(values.begin(), values.end());
  }
};

inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator)
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

class golden_file {
 public:
  explicit golden_file(const std::string& path) : path_(path) {
    const llm::safetensors file(path);
    metadata_ = file.metadata();
    if (text("format") != "diffattn-golden/1") throw error("format", "is not a format that can be read");
    for (const std::string& name : file.names())
      tensors_[name] = {file.at(name).type, file.at(name).shape, file.read<double>(name)};
  }

  const std::string& path() const { return path_; }
  const std::map<std::string, golden_tensor>& tensors() const { return tensors_; }
  bool has(const std::string& name) const { return tensors_.count(name) != 0; }
  const golden_tensor& operator[](const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) throw llm::load_error(path_, "has no tensor " + llm::in_quotes(name));
    return found->second;
  }
  /// The tensor, which must have that type and shape.
  const golden_tensor& expect(const std::string& name, llm::dtype type, const std::vector<std::int64_t>& shape) const {
    const golden_tensor& t = (*this)[name];
    if (t.type != type)
      throw llm::load_error(path_, "tensor " + llm::in_quotes(name) + ": is " + std::string(llm::describe(t.type).name) +
                                       ", not " + std::string(llm::describe(type).name));
    if (t.shape != shape)
      throw llm::load_error(
          path_, "tensor " + llm::in_quotes(name) + ": has the shape " + print(t.shape) + ", expected " + print(shape));
    return t;
  }

  bool says(const std::string& key) const { return metadata_.count(key) != 0; }
  /// Empty if there is no such key.
  std::string text(const std::string& key) const {
    const auto found = metadata_.find(key);
    return found == metadata_.end() ? std::string() : found->second;
  }
  double number(const std::string& key) const {
    const std::string value = text(key);
    char* end = nullptr;
    const double x = std::strtod(value.c_str(), &end);
    if (value.empty() || end != value.c_str() + value.size() || !std::isfinite(x)) throw error(key, "is not a number");
    return x;
  }
  std::int64_t integer(const std::string& key, std::int64_t least, std::int64_t most = std::int64_t{1} << 31) const {
    const std::int64_t x = parse(key, text(key));
    if (x < least || x > most) throw error(key, "is out of range");
    return x;
  }
  /// A list such as "0,2" or "0+1,2+3", as one list for each place of an element ({0, 2}, {1, 3}).
  std::vector<std::vector<std::int64_t>> indices(const std::string& key) const {
    std::vector<std::vector<std::int64_t>> places;
    for (const std::string& element : split(text(key), ',')) {
      const std::vector<std::string> parts = split(element, '+');
      if (places.empty()) places.resize(parts.size());
      if (parts.size() != places.size()) throw error(key, "has elements of different kinds");
      for (std::size_t place = 0; place < parts.size(); ++place) places[place].push_back(parse(key, parts[place]));
    }
    return places;
  }
  /// Part of the value of a key.
  std::int64_t parse(const std::string& key, const std::string& part) const {
    std::int64_t x = 0;
    const auto [end, wrong] = std::from_chars(part.data(), part.data() + part.size(), x);
    if (wrong != std::errc() || end != part.data() + part.size()) throw error(key, "is not made of integers");
    return x;
  }

  /// For what a reader finds wrong with a value.
  llm::load_error error(const std::string& key, const std::string& wrong) const {
    return says(key) ? llm::load_error(path_, key + ' ' + llm::in_quotes(text(key)) + ' ' + wrong)
                     : llm::load_error(path_, key + " is missing");
  }

 private:
  static std::string print(const std::vector<std::int64_t>& shape) {
    std::string text;
    for (const std::int64_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
    return '[' + text + ']';
  }

  std::string path_;
  std::map<std::string, golden_tensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace test
