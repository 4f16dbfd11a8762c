#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <set>

#include "base/aligned_buffer.h"
#include "base/macros.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/conversion.h"
#include "checkpoint/convert.h"
#include "marlin/checkpoint.h"
#include "marlin/quantize.h"

namespace marlin {
namespace {

constexpr int64_t kShardBytes = int64_t{5} << 30;

// A module to be written back, or a tensor to be copied.
struct BackUnit {
  const ModuleRecord* record = nullptr;  // Null for a copy.
  int64_t expert = 0;                    // Of stacked experts with a name each.
  bool all_experts = false;              // A fused stack: one tensor of all experts.
  size_t tensor = 0;                     // The copied tensor, or the module's first.
  OutputTensor output;
};

// One expert of a stack as a matrix of its own. Parts that are not aligned in the middle of the
// stack are copied into `copies`.
Result<QuantizedWeights> SliceExpert(const QuantizedWeights& stack, int64_t expert,
                                     std::vector<AlignedBuffer>* copies) {
  QuantizedWeights slice = stack;
  slice.spec.experts = 1;
  for (TensorView* view :
       {&slice.codes, &slice.scales, &slice.zeros, &slice.biases, &slice.global_scale}) {
    if (view->rank() == 0) continue;
    Shape shape = view->shape();
    shape[0] = 1;
    const int64_t bytes = shape.ElementCount() * DTypeBytes(view->dtype());
    const auto* data = static_cast<const std::byte*>(view->data()) + expert * bytes;
    if (reinterpret_cast<uintptr_t>(data) % 4 != 0) {
      MARLIN_ASSIGN_OR_RETURN(AlignedBuffer copy, AlignedBuffer::Allocate(bytes));
      std::memcpy(copy.data(), data, static_cast<size_t>(bytes));
      data = copy.data();
      copies->push_back(std::move(copy));
    }
    *view = TensorView(data, view->dtype(), shape);
  }
  return slice;
}

class Restorer {
 public:
  Restorer(const Checkpoint& checkpoint, DType dtype, const Progress& progress)
      : checkpoint_(checkpoint),
        source_(CheckpointAccess::Get(checkpoint)),
        dtype_(dtype),
        progress_(progress) {
    PlanUnits();
  }

  const std::vector<BackUnit>& units() const { return units_; }
  Status Write(TensorWriter* writer, size_t unit);

 private:
  void PlanUnits();
  void PlanModule(const ModuleRecord& record);
  Status WriteExpert(TensorWriter* writer, size_t unit, int64_t expert);
  Status Load(const ModuleRecord& record);
  void ReleasePages(const ModuleRecord& record) const;

  const Checkpoint& checkpoint_;
  const Checkpoint::Impl& source_;
  DType dtype_;
  const Progress& progress_;
  std::vector<BackUnit> units_;
  int64_t total_ = 0;
  int64_t done_ = 0;
  const ModuleRecord* loaded_ = nullptr;  // Whose weights are in weights_.
  QuantizedWeights weights_;
};

void Restorer::PlanModule(const ModuleRecord& record) {
  const WeightsSpec& spec = record.module.spec;
  const std::string& name = record.module.name;
  const size_t wildcard = name.find(".*.");
  const bool out_in = record.layout == SourceLayout::kOutIn;
  const int64_t rows = out_in ? spec.n : spec.k;
  const int64_t columns = out_in ? spec.k : spec.n;
  BackUnit unit;
  unit.record = &record;
  unit.tensor = *source_.FindTensor(ModuleTensors(record).front().name);
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

void Restorer::PlanUnits() {
  std::set<std::string> of_modules;
  for (const ModuleRecord& record : source_.quantization.modules) {
    for (const ModuleTensor& tensor : ModuleTensors(record)) of_modules.insert(tensor.name);
    PlanModule(record);
  }
  for (size_t i = 0; i < source_.tensors.size(); ++i) {
    const TensorInfo& tensor = source_.tensors[i];
    if (of_modules.contains(tensor.name)) continue;
    BackUnit unit;
    unit.tensor = i;
    unit.output = {tensor.name, tensor.dtype, tensor.shape, tensor.bytes};
    units_.push_back(std::move(unit));
  }
  std::stable_sort(units_.begin(), units_.end(), [this](const BackUnit& a, const BackUnit& b) {
    const auto place = [this](const BackUnit& unit) {
      return std::pair(source_.tensor_file[unit.tensor], source_.tensors[unit.tensor].offset);
    };
    return place(a) < place(b);
  });
  for (const BackUnit& unit : units_) total_ += unit.output.shape.ElementCount();
}

void Restorer::ReleasePages(const ModuleRecord& record) const {
  for (const ModuleTensor& part : ModuleTensors(record)) {
    const size_t tensor = *source_.FindTensor(part.name);
    const TensorInfo& info = source_.tensors[tensor];
    source_.files[source_.tensor_file[tensor]].mapping->Release(info.offset, info.bytes);
  }
}

Status Restorer::Load(const ModuleRecord& record) {
  if (loaded_ == &record) return {};
  if (loaded_ != nullptr) ReleasePages(*loaded_);
  loaded_ = nullptr;
  MARLIN_ASSIGN_OR_RETURN(weights_, checkpoint_.Weights(record.module.name));
  loaded_ = &record;
  return {};
}

Status Restorer::WriteExpert(TensorWriter* writer, size_t unit, int64_t expert) {
  const ModuleRecord& record = *units_[unit].record;
  std::vector<AlignedBuffer> copies;
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights slice, SliceExpert(weights_, expert, &copies));
  const int64_t k = slice.spec.k;
  const int64_t n = slice.spec.n;
  const int64_t bytes = k * n * DTypeBytes(dtype_);
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer dense, AlignedBuffer::Allocate(bytes));
  MutableTensorView out(dense.data(), dtype_, {k, n});
  if (record.layout == SourceLayout::kOutIn) {
    out = MutableTensorView(dense.data(), dtype_, {n, k}).Transposed();
  }
  MARLIN_RETURN_IF_ERROR(Dequantize(slice, out)
                             .WithContext(fmt::format("{}: module \"{}\"", Printable(source_.path),
                                                      Printable(record.module.name))));
  MARLIN_RETURN_IF_ERROR(writer->Append(unit, 0, dense.data(), bytes));
  done_ += k * n;
  if (progress_) progress_(done_, total_);
  return {};
}

Status Restorer::Write(TensorWriter* writer, size_t unit) {
  const BackUnit& plan = units_[unit];
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

// The configuration of the plain checkpoint: not quantized, and of the new element type.
std::string ConfigText(const Checkpoint::Impl& source, DType dtype) {
  Json config = source.config;
  config.erase("quantization_config");
  if (config.empty()) return {};
  const char* name = dtype == DType::kF32 ? "float32" : "bfloat16";
  if (dtype == DType::kF16) name = "float16";
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (config.contains(key)) config[key] = name;
  }
  return DumpJson(config, 2) + "\n";
}

Status DequantizeImpl(Io& io, const std::string& source_path, const std::string& output,
                      DType dtype, bool overwrite, int64_t shard_bytes, const Progress& progress) {
  if (dtype != DType::kF32 && dtype != DType::kBf16 && dtype != DType::kF16) {
    return Status(Code::kInvalidArgument,
                  fmt::format("dtype: expected f32, bf16 or f16, got {}", DTypeName(dtype)));
  }
  MARLIN_ASSIGN_OR_RETURN(const Checkpoint checkpoint, CheckpointAccess::Open(io, source_path));
  if (!checkpoint.quantized()) {
    return Status(Code::kInvalidArgument,
                  Printable(source_path) + ": is not a quantized directory of metal_marlin");
  }
  const Checkpoint::Impl& source = CheckpointAccess::Get(checkpoint);
  Restorer restorer(checkpoint, dtype, progress);
  Conversion conversion;
  conversion.target = output;
  conversion.options = {overwrite, /*resume=*/false};
  for (const BackUnit& unit : restorer.units()) conversion.units.push_back({unit.output});
  conversion.shard_bytes = shard_bytes;
  conversion.config_json = ConfigText(source, dtype);
  conversion.fingerprint =
      Fingerprint(source, fmt::format("dequantize {} {}", DTypeName(dtype), shard_bytes));
  conversion.write_unit = [&](TensorWriter* writer, size_t unit) -> Result<int64_t> {
    MARLIN_RETURN_IF_ERROR(restorer.Write(writer, unit));
    return 0;
  };
  return RunConversion(io, source, conversion).status();
}

}  // namespace

Status DequantizeCheckpointOn(Io& io, const std::string& source, const std::string& output,
                              DType dtype, bool overwrite, int64_t shard_bytes,
                              const Progress& progress) {
  try {
    return DequantizeImpl(io, source, output, dtype, overwrite, shard_bytes, progress);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, Printable(source) + ": no memory to dequantize it");
  } catch (const std::exception& error) {
    return Status(Code::kInternal, Printable(source) + ": " + Printable(error.what()));
  }
}

Status DequantizeCheckpoint(const std::string& source, const std::string& output, DType dtype,
                            bool overwrite, const Progress& progress) {
  SystemIo io;
  return DequantizeCheckpointOn(io, source, output, dtype, overwrite, kShardBytes, progress);
}

}  // namespace marlin
