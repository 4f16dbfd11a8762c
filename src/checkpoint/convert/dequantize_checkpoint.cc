#include <fmt/core.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/aligned_buffer.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/unit_converter.h"
#include "layout/weights_shapes.h"
#include "marlin/checkpoint.h"
#include "marlin/quantize.h"

namespace marlin {
namespace {

constexpr int64_t kShardBytes = int64_t{5} << 30;

class CheckpointDequantizer final : public UnitConverter {
 public:
  CheckpointDequantizer(const Checkpoint& checkpoint, DType dtype, const Progress& progress)
      : UnitConverter(checkpoint, progress), dtype_(dtype) {}

 private:
  Status PlanModule(const ModuleRecord& record) override {
    AddDense(record, dtype_);
    return {};
  }
  Status WriteExpert(TensorWriter* writer, size_t unit, const QuantizedWeights& expert,
                     int64_t number) override;
  Status Overflow(const QuantizedWeights& expert, const SourceUnit& unit, int64_t number, int64_t k,
                  int64_t n) const;

  DType dtype_;
};

Status CheckpointDequantizer::WriteExpert(TensorWriter* writer, size_t unit,
                                          const QuantizedWeights& expert, int64_t number) {
  const ModuleRecord& record = *units()[unit].record;
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer dense, MakeDense(record, expert, dtype_));
  const TensorView stored(dense.data(), dtype_, StoredShape(record));
  if (const int64_t index = FindNonFinite(stored); index >= 0) {
    const int64_t row = index / stored.dim(1);
    const int64_t column = index % stored.dim(1);
    const bool out_in = record.layout == SourceLayout::kOutIn;
    return Overflow(expert, units()[unit], number, out_in ? column : row, out_in ? row : column);
  }
  return writer->Append(unit, 0, dense.data(), stored.ByteCount());
}

// The error for a weight that overflows the element type; quantizing rejects it, too.
Status CheckpointDequantizer::Overflow(const QuantizedWeights& expert, const SourceUnit& unit,
                                       int64_t number, int64_t k, int64_t n) const {
  MARLIN_ASSIGN_OR_RETURN(
      const AlignedBuffer dense,
      AlignedBuffer::Allocate(expert.spec.k * expert.spec.n * DTypeBytes(DType::kF32)));
  MARLIN_RETURN_IF_ERROR(Dequantize(
      expert, MutableTensorView(dense.data(), DType::kF32, {expert.spec.k, expert.spec.n})));
  const float value = dense.As<float>()[k * expert.spec.n + n];
  const bool fits_bf16 = dtype_ == DType::kF16 && std::isfinite(Bf16ToFloat(FloatToBf16(value)));
  const bool stacked = unit.record->module.spec.experts > 1;
  return Status(Code::kUnsupported,
                fmt::format("{}: tensor \"{}\": {:g} at [{}, {}] of [k, n]{} overflows {}{}",
                            Printable(source_.path), Printable(unit.outputs.front().name), value, k,
                            n, stacked ? fmt::format(" of expert {}", number) : "",
                            DTypeName(dtype_), fits_bf16 ? "; use bf16" : ""));
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
  MARLIN_RETURN_IF_ERROR(dequantizer.Plan());
  Conversion conversion;
  conversion.target = output;
  conversion.options.overwrite = overwrite;
  conversion.shard_bytes = shard_bytes;
  conversion.config_json = ConfigText(source, dtype);
  dequantizer.Attach(&conversion);
  MARLIN_RETURN_IF_ERROR(CheckReadable(io, source, conversion));
  conversion.fingerprint =
      Fingerprint(source, fmt::format("dequantize {} {}", DTypeName(dtype), shard_bytes));
  return RunConversion(io, source, conversion).status();
}

}  // namespace

Status DequantizeCheckpointOn(Io& io, const std::string& source, const std::string& output,
                              DType dtype, bool overwrite, int64_t shard_bytes,
                              const Progress& progress, const CheckpointOptions& options) {
  return WithoutExceptions(source, "dequantize", [&] {
    return DequantizeImpl(io, source, output, dtype, overwrite, shard_bytes, progress, options);
  });
}

Status DequantizeCheckpoint(const std::string& source, const std::string& output, DType dtype,
                            bool overwrite, const Progress& progress,
                            const CheckpointOptions& options) {
  SystemIo io;
  return DequantizeCheckpointOn(io, source, output, dtype, overwrite, kShardBytes, progress,
                                options);
}

}  // namespace marlin
