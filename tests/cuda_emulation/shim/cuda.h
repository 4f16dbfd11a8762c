// Stands for the header of the CUDA driver.
#pragma once

struct CUtensorMap {
  unsigned long long opaque[16];
};
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
