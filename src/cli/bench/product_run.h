// Measuring GEMMs and dequantizations, case after case, on any kind of device.
#pragma once

#include <string>
#include <vector>

#include "bench/gemm.h"
#include "cli/bench/bench_arguments.h"
#include "cli/bench/bench_device.h"

namespace marlin::cli {

struct ProductRun {
  const char* command = "";  ///< "bench gemm".
  /// The cases of a group are measured in turn. The time of the first is a peer of each other one:
  /// sparse weights next to dense ones.
  std::vector<std::vector<bench::BenchCase>> groups;
  /// Also the dense baseline: OpenBLAS on a CPU, cuBLAS on a GPU.
  bool against = false;
};

/// Measures the machine and every case, and prints the report. Precondition: `device` is open.
/// Errors: as Prepare and Gemm, kUnsupported without the baseline, kIo.
Status RunProducts(Console& console, const BenchArguments& arguments, BenchDevice& device,
                   const ProductRun& run);

}  // namespace marlin::cli
