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
  architecture_ = FindGgufArchitecture(name);
  with_experts_ = architecture_ != nullptr && HasGgufExperts(metadata(), name);
  return ListTensors();
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
      if (architecture_ != nullptr) {
        listed.place = PlaceGgufTensor(*architecture_, with_experts_, tensor.name);
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
  if (tensor.place.rows == GgufPlace::Rows::kStraight) return {};
  if (by_element && tensor.stored.quantized()) {
    return FailTensor(tensor, "a quantized bias of heads in pairs");
  }
  const bool queries = tensor.place.rows == GgufPlace::Rows::kQueryHeads;
  const std::string key =
      fmt::format("{}.attention.head_count{}", architecture_->name, queries ? "" : "_kv");
  const auto counts = metadata().Integers(
      metadata().Has(key) ? key : fmt::format("{}.attention.head_count", architecture_->name));
  if (!counts || counts->empty()) {
    return FailTensor(tensor, fmt::format("the order of its rows needs {}, which is missing", key));
  }
  int64_t heads = counts->front();
  if (counts->size() > 1) {
    // The converter writes an array only if the layers differ.
    const std::string name(tensor.tensor->name.substr(4));
    const auto layer = static_cast<size_t>(std::stoul("0" + name.substr(0, name.find('.'))));
    if (name.find('.') > 5 || layer >= counts->size()) {
      return FailTensor(tensor, fmt::format("{} counts {} layers", key, counts->size()));
    }
    heads = (*counts)[layer];
  }
  if (heads < 1 || rows->rows % heads != 0 || rows->rows / heads % 2 != 0) {
    return FailTensor(
        tensor, fmt::format("{} rows are not {} heads of even size ({})", rows->rows, heads, key));
  }
  rows->head_dim = rows->rows / heads;
  return {};
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
