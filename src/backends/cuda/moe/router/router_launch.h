// The router's launch: logits to expert ids and weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/layout/value_record.h"

namespace marlin::cuda {

struct DeviceShape;

/// The arguments of the router kernel; RouterOptions has the meaning of most.
struct RouterArguments {
  const float* logits = nullptr;  ///< [tokens, experts]
  int64_t logits_stride = 0;
  int32_t* ids = nullptr;  ///< [tokens, top_k]
  int64_t ids_stride = 0;
  float* weights = nullptr;
  int64_t weights_stride = 0;
  const float* bias = nullptr;    ///< [experts] or null
  const float* scales = nullptr;  ///< [experts] or null
  int tokens = 0;
  int experts = 0;
  int top_k = 0;
  int scoring = 0;  ///< RouterOptions::Scoring.
  int groups = 1;
  int top_groups = 1;
  int best_of_group = 2;
  bool normalize = true;
  double least_sum = 0;
  double scaling_factor = 1;
  ErrorView errors;
};

/// Call it before the first LaunchRouter.
cudaError_t LoadRouter();
/// Precondition: up to MostRouterExperts.
cudaError_t LaunchRouter(const RouterArguments& args, const DeviceShape& device,
                         cudaStream_t stream);

}  // namespace marlin::cuda
