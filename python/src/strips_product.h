// Weights and experts for Apple GPUs in the form that _mlx uses.
#pragma once

#include <memory>

#include "backends/metal/gemm/prepared_strips.h"
#include "backends/metal/moe/foreign_experts.h"
#include "mlx/product_table.h"

namespace marlin::python {

std::shared_ptr<const MetalProduct> MakeMetalProduct(
    std::shared_ptr<const metal::PreparedStrips> strips);
std::shared_ptr<MetalExperts> MakeMetalExperts(std::shared_ptr<metal::ForeignExperts> experts);

}  // namespace marlin::python
