// Maps formats to decoders.
#pragma once

#include "backends/cuda/layout/tile_layout.h"
#include "marlin/format.h"

namespace marlin::cuda {

/// The decoder of a format.
CodeKind KindOf(Format format);

}  // namespace marlin::cuda
