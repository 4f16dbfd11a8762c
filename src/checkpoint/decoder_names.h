// The tensors of a decoder under the names that everything else uses.
#pragma once

#include "checkpoint/tensor_store.h"

namespace marlin {

/// Gives the tensors of a decoder of a known type the names of decoder_tensors.h, as transformers
/// does when it loads them: a base model's "layers.0.x" becomes "model.layers.0.x". Directories of
/// this project keep their names, which config.json repeats.
///
/// Where config.json ties the head to the embedding table: a head stored in place of the table
/// becomes the table; a copy of the table is dropped; a head with other values is kept, and the
/// config in the store no longer ties it. Scales of KV caches and RoPE frequencies are dropped.
/// What was done is added to the store's notes.
///
/// Precondition: the tensors are sorted and none is computed; the store has no checksums yet.
Status NameDecoderTensors(TensorStore* store);

}  // namespace marlin
