#include "model/weight_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/aligned_buffer.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "layout/join_columns.h"
#include "layout/slice_expert.h"
#include "marlin/quantize.h"
#include "recipe/stored_layout.h"

namespace marlin {
namespace {

/// "a.experts.7.b" -> "a.experts.*.b" and 7; -1 when no expert is named.
struct ExpertName {
  std::string common;
  int64_t expert = -1;
};
ExpertName SplitExpertName(const std::string& name) {
  constexpr std::string_view kExperts = ".experts.";
  const size_t begin = name.find(kExperts);
  if (begin == std::string::npos) return {name};
  const size_t first = begin + kExperts.size();
  const size_t last = name.find_first_not_of("0123456789", first);
  if (last == first || last == std::string::npos || last - first > 6) return {name};
  return {name.substr(0, first) + "*" + name.substr(last),
          std::stoll(name.substr(first, last - first))};
}

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBf16 || dtype == DType::kF16;
}

Format FormatOf(DType dtype) {
  return dtype == DType::kBf16 ? Format::kBf16
                               : (dtype == DType::kF16 ? Format::kFp16 : Format::kFp32);
}

}  // namespace

WeightSource::WeightSource(const Checkpoint& checkpoint, const Device& device,
                           std::string model_type)
    : checkpoint_(checkpoint), device_(device), model_type_(std::move(model_type)) {
  for (const QuantizedModule& module : checkpoint.modules()) modules_.insert(module.name);
}

bool WeightSource::Has(const std::string& name) const {
  return checkpoint_.Find(name) != nullptr || modules_.contains(name) ||
         modules_.contains(SplitExpertName(name).common);
}

Result<const TensorInfo*> WeightSource::FindTensor(const std::string& name, const Shape& shape) {
  const TensorInfo* info = checkpoint_.Find(name);
  if (info == nullptr) {
    return Status(Code::kMalformedFile,
                  fmt::format("{}: tensor \"{}\" is missing", checkpoint_.path(), name));
  }
  if (!(info->shape == shape)) {
    return Status(Code::kMalformedFile,
                  fmt::format("{}: tensor \"{}\": expected {}, got {}", checkpoint_.path(), name,
                              shape.ToString(), info->shape.ToString()));
  }
  if (!IsFloat(info->dtype)) {
    return Status(Code::kUnsupported,
                  fmt::format("{}: tensor \"{}\": expected f32, bf16 or f16, got {}",
                              checkpoint_.path(), name, DTypeName(info->dtype)));
  }
  if (used_.insert(name).second) parameters_ += info->shape.ElementCount();
  return info;
}

Result<TensorView> WeightSource::LoadInPlace(const std::string& name, const Shape& shape) {
  MARLIN_ASSIGN_OR_RETURN(const TensorInfo* info, FindTensor(name, shape));
  bytes_ += info->bytes;
  return checkpoint_.Tensor(name);
}

Result<std::vector<float>> WeightSource::LoadVector(const std::string& name, int64_t count,
                                                    int64_t row, int64_t rows) {
  const Shape shape = rows > 0 ? Shape{rows, count} : Shape{count};
  MARLIN_ASSIGN_OR_RETURN(const TensorInfo* info, FindTensor(name, shape));
  MARLIN_ASSIGN_OR_RETURN(const TensorView view, checkpoint_.Tensor(name));
  std::vector<float> values(static_cast<size_t>(count));
  const int64_t size = DTypeBytes(info->dtype);
  for (int64_t i = 0; i < count; ++i) {
    const auto* from = view.As<uint8_t>() + (row * count + i) * size;
    uint16_t half = 0;
    if (size == 4) {
      std::memcpy(&values[static_cast<size_t>(i)], from, 4);
      continue;
    }
    std::memcpy(&half, from, 2);
    values[static_cast<size_t>(i)] =
        info->dtype == DType::kBf16 ? Bf16ToFloat(half) : HalfToFloat(half);
  }
  bytes_ += count * int64_t{sizeof(float)};
  return values;
}

Result<QuantizedWeights> WeightSource::LoadPlain(const MatrixRequest& request, int64_t in) {
  const bool in_out = IsStoredInOut(model_type_, request.name);
  Shape shape;
  if (request.expert >= 0) shape.Append(request.experts);
  shape.Append(in_out ? in : request.out);
  shape.Append(in_out ? request.out : in);
  MARLIN_ASSIGN_OR_RETURN(const TensorInfo* info, FindTensor(request.name, shape));
  MARLIN_ASSIGN_OR_RETURN(const TensorView all, checkpoint_.Tensor(request.name));
  const int64_t size = DTypeBytes(info->dtype);
  const auto* data =
      all.As<uint8_t>() + std::max<int64_t>(request.expert, 0) * in * request.out * size;
  AlignedBuffer copy;
  if (reinterpret_cast<uintptr_t>(data) % static_cast<size_t>(size) != 0) {
    MARLIN_ASSIGN_OR_RETURN(copy, AlignedBuffer::Allocate(in * request.out * size));
    std::memcpy(copy.data(), data, static_cast<size_t>(in * request.out * size));
    data = copy.As<uint8_t>();
  }
  const TensorView stored(data, info->dtype,
                          in_out ? Shape{in, request.out} : Shape{request.out, in});
  QuantizeOptions options;
  options.format = FormatOf(info->dtype);
  options.tensor_name = request.name;
  return Quantize(in_out ? stored : stored.Transposed(), options);
}

Result<QuantizedWeights> WeightSource::LoadModule(const std::string& module, int64_t expert,
                                                  const MatrixRequest& request, int64_t in) {
  auto found = loaded_.find(module);
  if (found == loaded_.end()) {
    MARLIN_ASSIGN_OR_RETURN(QuantizedWeights weights, checkpoint_.Weights(module));
    parameters_ += weights.spec.experts * weights.spec.k * weights.spec.n;
    found = loaded_.emplace(module, std::move(weights)).first;
  }
  used_.insert(module);
  const QuantizedWeights& weights = found->second;
  const WeightsSpec& spec = weights.spec;
  const int64_t experts = expert < 0 ? 1 : request.experts;
  if (spec.k != in || spec.n != request.out || spec.experts != experts) {
    return Status(Code::kMalformedFile,
                  fmt::format("{}: module \"{}\": expected {} x [{}, {}], got {} x [{}, {}]",
                              checkpoint_.path(), module, experts, in, request.out, spec.experts,
                              spec.k, spec.n));
  }
  if (expert < 0) return weights;
  return SliceExpert(weights, expert);
}

Result<QuantizedWeights> WeightSource::LoadMatrix(const MatrixRequest& request, int64_t in) {
  if (modules_.contains(request.name)) {
    return LoadModule(request.name, request.expert, request, in);
  }
  const ExpertName name = SplitExpertName(request.name);
  if (name.expert >= 0 && modules_.contains(name.common)) {
    return LoadModule(name.common, name.expert, request, in);
  }
  return LoadPlain(request, in);
}

Status WeightSource::AddPart(std::span<const QuantizedWeights> matrices,
                             std::span<const MatrixRequest> requests, Projection* projection) {
  std::vector<WeightColumns> columns;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const int64_t n = matrices[i].spec.n;
    if (requests[i].interleaved) {
      columns.push_back({&matrices[i], 0, 2, (n + 1) / 2});
      columns.push_back({&matrices[i], 1, 2, n / 2});
    } else {
      columns.push_back({&matrices[i], 0, 1, n});
    }
  }
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights joined, JoinColumns(columns));
  MARLIN_ASSIGN_OR_RETURN(PreparedWeights prepared, Prepare(joined, device_));
  bytes_ += prepared.bytes();
  projection->out += joined.spec.n;
  projection->parts.push_back(std::move(prepared));
  return {};
}

Result<Projection> WeightSource::Load(std::span<const MatrixRequest> matrices, int64_t in) {
  std::vector<QuantizedWeights> loaded;
  for (const MatrixRequest& request : matrices) {
    MARLIN_ASSIGN_OR_RETURN(QuantizedWeights weights, LoadMatrix(request, in));
    loaded.push_back(std::move(weights));
  }
  Projection projection;
  projection.in = in;
  for (size_t first = 0; first < loaded.size();) {
    size_t last = first + 1;
    while (last < loaded.size() && CanJoinColumns(loaded[first], loaded[last])) ++last;
    const std::span run(loaded.data() + first, last - first);
    MARLIN_RETURN_IF_ERROR(AddPart(run, matrices.subspan(first, last - first), &projection));
    first = last;
  }
  return projection;
}

Status WeightSource::CheckAllUsed() const {
  const auto unexpected = [this](std::string_view what, const std::string& name) {
    return Status(Code::kMalformedFile, fmt::format("{}: {} \"{}\" is not a part of a {}",
                                                    checkpoint_.path(), what, name, model_type_));
  };
  for (const QuantizedModule& module : checkpoint_.modules()) {
    if (!used_.contains(module.name)) return unexpected("module", module.name);
  }
  for (const TensorInfo& tensor : checkpoint_.tensors()) {
    if (!used_.contains(tensor.name) && !checkpoint_.IsModulePart(tensor.name)) {
      return unexpected("tensor", tensor.name);
    }
  }
  return {};
}

}  // namespace marlin
