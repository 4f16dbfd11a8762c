// Heads that differ between the layers of a model.
#pragma once

#include "recipe/decoder_shape.h"
#include "recipe/model_config.h"

namespace marlin {

/// Reads Dimensions::global_layers and layer_heads of types that know global_head_dim, once the
/// heads of the other layers are read; reports errors to the config.
void ReadLayerHeads(ModelConfig& config, Dimensions* sizes);

}  // namespace marlin
