// Weights for Apple GPUs as _mlx takes them.
#pragma once

#include <memory>

#include "backends/metal/prepared_strips.h"
#include "mlx/product_table.h"

namespace marlin::python {

std::shared_ptr<const MetalProduct> MakeMetalProduct(
    std::shared_ptr<const metal::PreparedStrips> strips);

}  // namespace marlin::python
