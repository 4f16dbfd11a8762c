// Opens a model's directory without loading weights, and prepared-weight files that match it.
#pragma once

#include <memory>
#include <string>
#include <vector>

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

/// Errors: as Model::Open, where they do not depend on a device.
Result<ModelDirectory> OpenModelDirectory(const std::string& path,
                                          const CheckpointOptions& options = {});

/// The identity of a model, as recorded in its prepared-weight files.
std::string PreparedSource(const Checkpoint& checkpoint);

/// Opens a prepared-weight file for a model and a device. Errors: as PreparedFile::Open;
/// kInvalidArgument for weights of another model or device.
Result<std::shared_ptr<const PreparedFile>> OpenPrepared(const std::string& file,
                                                         const Checkpoint& checkpoint,
                                                         const Device& device);

/// About the bytes of a plain tensor on a device: at most 16 bits an element.
int64_t DeviceBytes(const TensorInfo& tensor);
/// About the bytes of a checkpoint's weights on a device: modules and other tensors.
int64_t WeightBytes(const Checkpoint& checkpoint, const Device& device);

/// The same by the place of the weights.
struct WeightSizes {
  std::vector<int64_t> layers;
  int64_t tables = 0;  ///< Embeddings, unless they are the head.
  int64_t others = 0;

  /// Without the layers before `first`, and if there are such layers without the tables.
  int64_t From(int64_t first) const;
};
WeightSizes SizeWeights(const ModelDirectory& model, const Device& device);
/// Memory of a device for weights and KV cache: `limit` (ModelOptions::device_memory) or, if that
/// is 0 or more, what is free. 0: its memory is the host's.
int64_t MemoryOf(const Device& device, int64_t limit);
/// That memory for messages: "cuda:0 has 24000000000 for it".
std::string DescribeMemory(const Device& device, int64_t limit);

/// The bytes that a device leaves for the KV cache of a checkpoint's model, of whose weights
/// `elsewhere` bytes are not on it and which takes `more` bytes in addition. `limit`:
/// ModelOptions::device_memory. Errors: kOutOfMemory if all that does not fit.
Result<int64_t> BytesForCache(const Checkpoint& checkpoint, const Device& device, int64_t limit,
                              int64_t elsewhere, int64_t more);

}  // namespace marlin
