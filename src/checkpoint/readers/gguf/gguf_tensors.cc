#include "checkpoint/readers/gguf/gguf_tensors.h"

#include <fmt/core.h>

#include <cstring>

#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/readers/gguf/gguf_config.h"

namespace marlin {

Status GgufTensorList::Read() {
  MARLIN_RETURN_IF_ERROR(ParseFiles());
  const std::string_view name = metadata().Text("general.architecture").value_or("");
  if (const GgufArchitecture* const found = FindGgufArchitecture(name)) {
    naming_ = ReadGgufNaming(*found, HasGgufExperts(metadata(), name));
    const int64_t predicting = Number("nextn_predict_layers").value_or(0);
    const int64_t layers = Number("block_count").value_or(0) - predicting;
    if (predicting > 0 && layers > 0) naming_.layers = layers;
  }
  return ListTensors();
}

std::optional<int64_t> GgufTensorList::Number(std::string_view key) const {
  return metadata().Integer(fmt::format("{}.{}", naming_.architecture->name, key));
}

Status GgufTensorList::Fail(const std::string& message, Code code) const {
  return Status(code, fmt::format("{}: {}", Printable(store_.path), message));
}

Status GgufTensorList::FailTensor(const GgufFileTensor& tensor, const std::string& message) const {
  return Fail(fmt::format("tensor \"{}\": {}", Printable(tensor.tensor->name), message));
}

Status GgufTensorList::ParseFiles() {
  for (const CheckpointFile& file : store_.files) {
    const std::string where = store_.is_directory ? JoinPath(store_.path, file.name) : store_.path;
    MARLIN_ASSIGN_OR_RETURN(
        GgufFile parsed,
        ParseGguf(file.mapping->text(), store_.files.size() > 1 ? file.name : where));
    files_.push_back(std::move(parsed));
  }
  for (size_t i = 0; i < files_.size(); ++i) {
    store_.files[i].data_begin = files_[i].data_begin;
    const GgufMetadata& metadata = files_[i].metadata;
    const int64_t count = metadata.Integer("split.count").value_or(1);
    const int64_t number = metadata.Integer("split.no").value_or(0);
    if (count != static_cast<int64_t>(files_.size()) && (count > 1 || files_.size() > 1)) {
      return Fail(fmt::format("{}: split.count is {}, and {} files were found",
                              Printable(store_.files[i].name), count, files_.size()));
    }
    if (count > 1 && number != static_cast<int64_t>(i)) {
      return Fail(fmt::format("{}: split.no is {}, expected {}", Printable(store_.files[i].name),
                              number, i));
    }
  }
  return {};
}

Status GgufTensorList::ListTensors() {
  for (size_t i = 0; i < files_.size(); ++i) {
    for (const GgufTensor& tensor : files_[i].tensors) {
      GgufFileTensor listed;
      listed.tensor = &tensor;
      listed.file = i;
      MARLIN_ASSIGN_OR_RETURN(listed.stored, StoredAs(tensor.type));
      if (naming_.known()) {
        listed.others = PlacesOfGgufTensor(naming_, tensor.name);
        listed.place = listed.others.front();
        listed.others.erase(listed.others.begin());
      } else {
        listed.place.name = tensor.name;
      }
      if (tensor.name.empty()) return FailTensor(listed, "the name is empty");
      // Headers of safetensors and config.json, which an import writes, hold UTF-8.
      if (EscapeUnprintable(tensor.name) != tensor.name) {
        return FailTensor(listed, "its name is not printable UTF-8");
      }
      // Names with '*' stand for experts in this library.
      if (tensor.name.find('*') != std::string_view::npos) {
        return FailTensor(listed, "its name contains '*'");
      }
      if (!tensors_.emplace(tensor.name, listed).second) {
        return FailTensor(listed, "occurs twice");
      }
    }
  }
  if (tensors_.empty()) return Fail("holds no tensors");
  const std::optional<int64_t> total = metadata().Integer("split.tensors.count");
  if (total && files_.size() > 1 && *total != static_cast<int64_t>(tensors_.size())) {
    return Fail(fmt::format("split.tensors.count is {}, the files hold {} tensors", *total,
                            tensors_.size()));
  }
  return {};
}

const std::byte* GgufTensorList::Data(const GgufFileTensor& tensor) const {
  return store_.files[tensor.file].mapping->data() + tensor.tensor->offset;
}

Result<std::vector<float>> GgufTensorList::Floats(const GgufFileTensor& tensor) const {
  if (tensor.stored.quantized() || tensor.stored.dtype != DType::kF32) {
    return FailTensor(tensor, fmt::format("expected F32, got {}", tensor.stored.name));
  }
  std::vector<float> values(static_cast<size_t>(tensor.tensor->dims.ElementCount()));
  if (!values.empty()) {
    std::memcpy(values.data(), Data(tensor), values.size() * sizeof(float));
  }
  return values;
}

Status GgufTensorList::SetRows(const GgufFileTensor& tensor, GgufRows* rows) const {
  const Shape& dims = tensor.tensor->dims;
  const int rank = dims.rank();
  // A vector of q or k has a row for each of its elements.
  const bool by_element = tensor.place.rows != GgufPlace::Rows::kStraight && rank == 1;
  const int64_t columns = rank == 0 || by_element ? 1 : dims[rank - 1];
  rows->rows = by_element ? dims[0] : (rank < 2 ? 1 : dims[rank - 2]);
  rows->experts = 1;
  for (int i = 0; i + 2 < rank; ++i) rows->experts *= dims[i];
  rows->row_bytes = columns / tensor.stored.elements * tensor.stored.bytes;
  // Without data no size is bounded.
  if (tensor.tensor->bytes == 0) return {};
  if (tensor.place.value_columns) {
    const GgufHeads heads = DeltaHeads();
    if (!heads.has_delta() || columns % heads.delta_values != 0) {
      return FailTensor(
          tensor, fmt::format("{} columns are not the value heads of {} ({}.ssm.time_step_rank)",
                              columns, heads.delta_values, naming_.architecture->name));
    }
    rows->column_parts = TiledHeads(heads);
  }
  if (tensor.place.rows == GgufPlace::Rows::kStraight) return {};
  if (by_element && tensor.stored.quantized()) {
    return FailTensor(tensor, "a quantized bias of heads in pairs");
  }
  return SetPlaces(tensor, by_element, rows);
}

Status GgufTensorList::SetPlaces(const GgufFileTensor& tensor, bool by_element,
                                 GgufRows* rows) const {
  using RowOrder = GgufPlace::Rows;
  const RowOrder kind = tensor.place.rows;
  const std::string_view architecture = naming_.architecture->name;
  if (kind == RowOrder::kQueryHeads || kind == RowOrder::kKeyHeads) {
    const bool queries = kind == RowOrder::kQueryHeads;
    MARLIN_ASSIGN_OR_RETURN(const int64_t heads, HeadsOf(tensor, queries));
    rows->places = GgufRowPlaces(kind, {.queries = heads, .keys = heads}, rows->rows);
    if (!rows->places.empty()) return {};
    return FailTensor(tensor, fmt::format("{} rows are not {} heads of even size "
                                          "({}.attention.head_count{})",
                                          rows->rows, heads, architecture, queries ? "" : "_kv"));
  }
  const GgufHeads heads = DeltaHeads();
  const auto fail = [&] {
    return FailTensor(
        tensor, fmt::format("{} rows are not {} key heads of {} and {} value heads of {} "
                            "({}.ssm.group_count, .state_size, .time_step_rank, .inner_size)",
                            rows->rows, heads.delta_keys, heads.delta_key_dim, heads.delta_values,
                            heads.delta_value_dim, architecture));
  };
  if (IsOfHeads(kind)) {
    if (!heads.has_delta() || by_element || rows->rows != ProjectionRows(kind, heads)) {
      return fail();
    }
    rows->stored = rows->rows;
    rows->rows = PartRows(kind, heads);
  }
  rows->places = GgufRowPlaces(kind, heads, rows->rows);
  return rows->places.empty() ? fail() : Status();
}

Result<int64_t> GgufTensorList::HeadsOf(const GgufFileTensor& tensor, bool queries) const {
  const std::string_view architecture = naming_.architecture->name;
  const std::string key =
      fmt::format("{}.attention.head_count{}", architecture, queries ? "" : "_kv");
  const auto counts = metadata().Integers(
      metadata().Has(key) ? key : fmt::format("{}.attention.head_count", architecture));
  if (!counts || counts->empty()) {
    return FailTensor(tensor, fmt::format("the order of its rows needs {}, which is missing", key));
  }
  if (counts->size() == 1) return counts->front();
  // The converter writes an array only if the layers differ.
  const std::string name(tensor.tensor->name.substr(4));
  const auto layer = static_cast<size_t>(std::stoul("0" + name.substr(0, name.find('.'))));
  if (name.find('.') > 5 || layer >= counts->size()) {
    return FailTensor(tensor, fmt::format("{} counts {} layers", key, counts->size()));
  }
  return (*counts)[layer];
}

/// The runtime of these files takes keys and values of one size.
GgufHeads GgufTensorList::DeltaHeads() const {
  GgufHeads heads;
  heads.delta_keys = Number("ssm.group_count").value_or(0);
  heads.delta_values = Number("ssm.time_step_rank").value_or(0);
  heads.delta_key_dim = Number("ssm.state_size").value_or(0);
  const int64_t inner = Number("ssm.inner_size").value_or(0);
  if (heads.delta_values > 0 && inner % heads.delta_values == 0) {
    heads.delta_value_dim = inner / heads.delta_values;
  }
  return heads;
}

std::vector<std::string> GgufTensorList::ScaleNames(const GgufFileTensor& tensor) {
  if (!tensor.stored.quantized()) return {};
  if (tensor.stored.format->scale_type != ScaleType::kE4M3) return {};
  std::string stem(tensor.tensor->name);
  constexpr std::string_view kWeight = ".weight";
  if (stem.ends_with(kWeight)) stem.resize(stem.size() - kWeight.size());
  return {stem + ".scale", stem + ".input_scale"};
}

Result<std::vector<float>> GgufTensorList::FactorsOf(const GgufFileTensor& tensor) const {
  for (const std::string& name : ScaleNames(tensor)) {
    const auto found = tensors_.find(name);
    if (name.ends_with(".input_scale") || found == tensors_.end()) continue;
    return Floats(found->second);
  }
  return std::vector<float>();
}

}  // namespace marlin
