#include "marlin/calibrate.h"

#include <fmt/core.h>

#include <memory>
#include <new>
#include <utility>

#include "base/errors.h"
#include "base/find_named.h"
#include "base/macros.h"
#include "base/printable.h"
#include "calibrate/awq_quantizer.h"
#include "calibrate/calibration_text.h"
#include "calibrate/gptq_quantizer.h"
#include "checkpoint/convert/convert.h"
#include "model/open_model.h"
#include "model/placement.h"

namespace marlin {
namespace {

Status CheckPruning(PruneMethod pruning) {
  if (pruning <= PruneMethod::kCompensated) return {};
  return Invalid(fmt::format("pruning: unknown number {}", static_cast<int>(pruning)));
}

Result<QuantizeCheckpointReport> Calibrated(const std::string& source, const std::string& output,
                                            const Device& device,
                                            const QuantizeCheckpointOptions& options,
                                            const CalibrationOptions& calibration) {
  if (!NeedsCalibration(options.method)) {
    return Invalid(
        fmt::format("method {}: uses no calibration", QuantizeMethodName(options.method)));
  }
  MARLIN_RETURN_IF_ERROR(CheckPruning(calibration.pruning));
  MARLIN_ASSIGN_OR_RETURN(ModelDirectory directory,
                          OpenModelDirectory(source, {options.allow_extra_tensors}));
  if (!directory.checkpoint.quant_method().empty()) {
    return Invalid(fmt::format("{}: is quantized already, with {}", Printable(source),
                               Printable(directory.checkpoint.quant_method())));
  }
  MARLIN_ASSIGN_OR_RETURN(const Device chosen,
                          DeviceFor(device, directory.config, {.calibrates = true}));
  MARLIN_RETURN_IF_ERROR(CheckCalibrationText(calibration, directory.config.shape.vocabulary));
  SystemIo io;
  std::unique_ptr<GptqQuantizer> gptq;
  if (options.method != QuantizeMethod::kAwq) {
    gptq = std::make_unique<GptqQuantizer>(std::move(directory), source, chosen, calibration);
  }
  if (options.method == QuantizeMethod::kGptq) {
    return QuantizeCheckpointOn(io, source, output, options, gptq.get());
  }
  // The scales are searched in the model as it is, while gptq sees it scaled.
  MARLIN_ASSIGN_OR_RETURN(ModelDirectory unscaled,
                          OpenModelDirectory(source, {options.allow_extra_tensors}));
  AwqQuantizer awq(std::move(unscaled), source, chosen, calibration, std::move(gptq));
  return QuantizeCheckpointOn(io, source, output, options, &awq);
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
