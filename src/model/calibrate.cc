#include "marlin/calibrate.h"

#include <fmt/format.h>

#include <new>

#include "base/find_named.h"
#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/convert.h"
#include "model/calibration_text.h"
#include "model/calibrator.h"
#include "model/open_model.h"
#include "model/placement.h"

namespace marlin {
namespace {

Status Invalid(const std::string& message) { return {Code::kInvalidArgument, message}; }

Status CheckPruning(PruneMethod pruning) {
  if (pruning <= PruneMethod::kCompensated) return {};
  return Invalid(fmt::format("pruning: unknown number {}", static_cast<int>(pruning)));
}

Result<QuantizeCheckpointReport> Calibrated(const std::string& source, const std::string& output,
                                            const Device& device,
                                            const QuantizeCheckpointOptions& options,
                                            const CalibrationOptions& calibration) {
  if (options.method != QuantizeMethod::kGptq) {
    return Invalid(
        fmt::format("method {}: uses no calibration", QuantizeMethodName(options.method)));
  }
  MARLIN_RETURN_IF_ERROR(CheckPruning(calibration.pruning));
  MARLIN_ASSIGN_OR_RETURN(ModelDirectory directory, OpenModelDirectory(source));
  if (!directory.checkpoint.quant_method().empty()) {
    return Invalid(fmt::format("{}: is quantized already, with {}", Printable(source),
                               Printable(directory.checkpoint.quant_method())));
  }
  MARLIN_ASSIGN_OR_RETURN(const Device chosen, DeviceFor(device, directory.config));
  MARLIN_RETURN_IF_ERROR(CheckCalibrationText(calibration, directory.config.shape.vocabulary));
  Calibrator calibrator(std::move(directory), source, chosen, calibration);
  SystemIo io;
  return QuantizeCheckpointOn(io, source, output, options, &calibrator);
}

}  // namespace

std::string_view PruneMethodName(PruneMethod method) {
  switch (method) {
    case PruneMethod::kMagnitude:
      return "magnitude";
    case PruneMethod::kWeighted:
      return "weighted";
    case PruneMethod::kCompensated:
      return "compensated";
  }
  return "unknown";
}

Result<PruneMethod> ParsePruneMethod(std::string_view name) {
  constexpr PruneMethod kMethods[] = {PruneMethod::kMagnitude, PruneMethod::kWeighted,
                                      PruneMethod::kCompensated};
  return FindNamed("pruning", "name", name, kMethods, PruneMethodName);
}

Result<QuantizeCheckpointReport> QuantizeCalibrated(const std::string& source,
                                                    const std::string& output, const Device& device,
                                                    const QuantizeCheckpointOptions& options,
                                                    const CalibrationOptions& calibration) {
  try {
    return Calibrated(source, output, device, options, calibration);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, fmt::format("{}: no memory to calibrate it", source));
  }
}

}  // namespace marlin
