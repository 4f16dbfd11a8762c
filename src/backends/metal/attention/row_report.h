// The reports of kernels/check_rows.h about the rows of a step.
#pragma once

#include <cstdint>
#include <functional>

#include "backends/metal/decoder/operations.h"
#include "backends/metal/runtime/driver.h"
#include "marlin/status.h"

namespace marlin::metal {

/// Sizes in the messages.
struct RowLimits {
  int64_t rows = 0;
  int64_t blocks = 0;
  int64_t page_tokens = 0;
};

/// The error of a report; other backends have the same messages.
Status RowReportError(const ErrorWords::Word& report, const RowLimits& limits);

/// Makes the error of a report.
using ErrorOfReport = std::function<Status(const ErrorWords::Word& report)>;

/// Binds the word of a report to a launch that `checks`, and else none. `error_of` keeps copies of
/// what it needs. Errors: kOutOfMemory.
Status BindReport(bool checks, ErrorOfReport error_of, CallContext* context, KernelLaunch* launch);

}  // namespace marlin::metal
