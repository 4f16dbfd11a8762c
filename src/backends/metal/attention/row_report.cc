#include "backends/metal/attention/row_report.h"

#include <fmt/core.h>

#include <memory>
#include <utility>

#include "backends/metal/kernels/attend_parameters.h"
#include "base/errors.h"
#include "base/macros.h"

namespace marlin::metal {

Status RowReportError(const ErrorWords::Word& error, const ErrorWords::Word& numbers,
                      const RowLimits& limits) {
  const int32_t a = error.id;
  const int32_t b = numbers.selection;
  const int32_t c = numbers.id;
  switch (error.selection) {
    case kernels::kRowsAreRight:
      return Status();
    case kernels::kWrongFirstRows:
      return Invalid(fmt::format("first_rows: expected to ascend from 0 to {}, got {} at {}",
                                 limits.rows, a, b));
    case kernels::kNegativePosition:
      return Invalid(fmt::format("positions: expected 0 or more, got {} at {}", a, b));
    case kernels::kWrongNextPosition:
      return Invalid(fmt::format("positions: expected {}, got {} at {}", c, a, b));
    case kernels::kNoBlock:
      return Invalid(fmt::format("block_tables: position {} is in block {} of {}", a,
                                 a / limits.page_tokens, limits.blocks));
    default:
      return Invalid(
          fmt::format("block_tables: no page {} for block {} of sequence {}", a, b, c));
  }
}

Status BindReport(bool checks, ErrorOfReport error_of, CallContext* context, KernelLaunch* launch) {
  if (!checks) {
    launch->buffers.push_back({MARLIN_BUFFER_ROW_ERROR});
    launch->buffers.push_back({MARLIN_BUFFER_ERROR_NUMBERS});
    return Status();
  }
  // Numbers without an error are not looked at, so they need not be cleared.
  MARLIN_ASSIGN_OR_RETURN(const std::shared_ptr<ErrorWords::Word> numbers, context->errors.Take());
  *numbers = {};
  MARLIN_ASSIGN_OR_RETURN(
      ErrorWords::Word* const error,
      context->TakeWord({}, [numbers, error_of = std::move(error_of)](
                                const ErrorWords::Word& word) { return error_of(word, *numbers); }));
  constexpr int64_t kBytes = sizeof(ErrorWords::Word);
  launch->buffers.push_back({MARLIN_BUFFER_ROW_ERROR, error, kBytes, true, true});
  launch->buffers.push_back({MARLIN_BUFFER_ERROR_NUMBERS, numbers.get(), kBytes, true, true});
  return Status();
}

}  // namespace marlin::metal
