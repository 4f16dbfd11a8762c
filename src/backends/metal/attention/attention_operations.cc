// The two attention operations as launches: over tensors of keys and values, and over a paged
// cache.
#include <algorithm>

#include "backends/metal/attention/attend_launches.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

AttendOperands OperandsOf(const AttentionInput& input, const AttentionOptions& options) {
  return {input.queries, input.out, options, input.keys, input.values};
}

AttendOperands OperandsOf(const PagedAttentionCall& call) {
  return {call.queries, call.out, call.options, {}, {}, &call.rows, &call.cache};
}

bool IsEmpty(const AttentionInput& input) { return input.out.ElementCount() == 0; }

}  // namespace

bool Takes(const AttentionCall& call, const DeviceShape& /*shape*/) {
  return std::ranges::all_of(call.inputs, [&](const AttentionInput& input) {
    return IsEmpty(input) || TakesAttention(OperandsOf(input, call.options));
  });
}

int64_t WorkspaceBytes(const AttentionCall& call, const DeviceShape& shape) {
  int64_t bytes = 0;
  for (const AttentionInput& input : call.inputs) {
    if (IsEmpty(input)) continue;
    bytes = std::max(bytes, AttendWorkspaceBytes(OperandsOf(input, call.options), shape));
  }
  return bytes;
}

Status Launch(const AttentionCall& call, CallContext* context) {
  for (const AttentionInput& input : call.inputs) {
    if (IsEmpty(input)) continue;
    MARLIN_RETURN_IF_ERROR(LaunchAttention(OperandsOf(input, call.options), context));
  }
  return Status();
}

bool Takes(const PagedAttentionCall& call, const DeviceShape& /*shape*/) {
  return TakesAttention(OperandsOf(call));
}

int64_t WorkspaceBytes(const PagedAttentionCall& call, const DeviceShape& shape) {
  return AttendWorkspaceBytes(OperandsOf(call), shape);
}

Status Launch(const PagedAttentionCall& call, CallContext* context) {
  return LaunchAttention(OperandsOf(call), context);
}

}  // namespace marlin::metal
