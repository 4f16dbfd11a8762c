// The whole public C++ API:
//
//   auto device  = marlin::Device::Open("cpu");
//   auto weights = marlin::Quantize(dense_kn, {.format = marlin::Format::kFp4E2M1});
//   auto ready   = marlin::Prepare(*weights, *device);  // once, at load
//   auto status  = marlin::Gemm(*device, activations, *ready, output);
#pragma once

#include "marlin/calibrate.h"
#include "marlin/checkpoint.h"
#include "marlin/decoder.h"
#include "marlin/destination.h"
#include "marlin/device.h"
#include "marlin/draft.h"
#include "marlin/evaluate.h"
#include "marlin/expert_cache.h"
#include "marlin/expert_placement.h"
#include "marlin/format.h"
#include "marlin/gemm.h"
#include "marlin/generate.h"
#include "marlin/importance.h"
#include "marlin/kernels.h"
#include "marlin/layout.h"
#include "marlin/model.h"
#include "marlin/model_ends.h"
#include "marlin/moe.h"
#include "marlin/prepared.h"
#include "marlin/quantize.h"
#include "marlin/recipe.h"
#include "marlin/routing.h"
#include "marlin/sampling.h"
#include "marlin/scheduler.h"
#include "marlin/sensitivity.h"
#include "marlin/speculation.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/version.h"
#include "marlin/weights.h"
