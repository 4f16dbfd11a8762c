// The block types of GGUF with two levels of scales, which modules with two levels become.
#pragma once

#include <cstdint>

#include "checkpoint/readers/gguf/gguf_blocks.h"
#include "marlin/weights.h"

namespace marlin {

/// The type with two levels of scales for weights of such a description; null: there is none.
/// Whether it holds a module tells HoldsSuperBlocks.
const GgufStored* FindSuperType(const WeightsSpec& spec);

/// Whether the codebook, the super scales and all scales of weights are ones that the type has.
/// Precondition: FindSuperType of their spec is the type.
bool HoldsSuperBlocks(const GgufStored& type, const QuantizedWeights& weights);

/// Writes a block of such a type, the inverse of its decoder. Precondition: HoldsSuperBlocks.
void EncodeSuperBlock(const GgufStored& type, const GgufDecoded& block, uint8_t* out);

}  // namespace marlin
