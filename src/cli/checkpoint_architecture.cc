#include "cli/checkpoint_architecture.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <string_view>

#include "base/json.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/files/model_directory.h"
#include "checkpoint/source_layout.h"
#include "recipe/typed_config.h"

namespace marlin::cli {
namespace {

constexpr int64_t kMaxIndex = int64_t{1} << 16;

/// The number N of "<before>N." in a name; -1 if there is none or it is absurd.
int64_t IndexAfter(std::string_view name, std::string_view before) {
  const size_t at = name.find(before);
  if (at == std::string_view::npos || (at != 0 && name[at - 1] != '.')) return -1;
  const char* begin = name.data() + at + before.size();
  const char* end = name.data() + name.size();
  int64_t index = -1;
  const auto [stop, error] = std::from_chars(begin, end, index);
  if (error != std::errc() || stop == end || *stop != '.' || index > kMaxIndex) return -1;
  return index;
}

Result<ModelTensor> DescribeTensor(const Checkpoint& checkpoint, const TensorInfo& info) {
  if (info.dtype != DType::kF32 && info.dtype != DType::kBf16 && info.dtype != DType::kF16) {
    return Status(Code::kUnsupported, fmt::format("{}: plans are made from f32, bf16 and f16, not "
                                                  "from {}",
                                                  info.name, DTypeName(info.dtype)));
  }
  ModelTensor tensor;
  tensor.name = info.name;
  tensor.shape = info.shape;
  tensor.layer_class = ClassifyTensor(info.name);
  tensor.layer = std::max(IndexAfter(info.name, "layers."), IndexAfter(info.name, "h."));
  tensor.routed = tensor.layer_class == LayerClass::kMoeExpert;
  MARLIN_ASSIGN_OR_RETURN(const SourceLayout layout,
                          SourceLayoutOf(CheckpointAccess::Get(checkpoint), info));
  tensor.input_first = layout == SourceLayout::kInOut;
  return tensor;
}

Result<int64_t> ExpertsPerToken(const Checkpoint& checkpoint) {
  constexpr std::array<std::string_view, 2> kKeys = {"num_experts_per_tok", "experts_per_token"};
  if (checkpoint.config_json().empty()) {
    return Status(Code::kMalformedFile,
                  fmt::format("{}: a model with experts needs a config.json that says how many a "
                              "token uses",
                              checkpoint.path()));
  }
  MARLIN_ASSIGN_OR_RETURN(ModelConfig config, ModelConfig::Parse(checkpoint.config_json()));
  Result<TypedConfig> typed = ReadTypedConfig(config, UnknownKeys::kIgnore);
  if (typed.ok()) config = std::move(typed->config);
  const int64_t count = config.SizeOfAny(kKeys, kMaxIndex);
  MARLIN_RETURN_IF_ERROR(config.status());
  return count;
}

std::string ModelType(const Checkpoint& checkpoint) {
  if (checkpoint.config_json().empty()) return "unknown architecture";
  Result<ModelConfig> config = ModelConfig::Parse(checkpoint.config_json());
  if (!config.ok()) return "unknown architecture";
  const std::string model_type = config->String("model_type");
  return model_type.empty() ? "unknown architecture" : model_type;
}

}  // namespace

Result<ModelArchitecture> DescribeCheckpoint(const Checkpoint& checkpoint) {
  if (checkpoint.quantized()) {
    return Status(Code::kUnsupported,
                  fmt::format("{}: is quantized already; plan its source", checkpoint.path()));
  }
  ModelArchitecture model;
  model.model_type = ModelType(checkpoint);
  bool has_lm_head = false;
  for (const TensorInfo& info : checkpoint.tensors()) {
    MARLIN_ASSIGN_OR_RETURN(ModelTensor tensor, DescribeTensor(checkpoint, info));
    model.layer_count = std::max(model.layer_count, tensor.layer + 1);
    has_lm_head = has_lm_head || tensor.layer_class == LayerClass::kLmHead;
    if (tensor.routed) {
      const int64_t stacked = tensor.shape.rank() == 3 ? tensor.shape[0] : 0;
      const size_t experts = info.name.find("experts.");
      const int64_t index = IndexAfter(std::string_view(info.name).substr(experts), "experts.");
      model.expert_count = std::max({model.expert_count, stacked, index + 1});
    }
    model.tensors.push_back(std::move(tensor));
  }
  model.tied_embeddings = !has_lm_head;
  if (model.expert_count > 0) {
    MARLIN_ASSIGN_OR_RETURN(model.experts_per_token, ExpertsPerToken(checkpoint));
    model.experts_per_token = std::min(model.experts_per_token, model.expert_count);
  }
  return model;
}

namespace {

Result<ModelArchitecture> DescribeHeaders(const std::string& source) {
  MARLIN_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(source));
  return DescribeCheckpoint(checkpoint);
}

}  // namespace

Result<ModelArchitecture> DescribeSource(const std::string& source) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (source.ends_with(".safetensors")) return DescribeHeaders(source);
  if (IsOtherContainer(source)) {
    MARLIN_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(source));
    Result<ModelArchitecture> model = DescribeModel(checkpoint.config_json());
    return model.ok() ? std::move(model) : model.status().WithContext(Printable(source));
  }
  const bool directory = fs::is_directory(source, ignored);
  const fs::path config = directory ? fs::path(source) / "config.json" : fs::path(source);
  if (directory && !fs::exists(config, ignored)) return DescribeHeaders(source);
  if (directory) {
    SystemIo io;
    MARLIN_RETURN_IF_ERROR(CheckModelFile(io, source, "config.json"));
  }
  MARLIN_ASSIGN_OR_RETURN(const std::string text, ReadFile(config.string(), kCheckpointJson.bytes));
  Result<ModelArchitecture> model = DescribeModel(text);
  if (model.ok()) return model;
  if (directory && model.status().code() == Code::kUnsupported) {
    Result<ModelArchitecture> from_headers = DescribeHeaders(source);
    if (from_headers.ok()) return from_headers;
  }
  return model.status().WithContext(Printable(source));
}

}  // namespace marlin::cli
