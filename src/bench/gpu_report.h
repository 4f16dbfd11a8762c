// The report of a GPU benchmark as JSON and as text.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

#include "bench/gpu.h"

namespace marlin::bench {

/// {"roofline", "results", "warnings"}: one result per problem; where several kernels were timed,
/// the result of the planned one, which lists all of them as "candidates". `cublas_version` is
/// empty where cuBLAS is not installed.
nlohmann::ordered_json GpuDocument(const GpuCeilings& ceilings, const std::string& cublas_version,
                                   std::span<const GpuBenchResult> results);

/// A table for each matrix, of the planned kernels; then all kernels that were timed, and warnings.
std::string GpuText(std::span<const GpuBenchResult> results);

/// The ceilings in the form that all devices share. `cublas_version` as above.
MachineCeilings CeilingsOf(const GpuCeilings& gpu, const std::string& cublas_version);

}  // namespace marlin::bench
