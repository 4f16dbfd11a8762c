#include "marlin/decoder.h"

#include <fmt/core.h>

#include <cmath>

#include "base/macros.h"
#include "ops/decoder/decoder_checks.h"
#include "ops/device/checks.h"
#include "ops/device/device.h"
#include "ops/gemm/transformed_gemm.h"
#include "plan/gemm/transform_columns.h"
#include "plan/step/decoder_backend.h"
#include "plan/step/decoder_calls.h"
#include "plan/step/indices.h"

namespace marlin {

Status CheckRank(const char* name, const TensorView& view, int rank) {
  if (view.rank() == rank) return {};
  return Invalid(fmt::format("{}: expected rank {}, got {}", name, rank, view.rank()));
}

Status CheckInt32(const char* name, const TensorView& view, const Shape& expected) {
  if (view.dtype() != DType::kI32 || !(view.shape() == expected)) {
    return Invalid(fmt::format("{}: expected i32 {}, got {} {}", name, expected.ToString(),
                               DTypeName(view.dtype()), view.shape().ToString()));
  }
  if (!view.IsContiguous()) return Invalid(fmt::format("{}: must be contiguous", name));
  return CheckData(name, view);
}

Status CheckSoftcap(float softcap) {
  if (softcap >= 0.0F && std::isfinite(softcap)) return {};
  return Invalid(fmt::format("softcap: expected 0 or more, got {}", softcap));
}

Status CheckAttentionOptions(const AttentionOptions& options, int64_t heads) {
  if (options.window < 0) {
    return Invalid(fmt::format("window: expected 0 or more, got {}", options.window));
  }
  MARLIN_RETURN_IF_ERROR(CheckSoftcap(options.softcap));
  if (options.sinks.empty()) return {};
  MARLIN_RETURN_IF_ERROR(CheckRank("sinks", options.sinks, 1));
  return CheckVector("sinks", options.sinks, heads, true);
}

Status CheckRequiredVector(const char* name, const TensorView& view, int64_t count, bool f32_only) {
  if (count > 0 && view.empty()) return Invalid(fmt::format("{}: null data", name));
  return CheckVector(name, view, count, f32_only);
}

Status CheckEpsilon(float epsilon) {
  if (epsilon >= 0.0F) return {};
  return Invalid(fmt::format("epsilon: expected 0 or more, got {}", epsilon));
}

namespace {

/// Checks a vector of ids or positions in device memory.
Status CheckIndexVector(const char* name, const TensorView& view, int64_t count) {
  if (view.dtype() != DType::kI32 && view.dtype() != DType::kI64) {
    return Invalid(fmt::format("{}: expected i32 or i64, got {}", name, DTypeName(view.dtype())));
  }
  if (view.rank() != 1 || view.dim(0) != count) {
    return Invalid(fmt::format("{}: expected [{}], got {}", name, count, view.shape().ToString()));
  }
  if (!view.IsContiguous()) return Invalid(fmt::format("{}: must be contiguous", name));
  return CheckData(name, view);
}

/// Uploads the host's ids or positions for one call, if the device reads its own memory.
class DeviceIndices {
 public:
  explicit DeviceIndices(std::span<const int32_t> host)
      : view_(host.data(), DType::kI32, {static_cast<int64_t>(host.size())}) {}

  Status Move(const Device& device, const char* name, int64_t limit) {
    MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
    MARLIN_RETURN_IF_ERROR(CheckIndices(name, view_, limit));
    if (decoder->reads_host_memory()) return {};
    MARLIN_ASSIGN_OR_RETURN(buffer_, DeviceBuffer::Allocate(device, view_.ByteCount()));
    MARLIN_RETURN_IF_ERROR(buffer_.CopyFrom(view_.data(), view_.ByteCount()));
    view_ = TensorView(buffer_.data(), view_.dtype(), view_.shape());
    return {};
  }
  const TensorView& view() const { return view_; }

 private:
  TensorView view_;
  DeviceBuffer buffer_;  ///< Freed once the device has used it.
};

Status CheckLookUp(const TensorView& ids, const MutableTensorView& out, int64_t columns) {
  MARLIN_RETURN_IF_ERROR(CheckRank("ids", ids, 1));
  MARLIN_RETURN_IF_ERROR(CheckIndexVector("ids", ids, ids.dim(0)));
  MARLIN_RETURN_IF_ERROR(CheckRank("out", out, 2));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, {ids.dim(0), columns}));
  return CheckNoOverlapWithIndices("out", out, "ids", ids);
}

Status CheckTable(const Device& device, const PreparedWeights& table) {
  MARLIN_RETURN_IF_ERROR(CheckWeights(device, table).WithContext("table"));
  const int64_t experts = table.spec().experts;
  if (experts == 1) return {};
  return Invalid(fmt::format("table: expected one matrix, got {} experts", experts));
}

Status CheckAttentionInput(const AttentionInput& input, const AttentionOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckRank("queries", input.queries, 3));
  MARLIN_RETURN_IF_ERROR(CheckRank("keys", input.keys, 3));
  MARLIN_RETURN_IF_ERROR(CheckRank("values", input.values, 3));
  MARLIN_RETURN_IF_ERROR(CheckRank("out", input.out, 3));
  const int64_t tokens = input.queries.dim(0);
  const int64_t heads = input.queries.dim(1);
  const int64_t length = input.keys.dim(0);
  const int64_t kv_heads = input.keys.dim(1);
  MARLIN_RETURN_IF_ERROR(CheckActivations("queries", input.queries, input.queries.shape()));
  MARLIN_RETURN_IF_ERROR(
      CheckActivations("keys", input.keys, {length, kv_heads, input.queries.dim(2)}));
  MARLIN_RETURN_IF_ERROR(
      CheckActivations("values", input.values, {length, kv_heads, input.values.dim(2)}));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", input.out, {tokens, heads, input.values.dim(2)}));
  if (tokens > length) {
    return Invalid(
        fmt::format("keys: expected at least the {} tokens of queries, got {}", tokens, length));
  }
  if (heads > 0 && (kv_heads == 0 || heads % kv_heads != 0)) {
    return Invalid(
        fmt::format("queries: {} heads are not a multiple of the {} of keys", heads, kv_heads));
  }
  if (input.queries.dim(2) == 0) return Invalid("queries: head_dim is 0");
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", input.out, "queries", input.queries, true));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", input.out, "keys", input.keys, false));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", input.out, "values", input.values, false));
  return CheckAttentionOptions(options, heads);
}

}  // namespace

Status LookUpRows(const Device& device, const TensorView& table, const TensorView& ids,
                  const MutableTensorView& out, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckRank("table", table, 2));
  MARLIN_RETURN_IF_ERROR(CheckActivations("table", table, table.shape()));
  MARLIN_RETURN_IF_ERROR(CheckLookUp(ids, out, table.dim(1)));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "table", table, false));
  if (out.ElementCount() == 0) return {};
  return RunOperation(device, LookUpRowsCall{table, ids, out}, stream);
}

Status LookUpRows(const Device& device, const PreparedWeights& table, const TensorView& ids,
                  const MutableTensorView& out, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckTable(device, table));
  MARLIN_RETURN_IF_ERROR(CheckLookUp(ids, out, table.spec().k));
  if (out.ElementCount() == 0) return {};
  const PreparedWeights::Storage& stored = *Internals::Storage(table);
  if (!TransformsInput(stored.spec)) {
    return RunOperation(device, LookUpWeightRowsCall{stored, ids, out}, stream);
  }
  const InputTransform transform = InputOf(stored, 0);
  const DType dtype = transform.keeps_values() ? out.dtype() : DType::kF32;
  MARLIN_ASSIGN_OR_RETURN(
      const Workspace workspace,
      Internals::Impl(device).TakeWorkspace(stream, out.ElementCount() * DTypeBytes(dtype)));
  const MutableTensorView rows(workspace.data, dtype, out.shape());
  Status status = RunOperation(device, LookUpWeightRowsCall{stored, ids, rows}, stream);
  if (status.ok()) {
    status =
        Internals::Impl(device).backend().TransformColumns({rows, out, transform, true}, stream);
  }
  Internals::Impl(device).ReturnWorkspace(workspace);
  return status;
}

Status LookUpRows(const Device& device, const TensorView& table, std::span<const int32_t> ids,
                  const MutableTensorView& out, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckRank("table", table, 2));
  DeviceIndices indices(ids);
  MARLIN_RETURN_IF_ERROR(indices.Move(device, "ids", table.dim(0)));
  return LookUpRows(device, table, indices.view(), out, stream);
}

Status LookUpRows(const Device& device, const PreparedWeights& table, std::span<const int32_t> ids,
                  const MutableTensorView& out, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckTable(device, table));
  DeviceIndices indices(ids);
  MARLIN_RETURN_IF_ERROR(indices.Move(device, "ids", table.spec().n));
  return LookUpRows(device, table, indices.view(), out, stream);
}

Status Convert(const Device& device, const TensorView& x, const MutableTensorView& out,
               void* stream) {
  if (x.rank() != 2 && x.rank() != 3) {
    return Invalid(fmt::format("x: expected rank 2 or 3, got {}", x.rank()));
  }
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "x", x, true));
  if (x.ElementCount() == 0) return {};
  return RunOperation(device, ConvertCall{x, out}, stream);
}

Status RmsNorm(const Device& device, const TensorView& x, const TensorView& weight, float epsilon,
               const MutableTensorView& out, void* stream) {
  if (x.rank() != 2 && x.rank() != 3) {
    return Invalid(fmt::format("x: expected rank 2 or 3, got {}", x.rank()));
  }
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckRequiredVector("weight", weight, x.dim(x.rank() - 1), false));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "x", x, true));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "weight", weight, false));
  MARLIN_RETURN_IF_ERROR(CheckEpsilon(epsilon));
  if (x.ElementCount() == 0) return {};
  return RunOperation(device, RmsNormCall{x, weight, epsilon, out}, stream);
}

Status AddTo(const Device& device, const TensorView& y, const MutableTensorView& x, float scale,
             void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckRank("x", x, 2));
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("y", y, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("x", x, "y", y, true));
  if (x.ElementCount() == 0) return {};
  return RunOperation(device, AddToCall{y, x, scale}, stream);
}

Status AddRmsNorm(const Device& device, const TensorView& block, const MutableTensorView& residual,
                  const TensorView& weight, float epsilon, const MutableTensorView& out,
                  void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckRank("residual", residual, 2));
  MARLIN_RETURN_IF_ERROR(CheckActivations("residual", residual, residual.shape()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("block", block, residual.shape()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, residual.shape()));
  MARLIN_RETURN_IF_ERROR(CheckRequiredVector("weight", weight, residual.dim(1), false));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("residual", residual, "block", block, false));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("residual", residual, "weight", weight, false));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "residual", residual, false));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "block", block, false));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "weight", weight, false));
  MARLIN_RETURN_IF_ERROR(CheckEpsilon(epsilon));
  if (residual.ElementCount() == 0) return {};
  return RunOperation(device, AddRmsNormCall{block, residual, weight, epsilon, out}, stream);
}

Status CenterRows(const Device& device, const MutableTensorView& x, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckRank("x", x, 2));
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, x.shape()));
  if (x.ElementCount() == 0) return {};
  return RunOperation(device, CenterRowsCall{x}, stream);
}

Status CheckRotary(const char* name, const MutableTensorView& x, const RotaryEmbedding& rotary) {
  const TensorView& frequencies = rotary.inverse_frequencies;
  MARLIN_RETURN_IF_ERROR(CheckRank("inverse_frequencies", frequencies, 1));
  MARLIN_RETURN_IF_ERROR(
      CheckRequiredVector("inverse_frequencies", frequencies, frequencies.dim(0), true));
  if (2 * frequencies.dim(0) > x.dim(2)) {
    return Invalid(fmt::format("inverse_frequencies: {} pairs do not fit in a head of {}",
                               frequencies.dim(0), x.dim(2)));
  }
  return CheckNoOverlap(name, x, "inverse_frequencies", frequencies, false);
}

Status ApplyRotary(const Device& device, const RotaryEmbedding& rotary, const TensorView& positions,
                   const MutableTensorView& x, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckRank("x", x, 3));
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckRotary("x", x, rotary));
  MARLIN_RETURN_IF_ERROR(CheckIndexVector("positions", positions, x.dim(0)));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices("x", x, "positions", positions));
  if (x.ElementCount() == 0) return {};
  return RunOperation(device, ApplyRotaryCall{rotary, positions, x}, stream);
}

Status ApplyRotary(const Device& device, const RotaryEmbedding& rotary,
                   std::span<const int32_t> positions, const MutableTensorView& x, void* stream) {
  DeviceIndices indices(positions);
  MARLIN_RETURN_IF_ERROR(indices.Move(device, "positions", kPositionLimit));
  return ApplyRotary(device, rotary, indices.view(), x, stream);
}

Status ScaleByPosition(const Device& device, const PositionScale& scale,
                       const TensorView& positions, const MutableTensorView& x, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckRank("x", x, 3));
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckIndexVector("positions", positions, x.dim(0)));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices("x", x, "positions", positions));
  if (!std::isfinite(scale.beta) || scale.offset < 0 || scale.period < 1) {
    return Invalid(fmt::format("scale: beta {}, offset {}, period {}", scale.beta, scale.offset,
                               scale.period));
  }
  if (x.ElementCount() == 0) return {};
  return RunOperation(device, ScaleByPositionCall{scale, positions, x}, stream);
}

Status HeadProduct(const Device& device, const TensorView& x, const TensorView& weights,
                   const MutableTensorView& out, const HeadProductOptions& options, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckRank("x", x, 3));
  MARLIN_RETURN_IF_ERROR(CheckRank("weights", weights, 3));
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, x.shape()));
  const int64_t outputs = weights.dim(1);
  MARLIN_RETURN_IF_ERROR(CheckActivations("weights", weights, {x.dim(1), outputs, x.dim(2)}));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, {x.dim(0), x.dim(1), outputs}));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "x", x, false));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "weights", weights, false));
  if (out.ElementCount() == 0) return {};
  return RunOperation(device, HeadProductCall{x, weights, out, options}, stream);
}

Status Attention(const Device& device, std::span<const AttentionInput> inputs,
                 const AttentionOptions& options, void* stream) {
  const int64_t sinks = options.sinks.rank() > 0 ? options.sinks.dim(0) : 0;
  MARLIN_RETURN_IF_ERROR(CheckAttentionOptions(options, sinks));
  for (const AttentionInput& input : inputs) {
    MARLIN_RETURN_IF_ERROR(CheckAttentionInput(input, options));
  }
  return RunOperation(device, AttentionCall{inputs, options}, stream);
}

Status ApplyGate(const Device& device, const TensorView& gate, const TensorView& up,
                 const MutableTensorView& out, const GateOptions& options, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckRank("out", out, 2));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, out.shape()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("gate", gate, out.shape()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("up", up, out.shape()));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "gate", gate, true));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "up", up, true));
  MARLIN_RETURN_IF_ERROR(CheckKnown(options.activation));
  if (!(options.limit >= 0.0F)) {
    return Invalid(fmt::format("limit: expected 0 or more, got {}", options.limit));
  }
  if (out.ElementCount() == 0) return {};
  return RunOperation(device, ApplyGateCall{gate, up, out, options}, stream);
}

namespace {

Status CheckRowsOfF32(const MutableTensorView& x) {
  MARLIN_RETURN_IF_ERROR(CheckRank("x", x, 2));
  if (x.dtype() != DType::kF32) {
    return Invalid(fmt::format("x: expected f32, got {}", DTypeName(x.dtype())));
  }
  return CheckMemory("x", x);
}

}  // namespace

Status ApplySigmoid(const Device& device, const MutableTensorView& x, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckRowsOfF32(x));
  if (x.ElementCount() == 0) return {};
  return RunOperation(device, ApplySigmoidCall{x}, stream);
}

Status ApplyOutputGate(const Device& device, const TensorView& gate, const MutableTensorView& x,
                       void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckRank("x", x, 3));
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("gate", gate, x.shape()));
  if (gate.dtype() != DType::kF32) {
    return Invalid(fmt::format("gate: expected f32, got {}", DTypeName(gate.dtype())));
  }
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("x", x, "gate", gate, false));
  if (x.ElementCount() == 0) return {};
  return RunOperation(device, ApplyOutputGateCall{gate, x}, stream);
}

Status ScaleAndCap(const Device& device, const MutableTensorView& x, float scale, float softcap,
                   void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckRowsOfF32(x));
  MARLIN_RETURN_IF_ERROR(CheckSoftcap(softcap));
  if (x.ElementCount() == 0) return {};
  return RunOperation(device, ScaleAndCapCall{x, scale, softcap}, stream);
}

}  // namespace marlin
