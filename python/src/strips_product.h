// Weights for Apple GPUs in the form that _mlx uses.
#pragma once

#include <memory>

#include "backends/metal/gemm/prepared_strips.h"
#include "mlx/product_table.h"

namespace marlin::python {

std::shared_ptr<const MetalProduct> MakeMetalProduct(
    std::shared_ptr<const metal::PreparedStrips> strips);

}  // namespace marlin::python
