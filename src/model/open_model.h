// A model's directory before any weight is loaded, and the files of prepared weights that fit it.
#pragma once

#include <memory>
#include <string>

#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/status.h"
#include "model/decoder_config.h"
#include "model/prepared_file.h"

namespace marlin {

struct ModelDirectory {
  Checkpoint checkpoint;
  DecoderConfig config;
};

/// Errors: those of Model::Open that concern no device.
Result<ModelDirectory> OpenModelDirectory(const std::string& path);

/// The identity of a model that a file of its prepared weights records.
std::string PreparedSource(const Checkpoint& checkpoint);

/// Opens a file of prepared weights for a model and a device. Errors: those of PreparedFile::Open;
/// kInvalidArgument for another model's or another device's weights.
Result<std::shared_ptr<const PreparedFile>> OpenPrepared(const std::string& file,
                                                         const Checkpoint& checkpoint,
                                                         const Device& device);

}  // namespace marlin
