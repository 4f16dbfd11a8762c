// The job of the GEMMs with row-major packed activations: packs rows, multiplies columns, runs the
// epilogue.
#include <algorithm>

#include "backends/cpu/gemm/gemm_driver.h"
#include "backends/cpu/gemm/gemm_job.h"
#include "base/checked.h"

namespace marlin::cpu {
namespace {

/// Bytes from one packed row of activations to the next. A cache line more than k, because rows a
/// power of two apart would conflict in L1 sets.
int64_t ActivationStride(const GemmDesc& desc, const RowKernels& kernels) {
  return RoundUp(desc.k, kChunkK) / kSliceK * kernels.slice_bytes + kVectorBytes;
}

/// Rows of an MC block: its packed activations, over all of k, have RowKernels::block_bytes.
/// Multiples of 24 fill the tiles of every instruction set.
int64_t RowsPerPass(const GemmDesc& desc, const RowKernels& kernels) {
  return std::clamp<int64_t>(kernels.block_bytes / ActivationStride(desc, kernels) / 24 * 24, 24,
                             192);
}

/// Column blocks of 16 per task. Small M is bound by streaming the weights from memory: long runs,
/// four per worker, because two workers that read adjacent runs of 128 KiB lose a quarter of the
/// bandwidth (19.4 against 23 GB/s). At large M small tasks balance better.
int64_t BlocksPerTask(const GemmDesc& desc, int workers) {
  constexpr int64_t kMostBlocks = 64;
  if (desc.m > kSmallM) return 4;
  const int64_t blocks = CeilDivide(desc.gated ? desc.n / 2 : desc.n, kBlockRows);
  return std::clamp<int64_t>(CeilDivide(blocks, 4 * workers), 1, kMostBlocks);
}

/// Floats from one row of a task's accumulators to the next. One block more than BlocksPerTask,
/// because a range of columns may start inside a block.
int64_t SumsStride(const GemmDesc& desc, int workers) {
  return (BlocksPerTask(desc, workers) + 1) * kBlockRows;
}

/// The blocks that cover columns [first, last) of W.
struct BlockRange {
  int64_t first;
  int64_t count;
  static BlockRange Covering(int64_t first_column, int64_t last_column) {
    const int64_t first = first_column / kBlockRows;
    return {first, CeilDivide(last_column, kBlockRows) - first};
  }
};

}  // namespace

GemmBlocking RowsBlocking(const GemmDesc& desc, int workers) {
  return {RowsPerPass(desc, ExactRowKernels(Isa::kScalar)),
          BlocksPerTask(desc, workers) * kBlockRows};
}

JobBytes RowsJob::Bytes(const GemmDesc& desc, const RowKernels& kernels, int workers) {
  const int64_t sums = desc.m * SumsStride(desc, workers) * (desc.gated ? 2 : 1);
  return {RoundUp(desc.n * 4, kBufferAlignment) +
              RoundUp(desc.m * ActivationStride(desc, kernels), kBufferAlignment),
          RoundUp((sums + ExactScratchFloats(desc.m)) * 4, kBufferAlignment)};
}

int64_t RowsJob::MaxRows(const GemmDesc& desc, const RowKernels& kernels) {
  return RowsPerPass(desc, kernels);
}

RowsJob::RowsJob(const GemmCall& call, const RowKernels& kernels, int workers, std::byte* memory,
                 const JobRows& rows)
    : call_(call),
      rows_(rows),
      kernels_(kernels),
      weights_(static_cast<const PreparedPanels*>(call.weights)->View(call.expert)),
      multiply_(kernels.select(weights_)),
      bias_(WidenBias(call, reinterpret_cast<float*>(memory))),
      x_(reinterpret_cast<uint8_t*>(memory) + RoundUp(call.desc.n * 4, kBufferAlignment)),
      x_stride_(ActivationStride(call.desc, kernels)),
      sums_stride_(SumsStride(call.desc, workers)),
      grid_(TaskGrid::Of(call.desc, BlocksPerTask(call.desc, workers))) {}

void RowsJob::Pack(int64_t task) const {
  const GemmDesc& desc = call_.desc;
  const auto* const a =
      static_cast<const uint8_t*>(call_.a) + rows_[task] * call_.a_stride * DTypeBytes(desc.a_type);
  kernels_.pack_row(*kernels_.vector, a, desc.a_type, desc.k, x_ + task * x_stride_);
}

/// Computes the blocks that cover columns [first, last) of W into `out`. Returns the address of the
/// first column's accumulators.
const float* RowsJob::MultiplyColumns(ColumnRange columns, float* out, float* scratch) const {
  const BlockRange range = BlockRange::Covering(columns.first, columns.last);
  for (int64_t b = 0; b < range.count; ++b) {
    multiply_(weights_, range.first + b, x_, x_stride_, call_.desc.m, out + b * kBlockRows,
              sums_stride_, scratch);
  }
  return out + columns.first % kBlockRows;
}

void RowsJob::Run(int64_t task, std::byte* scratch) const {
  const GemmDesc& desc = call_.desc;
  auto* const panel = reinterpret_cast<float*>(scratch);
  float* const sums = panel + ExactScratchFloats(desc.m);
  const ColumnRange columns = grid_.Columns(task);
  const int64_t half = desc.n / 2;
  const float* const gate = MultiplyColumns(columns, sums, panel);
  const float* const up = desc.gated ? MultiplyColumns({half + columns.first, half + columns.last},
                                                       sums + desc.m * sums_stride_, panel)
                                     : nullptr;
  StoreRows(call_, *kernels_.vector, bias_, columns, {gate, up, sums_stride_});
}

}  // namespace marlin::cpu
