// gptq of one matrix, with the products of the CPU.
#pragma once

#include <utility>
#include <vector>

#include "base/macros.h"
#include "base/thread_pool.h"
#include "calibrate/device_products.h"
#include "marlin/device.h"
#include "quantize/gptq.h"

namespace marlin {

inline Result<QuantizedWeights> Gptq(ThreadPool& pool, const TensorView& dense,
                                     const QuantizeOptions& options,
                                     const InputCurvature& curvature,
                                     const InputCorrection* correction = nullptr,
                                     QuantizeReport* report = nullptr) {
  DeviceOptions device;
  device.threads = pool.worker_count();
  DeviceProducts products(*Device::Open("cpu", device), pool);
  const GptqMatrix matrix{dense, options};
  MARLIN_ASSIGN_OR_RETURN(std::vector<GptqResult> results,
                          QuantizeGptq(pool, products, {&matrix, 1}, curvature, correction));
  if (report != nullptr) report->zeroed_groups = results.front().zeroed_groups;
  return std::move(results.front().weights);
}

}  // namespace marlin
