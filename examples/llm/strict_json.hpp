// SPDX-License-Identifier: MIT
#pragma once

// JSON from files that nobody vouches for, and the error that says what is wrong with a file.

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llm {

/// What a user can do something about: the file, what is wrong with it. Control characters, which names may have, become '?'.
struct load_error : std::runtime_error {
  load_error(std::string_view file, std::string_view wrong) : std::runtime_error(line(file, wrong)) {}

 private:
  static std::string line(std::string_view file, std::string_view wrong) {
    std::string text = std::string(file) + ": " + std::string(wrong);
    for (char& c : text)
      if (static_cast<unsigned char>(c) < 32 || c == 127) c = '?';
    return text;
  }
};

/// For messages: names and texts of a file may be as long as the file.
inline std::string shortened(std::string_view text) {
  return text.size() <= 200 ? std::string(text) : std::string(text.substr(0, 200)) + "...";
}
inline std::string in_quotes(std::string_view text) {
  return '"' + shortened(text) + '"';
}

/// Builds JSON values as nlohmann::json does, but refuses what its parser lets pass: keys that an object has twice, of which
/// readers differ in which one they take, and nesting beyond a limit. (Its parser callback would cost quadratic time.)
class strict_json final : public nlohmann::json_sax<nlohmann::json> {
 public:
  using json = nlohmann::json;

  strict_json(std::string_view file, std::size_t max_depth) : file_(file), max_depth_(max_depth) {}
  json result;

  bool null() override { return put(nullptr); }
  bool boolean(bool x) override { return put(x); }
  bool number_integer(std::int64_t x) override { return put(x); }
  bool number_unsigned(std::uint64_t x) override { return put(x); }
  bool number_float(double x, const std::string&) override { return put(x); }
  bool string(std::string& x) override { return put(std::move(x)); }
  bool binary(json::binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(std::string& name) override {
    const auto [member, is_new] = open_.back()->emplace(name, nullptr);
    if (!is_new) throw load_error(file_, "duplicate key " + in_quotes(name));
    target_ = &*member;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const json::exception& e) override {
    const std::string_view text = e.what();  // begins with the name of the exception in brackets
    throw load_error(file_, "invalid JSON: " + shortened(text.substr(text.find(']') + 2)));
  }

 private:
  bool put(json value) {
    if (!open_.empty() && open_.back()->is_array()) target_ = &open_.back()->emplace_back();
    *target_ = std::move(value);
    return true;
  }
  bool open(json empty) {
    if (open_.size() == max_depth_) throw load_error(file_, "JSON is nested too deeply");
    put(std::move(empty));
    open_.push_back(target_);
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view file_;
  std::size_t max_depth_;
  json* target_ = &result;   // what the next value is written to, except in arrays
  std::vector<json*> open_;  // objects and arrays around it
};

/// A text that is one JSON object. NUL bytes, at which the parser would stop, are errors.
inline nlohmann::json parse_object(std::string_view text, std::string_view file, std::size_t max_depth) {
  if (text.find('\0') != text.npos) throw load_error(file, "JSON with a NUL byte");
  strict_json parser(file, max_depth);
  nlohmann::json::sax_parse(text, &parser);
  if (!parser.result.is_object()) throw load_error(file, "not a JSON object");
  return std::move(parser.result);
}

}  // namespace llm
