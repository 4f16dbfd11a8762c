// Which decoder a format takes.
#pragma once

#include "backends/cuda/tile_layout.h"
#include "marlin/format.h"

namespace marlin::cuda {

/// The kind of codes that a format is decoded as.
CodeKind KindOf(Format format);

}  // namespace marlin::cuda
