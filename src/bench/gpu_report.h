// The report of a GPU benchmark as JSON and as text.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

#include "bench/gpu.h"
#include "marlin/device.h"

namespace marlin::bench {

/// {"roofline", "results", "warnings"}: one result per problem; where several kernels were timed,
/// the result of the planned one, which lists all of them as "candidates". `cublas_version` is
/// empty where cuBLAS is not installed.
nlohmann::ordered_json GpuDocument(const GpuCeilings& ceilings, const std::string& cublas_version,
                                   std::span<const GpuBenchResult> results);

/// The same as a heading and a table.
std::string GpuText(const DeviceInfo& info, const GpuCeilings& ceilings,
                    const std::string& cublas_version, std::span<const GpuBenchResult> results);

}  // namespace marlin::bench
