// SPDX-License-Identifier: MIT
#pragma once

// Reads safetensors files: 8 bytes of length, that much JSON, then the data (little-endian).

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace test {

struct golden_tensor {
  std::vector<long> shape;
  std::vector<double> values;

  template <class T>
  std::vector<T> as() const {
    return std::vector<T>(values.begin(), values.end());
  }
};

class golden_file {
 public:
  explicit golden_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot open " + path);
    const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::uint64_t header = 0;
    if (bytes.size() < 8) throw std::runtime_error("too short: " + path);
    std::memcpy(&header, bytes.data(), 8);
    if (header > bytes.size() - 8) throw std::runtime_error("too short: " + path);
    const char* const data = bytes.data() + 8 + header;
    const std::size_t size = bytes.size() - 8 - header;
    const nlohmann::json json = nlohmann::json::parse(bytes.data() + 8, data);
    for (const auto& [name, entry] : json.items()) {
      if (name == "__metadata__") {
        for (const auto& [key, value] : entry.items()) metadata_[key] = value.get<std::string>();
        continue;
      }
      golden_tensor& t = tensors_[name];
      t.shape = entry.at("shape").get<std::vector<long>>();
      const auto begin = entry.at("data_offsets").at(0).get<std::size_t>(),
                 end = entry.at("data_offsets").at(1).get<std::size_t>();
      if (begin > end || end > size) throw std::runtime_error("bad offsets in " + path);
      const std::string type = entry.at("dtype").get<std::string>();
      if (type == "F32")
        read<float>(data + begin, end - begin, t);
      else if (type == "F64")
        read<double>(data + begin, end - begin, t);
      else if (type == "I32")
        read<std::int32_t>(data + begin, end - begin, t);
      else if (type == "I64")
        read<std::int64_t>(data + begin, end - begin, t);
      else if (type == "U8")
        read<std::uint8_t>(data + begin, end - begin, t);
      else
        throw std::runtime_error("unknown type " + type);
    }
  }

  bool has(const std::string& name) const { return tensors_.count(name) != 0; }
  const golden_tensor& operator[](const std::string& name) const { return tensors_.at(name); }
  std::string text(const std::string& key) const {
    const auto found = metadata_.find(key);
    return found == metadata_.end() ? std::string() : found->second;
  }
  double number(const std::string& key) const { return std::stod(text(key)); }
  /// A list such as "0,2" or "0+1,2+3", as one list for each place of an element ({0, 2}, {1, 3}).
  std::vector<std::vector<long>> indices(const std::string& key) const {
    std::vector<std::vector<long>> places;
    std::istringstream list(text(key));
    for (std::string element; std::getline(list, element, ',');) {
      std::istringstream parts(element);
      std::size_t place = 0;
      for (std::string part; std::getline(parts, part, '+'); ++place) {
        if (places.size() <= place) places.emplace_back();
        places[place].push_back(std::stol(part));
      }
    }
    return places;
  }

 private:
  template <class T>
  static void read(const char* from, std::size_t bytes, golden_tensor& to) {
    for (std::size_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
      T x;
      std::memcpy(&x, from + i, sizeof(T));
      to.values.push_back(static_cast<double>(x));
    }
  }

  std::map<std::string, golden_tensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace test
