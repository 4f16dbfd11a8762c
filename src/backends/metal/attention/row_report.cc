#include "backends/metal/attention/row_report.h"

#include <fmt/core.h>

#include <utility>

#include "backends/metal/kernels/attention/attend_parameters.h"
#include "base/errors.h"
#include "base/macros.h"

namespace marlin::metal {

Status RowReportError(const ErrorWords::Word& report, const RowLimits& limits) {
  const int32_t a = report.id;
  const int32_t b = report.more[0];
  const int32_t c = report.more[1];
  switch (report.selection) {
    case kernels::kRowsAreRight:
      return Status();
    case kernels::kWrongFirstRows:
      return Invalid(fmt::format("first_rows: expected to ascend from 0 to {}, got {} at {}",
                                 limits.rows, a, b));
    case kernels::kNegativePosition:
      return Invalid(fmt::format("positions: expected 0 or more, got {} at {}", a, b));
    case kernels::kWrongNextPosition:
      // After the largest position comes one that only unsigned numbers have.
      return Invalid(
          fmt::format("positions: expected {}, got {} at {}", static_cast<uint32_t>(c), a, b));
    case kernels::kNoBlock:
      return Invalid(fmt::format("block_tables: position {} is in block {} of {}", a,
                                 a / limits.page_tokens, limits.blocks));
    default:
      return Invalid(fmt::format("block_tables: no page {} for block {} of sequence {}", a, b, c));
  }
}

Status BindReport(bool checks, ErrorOfReport error_of, CallContext* context, KernelLaunch* launch) {
  if (!checks) {
    launch->buffers.push_back({MARLIN_BUFFER_ROW_ERROR});
    return Status();
  }
  MARLIN_ASSIGN_OR_RETURN(ErrorWords::Word* const report,
                          context->TakeWord({}, std::move(error_of)));
  launch->buffers.push_back(
      {MARLIN_BUFFER_ROW_ERROR, report, int64_t{sizeof(ErrorWords::Word)}, true, true});
  return Status();
}

}  // namespace marlin::metal
