// The launch of kernels/rows_advance.metal.
#include <fmt/core.h>

#include <limits>
#include <utility>

#include "backends/metal/decoder/operations.h"
#include "backends/metal/kernels/rows/rows_parameters.h"
#include "backends/metal/rows/row_views.h"
#include "base/errors.h"
#include "base/macros.h"

namespace marlin::metal {

bool Takes(const AdvanceTokensCall& call, const DeviceShape& /*shape*/) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  return call.sampled.dim(0) <= kMost && call.stop_ids.ElementCount() <= kMost &&
         call.tokens.dim(1) <= kMost;
}

Status Launch(const AdvanceTokensCall& call, CallContext* context) {
  kernels::AdvanceParameters p{};
  p.rows = static_cast<int32_t>(call.sampled.dim(0));
  p.steps = static_cast<int32_t>(call.tokens.dim(1));
  p.stops = static_cast<int32_t>(call.stop_ids.dim(0));
  KernelLaunch launch;
  launch.source = "rows_advance.metal";
  launch.function = "rows_advance";
  launch.threads = kernels::kAdvanceThreads;
  launch.buffers.push_back(OperandOf(MARLIN_BUFFER_SAMPLED, call.sampled));
  launch.buffers.push_back(OperandOf(MARLIN_BUFFER_STOP_IDS, call.stop_ids));
  const auto changes = [&](int index, const MutableTensorView& view) {
    launch.buffers.push_back(OperandOf(index, view, Use::kChanged));
  };
  changes(MARLIN_BUFFER_NEXT_IDS, call.ids);
  changes(MARLIN_BUFFER_NEXT_POSITIONS, call.positions);
  changes(MARLIN_BUFFER_ADVANCED_ROWS, call.state_rows);
  changes(MARLIN_BUFFER_TOKEN_COUNTS, call.counts);
  changes(MARLIN_BUFFER_STEP_TOKENS, call.tokens);
  const auto error_of = [steps = p.steps](const ErrorWords::Word& word) {
    return Invalid(
        fmt::format("counts: expected 0..{}, got {} at {}", steps - 1, word.id, word.selection));
  };
  MARLIN_ASSIGN_OR_RETURN(ErrorWords::Word* const word,
                          context->TakeWord({kernels::kNoError, 0}, error_of));
  launch.buffers.push_back({MARLIN_BUFFER_INDEX_ERROR, word, sizeof(*word), true, true});
  launch.other_parameters = ParameterBlock(p);
  context->launches.push_back(std::move(launch));
  return Status();
}

}  // namespace marlin::metal
