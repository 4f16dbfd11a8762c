// The dense GEMM that GPU figures are compared with.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "marlin/status.h"

namespace marlin::bench {

/// c[m, n] = a[m, k] x b[n, k]^T, everything bf16 in the device's memory, sums in fp32.
struct DenseProduct {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
};

struct DenseBaseline {
  std::string name;
  std::function<Status(const DenseProduct& product, void* stream)> launch;
};

}  // namespace marlin::bench
