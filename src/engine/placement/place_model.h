// Chooses what of a model stays in the host's memory: experts and layers.
#pragma once

#include <cstdint>

#include "marlin/device.h"
#include "marlin/model.h"
#include "marlin/status.h"
#include "model/host_experts.h"
#include "model/host_layers.h"
#include "model/layers.h"
#include "model/open_model.h"

namespace marlin {

struct ModelPlacement {
  HostLayers layers;
  HostExperts experts;    ///< In the device's layers.
  int64_t for_cache = 0;  ///< Bytes that the device has for the KV cache.

  /// For LoadOptions.
  const HostLayers* host_layers() const { return layers.count > 0 ? &layers : nullptr; }
  const HostExperts* host_experts() const { return experts.count > 0 ? &experts : nullptr; }
};

/// Chooses them as ModelOptions::gpu_layers and host_experts ask. Errors: as ChooseHostExperts;
/// kInvalidArgument for more layers than the model has, for layers that would read the keys of one
/// on the host, for a device that is the host and for prepared weights; kOutOfMemory if what is to
/// be on the device does not fit.
Result<ModelPlacement> PlaceModel(const ModelDirectory& model, const Device& device,
                                  const ModelOptions& options);

/// The bytes of a part's weights that a token reads, experts being equally frequent; without the
/// embeddings' tables.
int64_t BytesPerToken(const Decoder& part);

}  // namespace marlin
