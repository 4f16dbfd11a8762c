#include "backends/cuda/plan/sparse_setting.h"

#include "backends/cuda/layout/sparse_layout.h"

namespace marlin::cuda {

bool KeepsSparseTiles(Format format, PreparedFor use,
                      const std::optional<EnvironmentVariable>& setting) {
  if (GetFormatInfo(format).bits != kSparseBits) return false;
  if (!setting || setting->value.empty()) return use == PreparedFor::kProducts;
  return setting->value != "0";
}

}  // namespace marlin::cuda
