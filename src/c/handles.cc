#include "c/handles.h"

namespace marlin {
namespace {

static_assert(static_cast<int>(Code::kInternal) == MARLIN_INTERNAL &&
              static_cast<int>(Code::kDeviceLost) == MARLIN_DEVICE_LOST);
static_assert(static_cast<int>(DType::kU8) == MARLIN_U8 &&
              static_cast<int>(DType::kI8) == MARLIN_I8 &&
              static_cast<int>(DType::kF16) == MARLIN_F16 &&
              static_cast<int>(DType::kBf16) == MARLIN_BF16 &&
              static_cast<int>(DType::kI32) == MARLIN_I32 &&
              static_cast<int>(DType::kU32) == MARLIN_U32 &&
              static_cast<int>(DType::kF32) == MARLIN_F32);
static_assert(int{kMaxRank} == int{MARLIN_MAX_RANK});

Status ReadMatrix(const marlin_expert_matrix& given, const std::string& name,
                  ExpertMatrix* matrix) {
  if (given.weights == nullptr) return {};
  matrix->weights = given.weights->weights;
  matrix->index = given.index;
  const Result<TensorView> bias = OptionalView(given.bias, "bias");
  if (!bias.ok()) return bias.status().WithContext(name);
  matrix->bias = *bias;
  return {};
}

}  // namespace

std::string& LastError() {
  thread_local std::string message;
  return message;
}

marlin_code Keep(const Status& status) {
  if (!status.ok()) LastError() = status.message();
  return static_cast<marlin_code>(status.code());
}

Status NotNull(const void* argument, const char* name) {
  if (argument != nullptr) return {};
  return Invalid(std::string(name) + ": NULL");
}

Result<MutableTensorView> ViewOf(const marlin_tensor* given, const char* name) {
  marlin_tensor tensor = MARLIN_TENSOR_INIT;
  MARLIN_RETURN_IF_ERROR(Read(given, name, &tensor));
  if (tensor.rank < 0 || tensor.rank > MARLIN_MAX_RANK) {
    return Invalid(std::string(name) + ": expected rank 0 to " +
                   std::to_string(int{MARLIN_MAX_RANK}) + ", got " + std::to_string(tensor.rank));
  }
  const auto type = static_cast<DType>(tensor.dtype);
  if (tensor.dtype < 0 || tensor.dtype > UINT8_MAX || DTypeBytes(type) == 0) {
    return Invalid(std::string(name) + ": unknown dtype " + std::to_string(tensor.dtype));
  }
  Shape shape;
  bool contiguous = true;
  for (int i = 0; i < tensor.rank; ++i) {
    shape.Append(tensor.shape[i]);
    contiguous = contiguous && tensor.strides[i] == 0;
  }
  if (contiguous) return MutableTensorView(tensor.data, type, shape);
  const int64_t* const s = tensor.strides;
  static_assert(int{MARLIN_MAX_RANK} == 8);
  return MutableTensorView(tensor.data, type, shape,
                           {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]});
}

Result<TensorView> OptionalView(const marlin_tensor* given, const char* name) {
  if (given == nullptr) return TensorView();
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView view, ViewOf(given, name));
  return TensorView(view);
}

Result<GemmArguments> ArgumentsOf(const marlin_gemm_arguments* given) {
  GemmArguments arguments;
  if (given == nullptr) return arguments;
  marlin_gemm_arguments read = MARLIN_GEMM_ARGUMENTS_INIT;
  MARLIN_RETURN_IF_ERROR(Read(given, "arguments", &read));
  if (read.bias != nullptr) {
    MARLIN_ASSIGN_OR_RETURN(arguments.bias, ViewOf(read.bias, "bias"));
  }
  if (read.row_weight != nullptr) {
    MARLIN_ASSIGN_OR_RETURN(arguments.row_weight, ViewOf(read.row_weight, "row_weight"));
  }
  arguments.expert = read.expert;
  arguments.workspace = read.workspace;
  arguments.workspace_bytes = read.workspace_bytes;
  arguments.stream = read.stream;
  arguments.overlap_previous = read.overlap_previous != 0;
  return arguments;
}

Status ReadExpert(const marlin_expert& given, const std::string& name, Expert* expert) {
  MARLIN_RETURN_IF_ERROR(ReadMatrix(given.gate, name + " gate", &expert->gate));
  MARLIN_RETURN_IF_ERROR(ReadMatrix(given.up, name + " up", &expert->up));
  return ReadMatrix(given.down, name + " down", &expert->down);
}

}  // namespace marlin
