#include "marlin/decoder.h"

#include <fmt/format.h>

#include <new>

#include "base/macros.h"
#include "ops/checks.h"
#include "ops/device.h"
#include "plan/decoder_backend.h"

namespace marlin {
namespace {

Status CheckRank(const char* name, const TensorView& view, int rank) {
  if (view.rank() == rank) return {};
  return Invalid(fmt::format("{}: expected rank {}, got {}", name, rank, view.rank()));
}

/// A vector that must be there unless it has no elements.
Status CheckRequiredVector(const char* name, const TensorView& view, int64_t count, bool f32_only) {
  if (count > 0 && view.empty()) return Invalid(fmt::format("{}: null data", name));
  return CheckVector(name, view, count, f32_only);
}

Status CheckIds(std::span<const int32_t> ids, int64_t rows, const MutableTensorView& out,
                int64_t columns) {
  MARLIN_RETURN_IF_ERROR(CheckRank("out", out, 2));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, {static_cast<int64_t>(ids.size()), columns}));
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= rows) {
      return Invalid(fmt::format("ids: expected 0..{}, got {} at {}", rows - 1, ids[i], i));
    }
  }
  return {};
}

/// One input of attention; `heads` is what the sinks have, or -1.
Status CheckAttentionInput(const AttentionInput& input, int64_t sink_heads) {
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
  MARLIN_RETURN_IF_ERROR(CheckApart("out", input.out, "queries", input.queries, true));
  MARLIN_RETURN_IF_ERROR(CheckApart("out", input.out, "keys", input.keys, false));
  MARLIN_RETURN_IF_ERROR(CheckApart("out", input.out, "values", input.values, false));
  if (sink_heads >= 0 && sink_heads != heads) {
    return Invalid(fmt::format("sinks: expected [{}], got [{}]", heads, sink_heads));
  }
  return {};
}

}  // namespace

Status LookUpRows(const Device& device, const TensorView& table, std::span<const int32_t> ids,
                  const MutableTensorView& out) {
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
  MARLIN_RETURN_IF_ERROR(CheckRank("table", table, 2));
  MARLIN_RETURN_IF_ERROR(CheckActivations("table", table, table.shape()));
  MARLIN_RETURN_IF_ERROR(CheckIds(ids, table.dim(0), out, table.dim(1)));
  MARLIN_RETURN_IF_ERROR(CheckApart("out", out, "table", table, false));
  if (out.ElementCount() > 0) decoder->LookUpRows(table, ids, out);
  return {};
}

Status LookUpRows(const Device& device, const PreparedWeights& table, std::span<const int32_t> ids,
                  const MutableTensorView& out) {
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
  MARLIN_RETURN_IF_ERROR(CheckWeights(device, table).WithContext("table"));
  const WeightsSpec& spec = table.spec();
  if (spec.experts != 1) {
    return Invalid(fmt::format("table: expected one matrix, got {} experts", spec.experts));
  }
  MARLIN_RETURN_IF_ERROR(CheckIds(ids, spec.n, out, spec.k));
  if (out.ElementCount() == 0) return {};
  return decoder->LookUpRows(*table.storage(), ids, out);
}

Status Convert(const Device& device, const TensorView& x, const MutableTensorView& out) {
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
  if (x.rank() != 2 && x.rank() != 3) {
    return Invalid(fmt::format("x: expected rank 2 or 3, got {}", x.rank()));
  }
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckApart("out", out, "x", x, true));
  if (x.ElementCount() > 0) decoder->Convert(x, out);
  return {};
}

Status RmsNorm(const Device& device, const TensorView& x, const TensorView& weight, float epsilon,
               const MutableTensorView& out) {
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
  if (x.rank() != 2 && x.rank() != 3) {
    return Invalid(fmt::format("x: expected rank 2 or 3, got {}", x.rank()));
  }
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckRequiredVector("weight", weight, x.dim(x.rank() - 1), false));
  MARLIN_RETURN_IF_ERROR(CheckApart("out", out, "x", x, true));
  MARLIN_RETURN_IF_ERROR(CheckApart("out", out, "weight", weight, false));
  if (!(epsilon >= 0.0F))
    return Invalid(fmt::format("epsilon: expected 0 or more, got {}", epsilon));
  if (x.ElementCount() > 0) decoder->RmsNorm(x, weight, epsilon, out);
  return {};
}

Status AddTo(const Device& device, const TensorView& y, const MutableTensorView& x, float scale) {
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
  MARLIN_RETURN_IF_ERROR(CheckRank("x", x, 2));
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("y", y, x.shape()));
  MARLIN_RETURN_IF_ERROR(CheckApart("x", x, "y", y, true));
  if (x.ElementCount() > 0) decoder->AddTo(y, x, scale);
  return {};
}

Status ApplyRotary(const Device& device, const RotaryEmbedding& rotary,
                   std::span<const int32_t> positions, const MutableTensorView& x) {
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
  MARLIN_RETURN_IF_ERROR(CheckRank("x", x, 3));
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, x.shape()));
  const TensorView& frequencies = rotary.inverse_frequencies;
  MARLIN_RETURN_IF_ERROR(CheckRank("inverse_frequencies", frequencies, 1));
  MARLIN_RETURN_IF_ERROR(
      CheckRequiredVector("inverse_frequencies", frequencies, frequencies.dim(0), true));
  if (2 * frequencies.dim(0) > x.dim(2)) {
    return Invalid(fmt::format("inverse_frequencies: {} pairs do not fit in a head of {}",
                               frequencies.dim(0), x.dim(2)));
  }
  MARLIN_RETURN_IF_ERROR(CheckApart("x", x, "inverse_frequencies", frequencies, false));
  if (static_cast<int64_t>(positions.size()) != x.dim(0)) {
    return Invalid(fmt::format("positions: expected {}, got {}", x.dim(0), positions.size()));
  }
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] < 0) {
      return Invalid(fmt::format("positions: expected 0 or more, got {} at {}", positions[i], i));
    }
  }
  if (x.ElementCount() > 0) decoder->ApplyRotary(rotary, positions, x);
  return {};
}

Status Attention(const Device& device, std::span<const AttentionInput> inputs,
                 const AttentionOptions& options) {
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
  const bool has_sinks = !options.sinks.empty();
  if (has_sinks) {
    MARLIN_RETURN_IF_ERROR(CheckRank("sinks", options.sinks, 1));
    MARLIN_RETURN_IF_ERROR(CheckVector("sinks", options.sinks, options.sinks.dim(0), true));
  }
  if (options.window < 0) {
    return Invalid(fmt::format("window: expected 0 or more, got {}", options.window));
  }
  for (const AttentionInput& input : inputs) {
    MARLIN_RETURN_IF_ERROR(CheckAttentionInput(input, has_sinks ? options.sinks.dim(0) : -1));
  }
  MARLIN_ASSIGN_OR_RETURN(
      const Workspace workspace,
      device.impl().TakeWorkspace(nullptr, decoder->AttentionWorkspaceBytes(inputs, options)));
  decoder->Attention(inputs, options, workspace.data);
  device.impl().ReturnWorkspace(workspace);
  return {};
}

Status ApplyGate(const Device& device, const TensorView& gate, const TensorView& up,
                 const MutableTensorView& out, const GateOptions& options) {
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
  MARLIN_RETURN_IF_ERROR(CheckRank("out", out, 2));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, out.shape()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("gate", gate, out.shape()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("up", up, out.shape()));
  MARLIN_RETURN_IF_ERROR(CheckApart("out", out, "gate", gate, true));
  MARLIN_RETURN_IF_ERROR(CheckApart("out", out, "up", up, true));
  MARLIN_RETURN_IF_ERROR(CheckKnown(options.activation));
  if (!(options.limit >= 0.0F)) {
    return Invalid(fmt::format("limit: expected 0 or more, got {}", options.limit));
  }
  if (out.ElementCount() > 0) decoder->ApplyGate(gate, up, out, options);
  return {};
}

}  // namespace marlin
