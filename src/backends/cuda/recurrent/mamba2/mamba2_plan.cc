#include "backends/cuda/recurrent/mamba2/mamba2_plan.h"

#include <algorithm>

#include "backends/cuda/recurrent/chunked/chunk_plan.h"
#include "backends/cuda/recurrent/mamba2/ssd_layout.h"
#include "base/checked.h"

namespace marlin::cuda {

Mamba2Plan PlanMamba2(const Mamba2Sizes& sizes, int64_t rows, int64_t sequences, bool quads,
                      Determinism determinism, int multiprocessors) {
  Mamba2Plan plan;
  const int64_t slices = CeilDivide(sizes.head_dim, int64_t{kMambaColumns});
  const bool idle = 2 * sizes.heads * slices * sequences <= multiprocessors;
  plan.slice_columns = idle ? kMambaColumns / 2 : kMambaColumns;
  const int64_t keys = sizes.state_size;
  plan.chunks = determinism == Determinism::kDefault && quads &&
                (keys == 64 || keys == 128 || keys == 256) && sizes.head_dim % kScanColumns == 0 &&
                ChunksPay(rows, sequences);
  if (!plan.chunks) return plan;
  plan.most_chunks = MostChunks(rows, sequences);
  const SsdLayout layout = {static_cast<int>(sizes.groups), static_cast<int>(sizes.heads),
                            static_cast<int>(sizes.state_size), static_cast<int>(sizes.head_dim)};
  plan.part_bytes =
      std::min(plan.most_chunks, kTurnChunks) * layout.ChunkFloats() * int64_t{sizeof(float)};
  return plan;
}

}  // namespace marlin::cuda
