#include "marlin/calibrate.h"

#include <fmt/format.h>

#include <new>

#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/convert.h"
#include "model/calibrator.h"
#include "model/open_model.h"
#include "model/placement.h"

namespace marlin {
namespace {

Status Invalid(const std::string& message) { return {Code::kInvalidArgument, message}; }

Status CheckText(const CalibrationOptions& calibration, int64_t vocabulary) {
  if (calibration.tokens < 0) {
    return Invalid(
        fmt::format("calibration tokens: expected 0 or more, got {}", calibration.tokens));
  }
  if (calibration.text.size() == 1)
    return Invalid("calibration text: expected 2 tokens or more, got 1");
  for (size_t i = 0; i < calibration.text.size(); ++i) {
    const int32_t token = calibration.text[i];
    if (token >= 0 && token < vocabulary) continue;
    return Invalid(
        fmt::format("calibration text: token {} is {}, expected 0..{}", i, token, vocabulary - 1));
  }
  return {};
}

Result<QuantizeCheckpointReport> Calibrated(const std::string& source, const std::string& output,
                                            const Device& device,
                                            const QuantizeCheckpointOptions& options,
                                            const CalibrationOptions& calibration) {
  if (options.method != QuantizeMethod::kGptq) {
    return Invalid(
        fmt::format("method {}: uses no calibration", QuantizeMethodName(options.method)));
  }
  MARLIN_ASSIGN_OR_RETURN(ModelDirectory directory, OpenModelDirectory(source));
  if (!directory.checkpoint.quant_method().empty()) {
    return Invalid(fmt::format("{}: is quantized already, with {}", Printable(source),
                               Printable(directory.checkpoint.quant_method())));
  }
  MARLIN_ASSIGN_OR_RETURN(const Device chosen, DeviceFor(device, directory.config));
  MARLIN_RETURN_IF_ERROR(CheckText(calibration, directory.config.shape.vocabulary));
  Calibrator calibrator(std::move(directory), source, chosen, calibration);
  SystemIo io;
  return QuantizeCheckpointOn(io, source, output, options, &calibrator);
}

}  // namespace

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
