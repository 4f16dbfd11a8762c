#include "model/weight_source.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>

#include "base/macros.h"
#include "base/printable.h"
#include "base/scalars.h"
#include "base/view_checks.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/source_layout.h"
#include "layout/input_transform.h"
#include "layout/join_columns.h"
#include "layout/plain_weights.h"
#include "layout/slice_expert.h"
#include "layout/weights_shapes.h"
#include "model/open_model.h"
#include "ops/gemm/prepare_columns.h"
#include "quantize/quantizer.h"
#include "recipe/expert_name.h"

namespace marlin {
namespace {

/// One element of a tensor at any address.
float ElementAt(const TensorView& view, int64_t index) {
  const auto* from = view.As<uint8_t>() + index * DTypeBytes(view.dtype());
  if (view.dtype() == DType::kF32) {
    float value = 0;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  uint16_t half = 0;
  std::memcpy(&half, from, sizeof(half));
  return view.dtype() == DType::kBf16 ? Bf16ToFloat(half) : HalfToFloat(half);
}

/// The name of a projection in a prepared-weight file.
std::string NameOf(std::span<const MatrixRequest> matrices) {
  std::string name;
  for (const MatrixRequest& matrix : matrices) {
    if (!name.empty()) name += '+';
    name += matrix.name;
    if (matrix.expert >= 0) name += fmt::format("[{}]", matrix.expert);
  }
  return name;
}

/// Adds the time of a scope to a stage.
class StageTimer {
 public:
  /// Null: measures nothing.
  StageTimer(LoadSeconds* seconds, double LoadSeconds::*stage)
      : seconds_(seconds), stage_(stage), begin_(Clock::now()) {}
  ~StageTimer() {
    if (seconds_ == nullptr) return;
    seconds_->*stage_ += std::chrono::duration<double>(Clock::now() - begin_).count();
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  LoadSeconds* const seconds_;
  double LoadSeconds::*const stage_;
  const Clock::time_point begin_;
};

Format FormatOf(DType dtype) {
  return dtype == DType::kBf16 ? Format::kBf16
                               : (dtype == DType::kF16 ? Format::kFp16 : Format::kFp32);
}

/// The module of a matrix, or the one in which experts with separate names are stacked, with the
/// index of the expert there (-1: none). Null: it is plain or missing.
std::pair<const QuantizedModule*, int64_t> FindMatrix(const ModulesByName& modules,
                                                      const std::string& name) {
  auto found = modules.find(name);
  if (found != modules.end()) return {found->second, -1};
  const std::optional<ExpertName> expert = ParseExpertName(name);
  if (expert) found = modules.find(expert->common);
  if (found == modules.end()) return {nullptr, -1};
  return {found->second, expert->expert};
}

/// A plain matrix in place: [in, out] is the canonical layout, [out, in] its transpose.
QuantizedWeights PlainMatrix(const WeightsSpec& spec, const TensorView& all, int64_t expert,
                             bool in_out) {
  QuantizedWeights weights;
  weights.spec = spec;
  const int64_t elements = spec.k * spec.n;
  const auto* data = all.As<uint8_t>() + expert * elements * DTypeBytes(all.dtype());
  const Shape shape{1, spec.k, spec.n};
  weights.codes = in_out ? TensorView(data, all.dtype(), shape)
                         : TensorView(data, all.dtype(), shape, {elements, 1, spec.k});
  return weights;
}

/// Whether a plain matrix is stored as [in, out]; false for one that is missing.
Result<bool> IsInOut(const Checkpoint& checkpoint, const std::string& name) {
  const TensorInfo* const stored = checkpoint.Find(name);
  if (stored == nullptr) return false;
  const Result<SourceLayout> layout = SourceLayoutOf(CheckpointAccess::Get(checkpoint), *stored);
  if (!layout.ok()) return layout.status().WithContext(Printable(checkpoint.path()));
  return *layout == SourceLayout::kInOut;
}

/// Whether a prepared part is the joined matrices of the specs from `*next` on, which it moves past
/// them.
bool IsPartOf(const PreparedPart& part, std::span<const WeightsSpec> specs, size_t* next) {
  for (int64_t rest = part.spec.n; rest > 0; rest -= specs[(*next)++].n) {
    if (*next == specs.size() || specs[*next].n > rest) return false;
    WeightsSpec expected = specs[*next];
    expected.n = part.spec.n;
    // Preparation may have made them plainer (Backend::TakenSpec).
    if (part.spec.sparsity == Sparsity::kDense) expected.sparsity = Sparsity::kDense;
    if (part.spec.super_group_size == 0) expected = FlatSpec(expected);
    if (part.spec.format != expected.format) expected.format = WiderFormat(expected.format);
    if (!(expected == part.spec)) return false;
  }
  return true;
}

/// The columns of matrices in the order of their requests.
std::vector<WeightColumns> ColumnsOf(std::span<const QuantizedWeights> matrices,
                                     std::span<const MatrixRequest> requests) {
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
  return columns;
}

/// The error that names the first NaN or Inf of plain matrices.
Status NonFinite(std::span<const QuantizedWeights> matrices,
                 std::span<const MatrixRequest> requests) {
  for (size_t i = 0; i < matrices.size(); ++i) {
    const WeightsSpec& spec = matrices[i].spec;
    const TensorView& codes = matrices[i].codes;
    const bool in_out = codes.IsContiguous();
    const TensorView stored(codes.data(), codes.dtype(),
                            in_out ? Shape{spec.k, spec.n} : Shape{spec.n, spec.k});
    const int64_t index = FindNonFinite(stored);
    if (index < 0) continue;
    const int64_t row = index / stored.dim(1);
    const int64_t column = index % stored.dim(1);
    const float value = ElementAt(stored, index);
    return NonFiniteWeight(requests[i].name, value, spec, 0, in_out ? row : column,
                           in_out ? column : row);
  }
  return Status(Code::kInternal, "a weight was not finite, and now all are");
}

}  // namespace

WeightSource::WeightSource(const Checkpoint& checkpoint, const Device& device,
                           std::string model_type, std::shared_ptr<const PreparedFile> prepared,
                           PreparedFileWriter* write, LoadSeconds* seconds)
    : checkpoint_(checkpoint),
      device_(&device),
      model_type_(std::move(model_type)),
      prepared_(std::move(prepared)),
      write_(write),
      seconds_(seconds) {
  for (const QuantizedModule& module : checkpoint.modules()) modules_.emplace(module.name, &module);
}

bool WeightSource::Has(const std::string& name) const {
  return checkpoint_.Find(name) != nullptr || FindMatrix(modules_, name).first != nullptr;
}

int64_t WeightSource::BytesOf(const std::string& name) const {
  const auto share = [](int64_t bytes, int64_t experts) {
    return bytes / std::max<int64_t>(experts, 1);
  };
  if (const QuantizedModule* module = FindMatrix(modules_, name).first) {
    const WeightsSpec& spec = module->spec;
    return share(PreparedBytes(TransformsInput(spec) ? FoldedSpec(spec) : spec, *device_),
                 spec.experts);
  }
  const TensorInfo* const tensor = checkpoint_.Find(name);
  if (tensor == nullptr) return 0;
  return share(DeviceBytes(*tensor), tensor->shape.rank() == 3 ? tensor->shape[0] : 1);
}

Result<const TensorInfo*> WeightSource::FindTensor(const std::string& name, const Shape& shape) {
  const TensorInfo* info = checkpoint_.Find(name);
  const auto wrong = [&](Code code, const std::string& how) {
    return Status(code, fmt::format("{}: tensor \"{}\"{}", checkpoint_.path(), name, how));
  };
  if (info == nullptr) return wrong(Code::kMalformedFile, " is missing");
  if (!(info->shape == shape)) {
    return wrong(Code::kMalformedFile,
                 fmt::format(": expected {}, got {}", shape.ToString(), info->shape.ToString()));
  }
  if (!IsFloat(info->dtype)) {
    return wrong(Code::kUnsupported,
                 fmt::format(": expected f32, bf16 or f16, got {}", DTypeName(info->dtype)));
  }
  if (used_.names.insert(name).second) used_.parameters += info->shape.ElementCount();
  return info;
}

Result<TensorView> WeightSource::LoadInPlace(const std::string& name, const Shape& shape) {
  MARLIN_ASSIGN_OR_RETURN(const TensorInfo* info, FindTensor(name, shape));
  bytes_ += info->bytes;
  return checkpoint_.Tensor(name);
}

Result<std::vector<float>> WeightSource::LoadElements(const std::string& name, const Shape& shape,
                                                      int64_t first, int64_t count) {
  MARLIN_RETURN_IF_ERROR(FindTensor(name, shape).status());
  MARLIN_ASSIGN_OR_RETURN(const TensorView view, checkpoint_.Tensor(name));
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = ElementAt(view, first + i);
  bytes_ += count * int64_t{sizeof(float)};
  return values;
}

Result<std::vector<float>> WeightSource::LoadVector(const std::string& name, int64_t count,
                                                    int64_t row, int64_t rows) {
  return LoadElements(name, rows > 0 ? Shape{rows, count} : Shape{count}, row * count, count);
}

Result<WeightSource::Matrix> WeightSource::LocatePlain(const MatrixRequest& request, int64_t in) {
  Matrix matrix;
  matrix.expert = request.expert;
  MARLIN_ASSIGN_OR_RETURN(matrix.in_out, IsInOut(checkpoint_, request.name));
  Shape shape;
  if (request.expert >= 0) shape.Append(request.experts);
  shape.Append(matrix.in_out ? in : request.out);
  shape.Append(matrix.in_out ? request.out : in);
  MARLIN_ASSIGN_OR_RETURN(const TensorInfo* info, FindTensor(request.name, shape));
  matrix.spec.format = FormatOf(info->dtype);
  matrix.spec.k = in;
  matrix.spec.n = request.out;
  matrix.spec.group_size = in;
  return matrix;
}

Result<WeightSource::Matrix> WeightSource::LocateInModule(const QuantizedModule& module,
                                                          int64_t expert,
                                                          const MatrixRequest& request,
                                                          int64_t in) {
  const WeightsSpec& spec = module.spec;
  const int64_t experts = expert < 0 ? 1 : request.experts;
  if (spec.k != in || spec.n != request.out || spec.experts != experts) {
    return Status(Code::kMalformedFile,
                  fmt::format("{}: module \"{}\": expected {} x [{}, {}], got {} x [{}, {}]",
                              checkpoint_.path(), module.name, experts, in, request.out,
                              spec.experts, spec.k, spec.n));
  }
  if (used_.names.insert(module.name).second) used_.parameters += spec.experts * spec.k * spec.n;
  Matrix matrix{&module, expert, false, spec};
  matrix.spec.experts = 1;
  if (request.folded && TransformsInput(spec)) matrix.spec = FoldedSpec(matrix.spec);
  return matrix;
}

Result<WeightSource::Matrix> WeightSource::Locate(const MatrixRequest& request, int64_t in) {
  const auto [module, expert] = FindMatrix(modules_, request.name);
  if (module == nullptr) return LocatePlain(request, in);
  return LocateInModule(*module, expert < 0 ? request.expert : expert, request, in);
}

Result<QuantizedWeights> WeightSource::LoadMatrix(const MatrixRequest& request, int64_t in) {
  if (replaced_ != nullptr) {
    const auto found = replaced_->find({request.name, request.expert});
    if (found != replaced_->end()) {
      return request.folded ? FoldInput(found->second) : found->second;
    }
  }
  MARLIN_ASSIGN_OR_RETURN(const Matrix matrix, Locate(request, in));
  if (matrix.module != nullptr) {
    auto found = loaded_.find(matrix.module->name);
    if (found == loaded_.end()) {
      MARLIN_ASSIGN_OR_RETURN(QuantizedWeights weights, checkpoint_.Weights(matrix.module->name));
      found = loaded_.emplace(matrix.module->name, std::move(weights)).first;
    }
    QuantizedWeights weights = found->second;
    if (matrix.expert >= 0) {
      MARLIN_ASSIGN_OR_RETURN(weights, SliceExpert(weights, matrix.expert));
    }
    return request.folded ? FoldInput(weights) : std::move(weights);
  }
  MARLIN_ASSIGN_OR_RETURN(const TensorView all, checkpoint_.Tensor(request.name));
  return PlainMatrix(matrix.spec, all, std::max<int64_t>(matrix.expert, 0), matrix.in_out);
}

Result<Projection> WeightSource::LoadPrepared(std::span<const MatrixRequest> matrices, int64_t in) {
  std::vector<WeightsSpec> specs;
  for (const MatrixRequest& request : matrices) {
    MARLIN_ASSIGN_OR_RETURN(const Matrix matrix, Locate(request, in));
    specs.push_back(matrix.spec);
  }
  const std::string name = NameOf(matrices);
  MARLIN_ASSIGN_OR_RETURN(const std::span<const PreparedPart> parts, prepared_->Find(name));
  const auto other = [&] {
    return Status(Code::kMalformedFile,
                  fmt::format("{}: projection \"{}\": its parts are not the model's matrices",
                              Printable(prepared_->path()), Printable(name)));
  };
  Projection projection;
  projection.in = in;
  size_t next = 0;
  for (const PreparedPart& part : parts) {
    if (!IsPartOf(part, specs, &next)) return other();
    const PreparedImage image{part.spec, prepared_->Data(part), prepared_, prepared_->Input(part)};
    Result<PreparedWeights> weights = FromImage(image, *device_);
    if (!weights.ok()) return weights.status().WithContext(Printable(prepared_->path()));
    bytes_ += weights->bytes();
    projection.out += part.spec.n;
    projection.parts.push_back(*std::move(weights));
  }
  if (next != specs.size()) return other();
  return projection;
}

Status WeightSource::AddPart(std::span<const QuantizedWeights> matrices,
                             std::span<const MatrixRequest> requests, Projection* projection) {
  Result<PreparedWeights> prepared = PrepareColumns(ColumnsOf(matrices, requests), *device_);
  if (prepared.status().code() == Code::kNonFiniteInput) return NonFinite(matrices, requests);
  MARLIN_RETURN_IF_ERROR(prepared.status());
  bytes_ += prepared->bytes();
  projection->out += prepared->spec().n;
  if (write_ != nullptr) {
    MARLIN_ASSIGN_OR_RETURN(const PreparedImage image, ImageOf(*prepared, *device_));
    return write_->AddPart(image.spec, image.data, image.input);
  }
  projection->parts.push_back(*std::move(prepared));
  return {};
}

Result<Projection> WeightSource::Load(std::span<const MatrixRequest> matrices, int64_t in) {
  if (prepared_ != nullptr) {
    const StageTimer timer(seconds_, &LoadSeconds::prepare);
    return LoadPrepared(matrices, in);
  }
  if (write_ != nullptr) MARLIN_RETURN_IF_ERROR(write_->AddProjection(NameOf(matrices)));
  std::vector<QuantizedWeights> loaded;
  {
    const StageTimer timer(seconds_, &LoadSeconds::read);
    for (const MatrixRequest& request : matrices) {
      MARLIN_ASSIGN_OR_RETURN(QuantizedWeights weights, LoadMatrix(request, in));
      loaded.push_back(std::move(weights));
    }
  }
  const StageTimer timer(seconds_, &LoadSeconds::prepare);
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

Status WeightSource::Finish() {
  const StageTimer timer(seconds_, &LoadSeconds::wait);
  return FinishPreparing(*device_);
}

Status WeightSource::CheckAllUsed() const {
  if (CheckpointAccess::Get(checkpoint_).options.allow_extra_tensors) return {};
  const auto unexpected = [this](std::string_view what, const std::string& name) {
    return Status(Code::kMalformedFile,
                  fmt::format("{}: {} \"{}\" is not a part of a {} (allow_extra_tensors ignores "
                              "such tensors)",
                              checkpoint_.path(), what, name, model_type_));
  };
  for (const QuantizedModule& module : checkpoint_.modules()) {
    if (!used_.names.contains(module.name)) return unexpected("module", module.name);
  }
  for (const TensorInfo& tensor : checkpoint_.tensors()) {
    if (!used_.names.contains(tensor.name) && !checkpoint_.IsModulePart(tensor.name)) {
      return unexpected("tensor", tensor.name);
    }
  }
  return {};
}

}  // namespace marlin
