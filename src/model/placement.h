// Whether a device can run a model, and the tables that it keeps beside the weights.
#pragma once

#include "marlin/device.h"
#include "marlin/status.h"
#include "model/decoder_config.h"
#include "model/layers.h"
#include "plan/decoder_step.h"

namespace marlin {

/// Asks before anything is loaded. Errors: kUnsupported naming the device, and the first operation
/// that a model of this config needs and the device lacks.
Status CheckDevice(const Device& device, const DecoderConfig& config);

/// The device itself, or of one that was opened as "auto" the first in order that can run a model
/// of this config. Errors: those of CheckDevice for the last one asked, those of Device::Open.
Result<Device> DeviceFor(const Device& device, const DecoderConfig& config);

/// Whether a device has the pieces of an operation of a step. Errors: kUnsupported naming the
/// device and the operation.
Status CheckPieces(const Device& device, StepKind kind);

/// Whether the device's memory is the host's. Precondition: CheckDevice.
bool ReadsHostMemory(const Device& device);

/// Moves the rotary table to the device, and the embedding table where the device does not read the
/// mapping of the checkpoint. Errors: kOutOfMemory, kDeviceLost.
Status UploadTables(const Device& device, Decoder* decoder);

}  // namespace marlin
