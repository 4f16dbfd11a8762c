#include "checkpoint/files/tensor_store.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/macros.h"

namespace marlin {

const Json& TensorStore::config() const {
  static const Json kNone;
  return parsed_config == nullptr ? kNone : *parsed_config;
}

Status TensorStore::SetConfig(std::string text, const std::string& file) {
  MARLIN_ASSIGN_OR_RETURN(Json config, ParseJsonObject(text, file));
  config_json = std::move(text);
  parsed_config = std::make_shared<const Json>(std::move(config));
  return {};
}

std::optional<size_t> TensorStore::FindTensor(std::string_view name) const {
  const auto found = std::lower_bound(tensors.begin(), tensors.end(), name,
                                      [](const TensorInfo& tensor, std::string_view key) {
                                        return std::string_view(tensor.name) < key;
                                      });
  if (found == tensors.end() || found->name != name) return std::nullopt;
  return static_cast<size_t>(found - tensors.begin());
}

void TensorStore::Release(size_t tensor) const {
  const Mapping& mapping = MappingOf(tensor);
  const int64_t offset = tensors[tensor].offset;
  // A computed tensor may be larger than what it is computed from.
  mapping.Release(offset, std::min(tensors[tensor].bytes, mapping.size() - offset));
}

Status SortTensors(TensorStore* store) {
  std::vector<TensorInfo>& tensors = store->tensors;
  const auto by_name = [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; };
  if (!std::is_sorted(tensors.begin(), tensors.end(), by_name)) {
    std::stable_sort(tensors.begin(), tensors.end(), by_name);
  }
  std::unordered_map<std::string_view, uint32_t> numbers;
  for (size_t i = 0; i < store->files.size(); ++i) {
    numbers.emplace(store->files[i].name, static_cast<uint32_t>(i));
  }
  store->tensor_file.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i > 0 && tensors[i - 1].name == tensors[i].name) {
      return Status(Code::kMalformedFile,
                    fmt::format("{}: tensor \"{}\" is in both {} and {}", Printable(store->path),
                                Printable(tensors[i].name), Printable(tensors[i - 1].file),
                                Printable(tensors[i].file)));
    }
    store->tensor_file.push_back(numbers.at(tensors[i].file));
  }
  return {};
}

Status ReplaceTensors(const std::vector<size_t>& replaced, std::vector<ComputedTensor> made,
                      TensorStore* store) {
  std::vector<bool> gone(store->tensors.size());
  for (const size_t tensor : replaced) gone[tensor] = true;
  std::vector<TensorInfo> tensors;
  std::map<std::string, std::optional<uint64_t>> checksums;
  for (size_t i = 0; i < gone.size(); ++i) {
    if (gone[i]) continue;
    if (!store->checksums.empty() && store->checksums[i]) {
      checksums[store->tensors[i].name] = store->checksums[i];
    }
    tensors.push_back(std::move(store->tensors[i]));
  }
  std::map<std::string, std::function<void(std::byte*)>> compute;
  for (ComputedTensor& tensor : made) {
    compute[tensor.info.name] = std::move(tensor.compute);
    tensors.push_back(std::move(tensor.info));
  }
  store->tensors = std::move(tensors);
  store->tensor_file.clear();
  MARLIN_RETURN_IF_ERROR(SortTensors(store));
  store->checksums.assign(store->tensors.size(), std::nullopt);
  for (size_t i = 0; i < store->tensors.size(); ++i) {
    const std::string& name = store->tensors[i].name;
    if (const auto found = checksums.find(name); found != checksums.end()) {
      store->checksums[i] = found->second;
    }
    if (const auto found = compute.find(name); found != compute.end()) {
      store->computed.emplace(i, std::move(found->second));
    }
  }
  return {};
}

}  // namespace marlin
