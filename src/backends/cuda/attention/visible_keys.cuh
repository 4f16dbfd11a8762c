// The keys that a query sees, as in base/attention_window.h.
#pragma once

#include "backends/cuda/attention/attention_layout.h"
#include "backends/cuda/common/fragment_math.cuh"

namespace marlin::cuda {

MARLIN_DEVICE int FirstVisibleKey(const AttentionArguments& args, int position) {
  if (args.window <= 0) return 0;
  return args.chunked ? position / args.window * args.window : max(position - args.window + 1, 0);
}

}  // namespace marlin::cuda
