// Opening of an unquantized model to measure it on a text.
#pragma once

#include <new>
#include <string>
#include <utility>

#include "base/macros.h"
#include "base/printable.h"
#include "base/thread_pool.h"
#include "calibrate/calibration_text.h"
#include "marlin/device.h"
#include "marlin/status.h"
#include "model/open_model.h"
#include "model/placement.h"

namespace marlin {

/// Runs Meter(directory, source, device, options).Run() on the model at `source`; options.text is
/// its text. Errors: as OpenModelDirectory, DeviceFor, CheckCalibrationText and Run;
/// kInvalidArgument for a quantized model, kOutOfMemory.
template <typename Meter, typename Options>
auto MeasureModel(const std::string& source, const Device& device, const Options& options)
    -> decltype(std::declval<Meter>().Run()) {
  try {
    MARLIN_ASSIGN_OR_RETURN(ModelDirectory directory, OpenModelDirectory(source));
    if (!directory.checkpoint.quant_method().empty()) {
      return Status(Code::kInvalidArgument, Printable(source) + ": is quantized already, with " +
                                                Printable(directory.checkpoint.quant_method()));
    }
    MARLIN_ASSIGN_OR_RETURN(const Device chosen,
                            DeviceFor(device, directory.config, {.calibrates = true}));
    MARLIN_RETURN_IF_ERROR(CheckCalibrationText(options.text, directory.config.shape.vocabulary));
    return Meter(std::move(directory), source, chosen, options).Run();
  } catch (const ThreadStartError& error) {
    return Status(Code::kOutOfMemory, Printable(source) + ": " + error.what());
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, Printable(source) + ": no memory to measure it");
  }
}

}  // namespace marlin
