#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <nlohmann/json.hpp>

#include "base/aligned_buffer.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/convert/conversion.h"
#include "checkpoint/convert/convert.h"
#include "layout/slice_expert.h"
#include "layout/weights_shapes.h"
#include "marlin/checkpoint.h"
#include "marlin/quantize.h"

namespace marlin {
namespace {

constexpr int64_t kShardBytes = int64_t{5} << 30;

// One unit of output: a module to dequantize, or a tensor to copy.
struct DequantizeUnit {
  const ModuleRecord* record = nullptr;  // Null for a copy.
  int64_t expert = 0;                    // For stacked experts with separate names.
  bool all_experts = false;              // A fused stack: one tensor for all experts.
  size_t tensor = 0;                     // The copied tensor, or the module's first.
  OutputTensor output;
};

class CheckpointDequantizer {
 public:
  CheckpointDequantizer(const Checkpoint& checkpoint, DType dtype, const Progress& progress)
      : checkpoint_(checkpoint),
        source_(CheckpointAccess::Get(checkpoint)),
        dtype_(dtype),
        progress_(progress) {
    PlanUnits();
  }

  const std::vector<DequantizeUnit>& units() const { return units_; }
  Status Write(TensorWriter* writer, size_t unit);

 private:
  void PlanUnits();
  void PlanModule(const ModuleRecord& record);
  Status WriteExpert(TensorWriter* writer, size_t unit, int64_t expert);
  Status Overflow(const QuantizedWeights& weights, const std::string& tensor, int64_t expert,
                  int64_t k, int64_t n) const;
  Status Load(const ModuleRecord& record);
  void ReleasePages(const ModuleRecord& record) const;

  const Checkpoint& checkpoint_;
  const Checkpoint::Impl& source_;
  DType dtype_;
  const Progress& progress_;
  std::vector<DequantizeUnit> units_;
  int64_t total_ = 0;
  int64_t done_ = 0;
  const ModuleRecord* loaded_ = nullptr;  // The module whose weights are in weights_.
  QuantizedWeights weights_;
};

void CheckpointDequantizer::PlanModule(const ModuleRecord& record) {
  const WeightsSpec& spec = record.module.spec;
  const std::string& name = record.module.name;
  const size_t wildcard = name.find(".*.");
  const bool out_in = record.layout == SourceLayout::kOutIn;
  const int64_t rows = out_in ? spec.n : spec.k;
  const int64_t columns = out_in ? spec.k : spec.n;
  DequantizeUnit unit;
  unit.record = &record;
  unit.tensor = source_.reader->Parts(record).front().tensor;
  unit.output.dtype = dtype_;
  if (wildcard == std::string::npos) {
    unit.all_experts = true;
    unit.output.name = name;
    unit.output.shape = record.stacked ? Shape{spec.experts, rows, columns} : Shape{rows, columns};
    unit.output.bytes = unit.output.shape.ElementCount() * DTypeBytes(dtype_);
    units_.push_back(std::move(unit));
    return;
  }
  for (int64_t e = 0; e < spec.experts; ++e) {
    unit.expert = e;
    unit.output.name =
        fmt::format("{}{}{}", name.substr(0, wildcard + 1), e, name.substr(wildcard + 2));
    unit.output.shape = {rows, columns};
    unit.output.bytes = rows * columns * DTypeBytes(dtype_);
    units_.push_back(unit);
  }
}

void CheckpointDequantizer::PlanUnits() {
  for (const ModuleRecord& record : source_.reader->modules()) PlanModule(record);
  for (size_t i = 0; i < source_.tensors.size(); ++i) {
    const TensorInfo& tensor = source_.tensors[i];
    if (source_.is_part[i]) continue;
    DequantizeUnit unit;
    unit.tensor = i;
    unit.output = {tensor.name, tensor.dtype, tensor.shape, tensor.bytes};
    units_.push_back(std::move(unit));
  }
  std::stable_sort(
      units_.begin(), units_.end(), [this](const DequantizeUnit& a, const DequantizeUnit& b) {
        const auto place = [this](const DequantizeUnit& unit) {
          return std::pair(source_.tensor_file[unit.tensor], source_.tensors[unit.tensor].offset);
        };
        return place(a) < place(b);
      });
  for (const DequantizeUnit& unit : units_) total_ += unit.output.shape.ElementCount();
}

void CheckpointDequantizer::ReleasePages(const ModuleRecord& record) const {
  for (const PartTensor& part : source_.reader->Parts(record)) source_.Release(part.tensor);
}

Status CheckpointDequantizer::Load(const ModuleRecord& record) {
  if (loaded_ == &record) return {};
  if (loaded_ != nullptr) ReleasePages(*loaded_);
  loaded_ = nullptr;
  MARLIN_ASSIGN_OR_RETURN(weights_, checkpoint_.Weights(record.module.name));
  loaded_ = &record;
  return {};
}

Status CheckpointDequantizer::WriteExpert(TensorWriter* writer, size_t unit, int64_t expert) {
  const ModuleRecord& record = *units_[unit].record;
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights slice, SliceExpert(weights_, expert));
  const int64_t k = slice.spec.k;
  const int64_t n = slice.spec.n;
  const int64_t bytes = k * n * DTypeBytes(dtype_);
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer dense, AlignedBuffer::Allocate(bytes));
  const bool out_in = record.layout == SourceLayout::kOutIn;
  const MutableTensorView stored(dense.data(), dtype_, out_in ? Shape{n, k} : Shape{k, n});
  MARLIN_RETURN_IF_ERROR(Dequantize(slice, out_in ? stored.Transposed() : stored)
                             .WithContext(fmt::format("{}: module \"{}\"", Printable(source_.path),
                                                      Printable(record.module.name))));
  if (const int64_t index = FindNonFinite(stored); index >= 0) {
    const int64_t row = index / stored.dim(1);
    const int64_t column = index % stored.dim(1);
    return Overflow(slice, units_[unit].output.name, expert, out_in ? column : row,
                    out_in ? row : column);
  }
  MARLIN_RETURN_IF_ERROR(writer->Append(unit, 0, dense.data(), bytes));
  done_ += k * n;
  if (progress_) progress_(done_, total_);
  return {};
}

// The error for a weight that overflows the element type; quantizing rejects it, too.
Status CheckpointDequantizer::Overflow(const QuantizedWeights& weights, const std::string& tensor,
                                       int64_t expert, int64_t k, int64_t n) const {
  MARLIN_ASSIGN_OR_RETURN(
      const AlignedBuffer dense,
      AlignedBuffer::Allocate(weights.spec.k * weights.spec.n * DTypeBytes(DType::kF32)));
  MARLIN_RETURN_IF_ERROR(Dequantize(
      weights, MutableTensorView(dense.data(), DType::kF32, {weights.spec.k, weights.spec.n})));
  const float value = dense.As<float>()[k * weights.spec.n + n];
  const bool fits_bf16 = dtype_ == DType::kF16 && std::isfinite(Bf16ToFloat(FloatToBf16(value)));
  return Status(Code::kUnsupported,
                fmt::format("{}: tensor \"{}\": {:g} at [{}, {}] of [k, n]{} overflows {}{}",
                            Printable(source_.path), Printable(tensor), value, k, n,
                            weights_.spec.experts > 1 ? fmt::format(" of expert {}", expert) : "",
                            DTypeName(dtype_), fits_bf16 ? "; use bf16" : ""));
}

Status CheckpointDequantizer::Write(TensorWriter* writer, size_t unit) {
  const DequantizeUnit& plan = units_[unit];
  if (plan.record == nullptr) {
    MARLIN_RETURN_IF_ERROR(CopyTensor(source_, plan.tensor, unit, writer));
    done_ += plan.output.shape.ElementCount();
    if (progress_) progress_(done_, total_);
    return {};
  }
  MARLIN_RETURN_IF_ERROR(Load(*plan.record));
  if (!plan.all_experts) return WriteExpert(writer, unit, plan.expert);
  for (int64_t e = 0; e < plan.record->module.spec.experts; ++e) {
    MARLIN_RETURN_IF_ERROR(WriteExpert(writer, unit, e));
  }
  return {};
}

// The plain checkpoint's config.json: without quantization, with the new element type.
std::string ConfigText(const Checkpoint::Impl& source, DType dtype) {
  Json config = source.config();
  RemoveQuantization(&config);
  if (config.empty()) return {};
  const char* name = dtype == DType::kF32 ? "float32" : "bfloat16";
  if (dtype == DType::kF16) name = "float16";
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (config.contains(key)) config[key] = name;
  }
  return DumpJson(config, 2) + "\n";
}

Status DequantizeImpl(Io& io, const std::string& source_path, const std::string& output,
                      DType dtype, bool overwrite, int64_t shard_bytes, const Progress& progress,
                      const CheckpointOptions& options) {
  if (dtype != DType::kF32 && dtype != DType::kBf16 && dtype != DType::kF16) {
    return Status(Code::kInvalidArgument,
                  fmt::format("dtype: expected f32, bf16 or f16, got {}", DTypeName(dtype)));
  }
  MARLIN_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          CheckpointAccess::Open(io, source_path, options));
  const Checkpoint::Impl& source = CheckpointAccess::Get(checkpoint);
  if (source.quant_method.empty() && !source.other_form()) {
    return Status(Code::kInvalidArgument,
                  Printable(source_path) + ": is not a quantized checkpoint");
  }
  CheckpointDequantizer dequantizer(checkpoint, dtype, progress);
  Conversion conversion;
  conversion.target = output;
  conversion.options.overwrite = overwrite;
  for (const DequantizeUnit& unit : dequantizer.units()) conversion.units.push_back({unit.output});
  conversion.shard_bytes = shard_bytes;
  conversion.config_json = ConfigText(source, dtype);
  MARLIN_RETURN_IF_ERROR(CheckReadable(io, source, conversion));
  conversion.fingerprint =
      Fingerprint(source, fmt::format("dequantize {} {}", DTypeName(dtype), shard_bytes));
  conversion.write_unit = [&](TensorWriter* writer, size_t unit) -> Result<int64_t> {
    MARLIN_RETURN_IF_ERROR(dequantizer.Write(writer, unit));
    return 0;
  };
  return RunConversion(io, source, conversion).status();
}

}  // namespace

Status DequantizeCheckpointOn(Io& io, const std::string& source, const std::string& output,
                              DType dtype, bool overwrite, int64_t shard_bytes,
                              const Progress& progress, const CheckpointOptions& options) {
  try {
    return DequantizeImpl(io, source, output, dtype, overwrite, shard_bytes, progress, options);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, Printable(source) + ": no memory to dequantize it");
  } catch (const std::exception& error) {
    return Status(Code::kInternal, Printable(source) + ": " + Printable(error.what()));
  }
}

Status DequantizeCheckpoint(const std::string& source, const std::string& output, DType dtype,
                            bool overwrite, const Progress& progress,
                            const CheckpointOptions& options) {
  SystemIo io;
  return DequantizeCheckpointOn(io, source, output, dtype, overwrite, kShardBytes, progress,
                                options);
}

}  // namespace marlin
