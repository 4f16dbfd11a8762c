// What `bench` says about a GPU, to people and to programs.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "bench/gpu.h"
#include "marlin/device.h"

namespace marlin::bench {

/// {"roofline", "results", "warnings"}: one result per problem; where several kernels were timed it
/// is that of the planned one, with all of them in short as "candidates". `cublas_version` is empty
/// where cuBLAS is not installed.
nlohmann::ordered_json GpuDocument(const GpuCeilings& ceilings, const std::string& cublas_version,
                                   std::span<const GpuBenchResult> results);

/// The same as a heading and a table.
std::string GpuText(const DeviceInfo& info, const GpuCeilings& ceilings,
                    const std::string& cublas_version, std::span<const GpuBenchResult> results);

}  // namespace marlin::bench
