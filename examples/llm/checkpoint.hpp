// SPDX-License-Identifier: MIT
#pragma once

// A model on disk, as the Hugging Face hub has them: tensors in one safetensors file or in several with an index, and
// config.json beside them.
//
//   llm::checkpoint model("some/directory");
//   const std::int64_t width = model.configuration().integer("hidden_size");
//   std::vector<float> norm = model.read<float>("model.norm.weight", {width});
//
// Everything wrong is thrown as a load_error.

#include <cmath>
#include <filesystem>
#include <optional>

#include "safetensors.hpp"

namespace llm {

/// Named settings: those of config.json, or the metadata of a safetensors file, where all are strings. Numbers may be JSON
/// numbers or strings that hold one. A null is as good as nothing.
class config {
 public:
  using json = nlohmann::json;

  /// `object` is a JSON object; `file` is for messages.
  config(json object, std::string file) : object_(std::move(object)), file_(std::move(file)) {}
  static config parse(std::string_view text, const std::string& file) { return config(parse_object(text, file, 32), file); }

  bool has(const std::string& key) const { return find(key) != nullptr; }
  const json* find(const std::string& key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  std::int64_t integer(const std::string& key) const {
    const json value = parse_number(key);
    if (value.is_number_integer()) {
      constexpr std::uint64_t most = std::numeric_limits<std::int64_t>::max();
      if (value.is_number_unsigned() && value.get<std::uint64_t>() > most) throw error(key, "is out of range");
      return value.get<std::int64_t>();
    }
    const auto x = value.get<double>();
    if (x != std::floor(x)) throw error(key, "is not an integer");
    if (!(std::fabs(x) < 0x1p63)) throw error(key, "is out of range");
    return static_cast<std::int64_t>(x);
  }
  double number(const std::string& key) const { return parse_number(key).get<double>(); }
  std::string text(const std::string& key) const {
    const json& value = at(key);
    if (!value.is_string()) throw error(key, "is not a string");
    return value.get<std::string>();
  }
  /// true or false; in metadata also Python's spelling.
  bool flag(const std::string& key) const {
    const json& value = at(key);
    if (value == true || value == "true" || value == "True") return true;
    if (value == false || value == "false" || value == "False") return false;
    throw error(key, "is not true or false");
  }
  std::int64_t integer(const std::string& key, std::int64_t otherwise) const { return has(key) ? integer(key) : otherwise; }
  double number(const std::string& key, double otherwise) const { return has(key) ? number(key) : otherwise; }
  std::string text(const std::string& key, const std::string& otherwise) const { return has(key) ? text(key) : otherwise; }
  bool flag(const std::string& key, bool otherwise) const { return has(key) ? flag(key) : otherwise; }

  /// An object inside, such as rope_scaling, if there is one.
  std::optional<config> section(const std::string& key) const {
    const json* const value = find(key);
    if (!value) return std::nullopt;
    if (!value->is_object()) throw error(key, "is not an object");
    return config(*value, file_ + ": " + shortened(key));
  }

  /// The class of the model, e.g. "LlamaForCausalLM": the first of `architectures`, or `architecture`.
  std::string architecture() const {
    const json* const list = find("architectures");
    if (!list) return text("architecture");
    if (!list->is_array() || list->empty() || !list->front().is_string())
      throw error("architectures", "does not begin with a string");
    return list->front().get<std::string>();
  }

  /// For what a reader finds wrong with a value.
  load_error error(const std::string& key, const std::string& wrong) const {
    return load_error(file_, in_quotes(key) + ' ' + wrong);
  }

 private:
  const json& at(const std::string& key) const {
    const json* const value = find(key);
    if (!value) throw error(key, "is missing");
    return *value;
  }

  json parse_number(const std::string& key) const {
    const json& value = at(key);
    if (value.is_number()) return value;
    // Only what a number can consist of goes to the parser.
    const std::string* const digits = value.get_ptr<const std::string*>();
    if (!digits || digits->find_first_not_of("+-.0123456789Ee") != digits->npos) throw error(key, "is not a number");
    try {
      return json::parse(*digits);
    } catch (const json::out_of_range&) {
      throw error(key, "is out of range");
    } catch (const json::exception&) {
      throw error(key, "is not a number");
    }
  }

  json object_;
  std::string file_;
};

/// The `weight_map` of an index: tensor → file in the directory of the index.
inline std::map<std::string, std::string> parse_index(std::string_view text, const std::string& file) {
  const nlohmann::json index = parse_object(text, file, 8);
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object()) throw load_error(file, "has no object weight_map");
  std::map<std::string, std::string> shards;
  for (const auto& [tensor, value] : map->items()) {
    const auto fail = [&, t = tensor](const std::string& wrong) {
      return load_error(file, "tensor " + in_quotes(t) + ": " + wrong);
    };
    if (!value.is_string()) throw fail("the name of its file is not a string");
    const auto shard = value.get<std::string>();
    const auto ends_with = [&](std::string_view end) {
      return shard.size() > end.size() && std::string_view(shard).substr(shard.size() - end.size()) == end;
    };
    if (shard.find_first_of(std::string_view("/\\\0", 3)) != shard.npos)
      throw fail("file " + in_quotes(shard) + " is not a plain name in the directory of the index");
    if (ends_with(".index.json")) throw fail("file " + in_quotes(shard) + " is an index: cyclic shards");
    if (!ends_with(".safetensors")) throw fail("file " + in_quotes(shard) + " is not a .safetensors file");
    shards.emplace(tensor, shard);
  }
  if (shards.empty()) throw load_error(file, "weight_map is empty");
  return shards;
}

/// The tensors of a model and its configuration. Move-only; references to tensors stay valid when it is moved.
class checkpoint {
 public:
  /// A .safetensors file (with its index beside it, if it is one of several), a .safetensors.index.json file, or a directory
  /// that holds model.safetensors or model.safetensors.index.json.
  explicit checkpoint(const std::filesystem::path& path) {
    namespace fs = std::filesystem;
    std::error_code ignored;
    fs::path file = path;
    if (fs::is_directory(path, ignored)) {
      file = path / "model.safetensors";
      if (!fs::exists(file, ignored)) file += ".index.json";
      if (!fs::exists(file, ignored))
        throw load_error(path.string(), "holds neither model.safetensors nor model.safetensors.index.json");
    } else if (const fs::path index = index_beside(path); fs::exists(index, ignored)) {
      file = index;
    }
    const fs::path directory = file.parent_path();

    if (file.extension() == ".json") {
      const mapped_file text(file.string());
      for (const auto& [tensor, shard] : parse_index(text.bytes(), file.string())) {
        auto known = files_.find(shard);
        if (known == files_.end()) known = files_.try_emplace(shard, (directory / shard).string()).first;
        if (!known->second.has(tensor))
          throw load_error(file.string(),
                           "promises tensor " + in_quotes(tensor) + " in " + in_quotes(shard) + ", which has it not");
        file_of_.emplace(tensor, &known->second);
      }
    } else {
      const safetensors& only = files_.try_emplace("", file.string()).first->second;
      for (const std::string& tensor : only.names()) file_of_.emplace(tensor, &only);
    }

    const fs::path settings = directory / "config.json";
    if (fs::exists(settings, ignored)) {
      const mapped_file text(settings.string());
      config_ = config::parse(text.bytes(), settings.string());
    } else {
      const safetensors& first = files_.begin()->second;
      config_ = config(first.metadata(), first.file() + ": __metadata__");
    }
    name_ = file.string();
  }

  const config& configuration() const { return config_; }
  /// Sorted.
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& [tensor, file] : file_of_) result.push_back(tensor);
    return result;
  }

  bool has(const std::string& tensor) const { return file_of_.count(tensor) != 0; }
  const tensor_info& tensor(const std::string& name) const { return file(name).at(name); }
  /// The tensor, which must have that shape.
  const tensor_info& expect(const std::string& name, const std::vector<std::int64_t>& shape) const {
    const tensor_info& found = tensor(name);
    if (found.shape != shape)
      throw load_error(file(name).file(),
                       "tensor " + in_quotes(name) + ": found shape " + print(found.shape) + ", expected " + print(shape));
    return found;
  }
  /// Its numbers, row by row.
  template <class T>
  std::vector<T> read(const std::string& name, const std::vector<std::int64_t>& shape) const {
    expect(name, shape);
    return file(name).template read<T>(name);
  }

 private:
  /// model-00001-of-00003.safetensors → model.safetensors.index.json; any other path → nothing.
  static std::filesystem::path index_beside(const std::filesystem::path& path) {
    static constexpr std::string_view pattern = "-00000-of-00000";
    std::string name = path.stem().string();
    if (path.extension() != ".safetensors" || name.size() <= pattern.size()) return {};
    std::string numbers = name.substr(name.size() - pattern.size());
    std::replace_if(
        numbers.begin(), numbers.end(), [](char c) { return c >= '0' && c <= '9'; }, '0');
    if (numbers != pattern) return {};
    name.resize(name.size() - pattern.size());
    return path.parent_path() / (name + ".safetensors.index.json");
  }

  static std::string print(const std::vector<std::int64_t>& shape) {
    std::string text;
    for (const std::int64_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
    return '[' + shortened(text) + ']';
  }

  const safetensors& file(const std::string& tensor) const {
    const auto found = file_of_.find(tensor);
    if (found == file_of_.end()) throw load_error(name_, "has no tensor " + in_quotes(tensor));
    return *found->second;
  }

  std::map<std::string, safetensors> files_;
  std::map<std::string, const safetensors*> file_of_;
  config config_{nlohmann::json::object(), ""};
  std::string name_;
};

}  // namespace llm
