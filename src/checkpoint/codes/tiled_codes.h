// Codes of modules that files hold in PackedLayout::kMarlinW4.
#pragma once

#include <cstddef>

#include "base/aligned_buffer.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

namespace marlin {

/// Whether weights of a spec can be held so: dense codes of 4 bits.
bool HasTiledLayout(const WeightsSpec& spec);

/// The shape of the tiles of one matrix: [K / 32, N / 32, 32, 4], K and N rounded up.
Shape TiledShape(const WeightsSpec& spec);

/// The tiles of every matrix, u32 [experts, TiledShape]. Precondition: HasTiledLayout. Errors:
/// kOutOfMemory.
Result<AlignedBuffer> TileCodes(const QuantizedWeights& weights);

/// The k-packed words of tiles at any address, u32 [experts, WordsAlongK, n]. Precondition:
/// HasTiledLayout. Errors: kOutOfMemory.
Result<AlignedBuffer> UntileCodes(const WeightsSpec& spec, const std::byte* tiles);

}  // namespace marlin
