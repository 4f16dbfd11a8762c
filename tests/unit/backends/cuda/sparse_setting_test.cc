// The default of METAL_MARLIN_CUDA_SPARSE, and its values.
#include "backends/cuda/plan/sparse_setting.h"

#include <gtest/gtest.h>

namespace marlin::cuda {
namespace {

struct Case {
  std::optional<EnvironmentVariable> setting;
  bool products;
  bool models;
};

TEST(SparseSetting, KeepsProductsByDefault) {
  const Case cases[] = {{std::nullopt, true, false},
                        {EnvironmentVariable{"METAL_MARLIN_CUDA_SPARSE", ""}, true, false},
                        {EnvironmentVariable{"METAL_MARLIN_CUDA_SPARSE", "0"}, false, false},
                        {EnvironmentVariable{"METAL_MARLIN_CUDA_SPARSE", "1"}, true, true}};
  for (const Case& c : cases) {
    for (const Format format : {Format::kFp4E2M1, Format::kS4, Format::kNf4}) {
      EXPECT_EQ(KeepsSparseTiles(format, PreparedFor::kProducts, c.setting), c.products);
      EXPECT_EQ(KeepsSparseTiles(format, PreparedFor::kModel, c.setting), c.models);
    }
    EXPECT_FALSE(KeepsSparseTiles(Format::kS8, PreparedFor::kProducts, c.setting));
  }
}

}  // namespace
}  // namespace marlin::cuda
