// Checks whether a device can run a model, and uploads tables other than weights.
#pragma once

#include <string>
#include <vector>

#include "marlin/device.h"
#include "marlin/status.h"
#include "model/decoder_config.h"
#include "model/layers.h"
#include "plan/step/decoder_step.h"

namespace marlin {

/// Checks the device before anything is loaded. Errors: kUnsupported naming the device, and the
/// first operation that a model of this config needs and the device lacks.
Status CheckDevice(const Device& device, const DecoderConfig& config);

struct PlacementOptions {
  bool prepared = false;  ///< The device must have a layout of files of prepared weights.
  /// "auto" leaves a GPU in shared memory, on which calibration has not been tried, to a user who
  /// names it.
  bool calibrates = false;
  std::vector<std::string>* notes = nullptr;  ///< Takes why a device was not taken.
};

/// The device itself or, if it was opened as "auto", the first candidate that runs every operation
/// of a model of this config itself; the last one need only have them. Errors: as CheckDevice for
/// the last candidate, and as Device::Open.
Result<Device> DeviceFor(const Device& device, const DecoderConfig& config,
                         const PlacementOptions& options = {});

/// Checks that a device has the unfused operations of an operation of a step, which may be of a
/// layer with this mixer. Errors: kUnsupported naming the device and the operation.
Status CheckUnfused(const Device& device, StepKind kind, const Mixer& mixer);

/// Whether device and host share memory. Precondition: CheckDevice.
bool ReadsHostMemory(const Device& device);

/// Whether kernels read and write any host memory in place: the device is the host. Others that
/// share its memory have to map or copy what they did not allocate. Precondition: CheckDevice.
bool ComputesInHostMemory(const Device& device);

/// Uploads the RoPE frequencies, and the embedding tables unless kernels read the checkpoint's
/// mapping in place. Errors: kOutOfMemory, kDeviceLost.
Status UploadTables(const Device& device, Decoder* decoder);

}  // namespace marlin
