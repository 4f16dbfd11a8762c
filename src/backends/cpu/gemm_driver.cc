#include "backends/cpu/gemm_driver.h"

#include <algorithm>

#include "backends/cpu/bf16_kernel.h"
#include "base/checked.h"
#include "base/scalars.h"

namespace marlin::cpu {
namespace {

/// Bytes from one packed row of activations to the next. A cache line more than k, because rows a
/// power of two apart would conflict in L1 sets.
int64_t ActivationStride(const GemmDesc& desc, const RowKernels& kernels) {
  return RoundUp(desc.k, kChunkK) / kSliceK * kernels.slice_bytes + kVectorBytes;
}

/// Rows of an MC block: its packed activations, over all of k (1 MiB), stay in L2 while the weights
/// stream through. Multiples of 24 fill the tiles of every instruction set.
int64_t RowsPerPass(const GemmDesc& desc, const RowKernels& kernels) {
  constexpr int64_t kBytes = int64_t{1} << 20;
  return std::clamp<int64_t>(kBytes / ActivationStride(desc, kernels) / 24 * 24, 24, 192);
}

/// Column blocks of 16 per task. Small M is bound by streaming the weights from memory: long runs,
/// four per worker, because two workers that read adjacent runs of 128 KiB lose a quarter of the
/// bandwidth (19.4 against 23 GB/s). At large M small tasks balance better.
int64_t BlocksPerTask(const GemmDesc& desc, int workers) {
  constexpr int64_t kMostBlocks = 64;
  constexpr int64_t kFewRows = 8;
  if (desc.m > kFewRows) return 4;
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

GemmWorkspace RowsLayout(const GemmDesc& desc, const RowKernels& kernels, int workers) {
  const int64_t rows = std::min(desc.m, RowsPerPass(desc, kernels));
  const int64_t sums = rows * SumsStride(desc, workers) * (desc.gated ? 2 : 1);
  GemmWorkspace layout;
  layout.activations_offset = RoundUp(desc.n * 4, kBufferAlignment);
  layout.worker_offset =
      layout.activations_offset + RoundUp(rows * ActivationStride(desc, kernels), kBufferAlignment);
  layout.worker_bytes = RoundUp((sums + ExactScratchFloats(rows)) * 4, kBufferAlignment);
  layout.total_bytes = layout.worker_offset + workers * layout.worker_bytes;
  return layout;
}

/// Packed activations of an MC block, and the kernel that multiplies them.
struct RowsProduct {
  const PanelView& weights;
  ExactKernels::MultiplyBlock multiply;
  const uint8_t* x;
  int64_t x_stride;  ///< Bytes.
  int64_t rows;
  int64_t sums_stride;
};

/// Computes the blocks that cover columns [first, last) of W into `out`. Returns the address of the
/// first column's accumulators.
const float* MultiplyColumns(const RowsProduct& product, ColumnRange columns, float* out,
                             float* scratch) {
  const BlockRange range = BlockRange::Covering(columns.first, columns.last);
  for (int64_t b = 0; b < range.count; ++b) {
    product.multiply(product.weights, range.first + b, product.x, product.x_stride, product.rows,
                     out + b * kBlockRows, product.sums_stride, scratch);
  }
  return out + columns.first % kBlockRows;
}

}  // namespace

bool NeedsTwoTerms(const GemmDesc& desc) {
  return desc.a_type != DType::kBf16 && !desc.allow_bf16_activations;
}

const ExactKernels& ExactKernelsOf(Isa level) {
  switch (level) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return avx2::kExactKernels;
    case Isa::kAvx512:
    case Isa::kAmx:
      return avx512::kExactKernels;
#endif
#if defined(__aarch64__)
    case Isa::kNeon:
      return neon::kExactKernels;
#endif
    default:
      return scalar::kExactKernels;
  }
}

RowKernels ExactRowKernels(Isa level) {
  const ExactKernels& kernels = ExactKernelsOf(level);
  const auto pack_row = [](const ExactKernels& vector, const void* a, DType type, int64_t k,
                           void* row) { vector.pack_row(a, type, k, static_cast<float*>(row)); };
  return {&kernels, kSliceK * sizeof(float), pack_row, kernels.select};
}

#if defined(__x86_64__)
RowKernels Bf16RowKernels(const GemmDesc& desc) {
  const ExactKernels* vector = &ExactKernelsOf(Isa::kAvx512);
  if (NeedsTwoTerms(desc)) {
    const auto pack_row = [](const ExactKernels&, const void* a, DType type, int64_t k, void* row) {
      avx512bf16::PackTwoTerms(a, type, k, row);
    };
    return {vector, 2 * avx512bf16::kTermSliceBytes, pack_row, &avx512bf16::SelectTwoTerms};
  }
  const auto pack_row = [](const ExactKernels&, const void* a, DType type, int64_t k, void* row) {
    avx512bf16::PackOneTerm(a, type, k, row);
  };
  return {vector, avx512bf16::kTermSliceBytes, pack_row, &avx512bf16::SelectOneTerm};
}
#else
// Never planned: this architecture has no AVX-512 level.
RowKernels Bf16RowKernels(const GemmDesc& /*desc*/) { return ExactRowKernels(Isa::kScalar); }
#endif

RowKernels RowKernelsOf(const KernelDesc& kernel, const GemmDesc& desc) {
  switch (kernel.grade) {
    case Grade::kW4A8:
      return W4a8RowKernels(kernel.level);
    case Grade::kBf16Compute:
      return Bf16RowKernels(desc);
    case Grade::kExact:
      break;
  }
  return ExactRowKernels(kernel.level);
}

TaskGrid TaskGrid::Of(const GemmDesc& desc, int64_t blocks_per_task) {
  TaskGrid grid;
  grid.columns = desc.gated ? desc.n / 2 : desc.n;
  grid.columns_per_task = blocks_per_task * kBlockRows;
  grid.tasks = CeilDivide(grid.columns, grid.columns_per_task);
  return grid;
}

ColumnRange TaskGrid::Columns(int64_t task) const {
  return {task * columns_per_task, std::min(columns, (task + 1) * columns_per_task)};
}

const float* WidenBias(const GemmCall& call, float* target) {
  const Epilogue& epilogue = call.epilogue;
  if (epilogue.bias == nullptr) return nullptr;
  for (int64_t i = 0; i < call.desc.n; ++i) {
    switch (epilogue.bias_type) {
      case DType::kF16:
        target[i] = HalfToFloat(static_cast<const uint16_t*>(epilogue.bias)[i]);
        break;
      case DType::kBf16:
        target[i] = Bf16ToFloat(static_cast<const uint16_t*>(epilogue.bias)[i]);
        break;
      default:
        target[i] = static_cast<const float*>(epilogue.bias)[i];
    }
  }
  return target;
}

void StoreRows(const GemmCall& call, const ExactKernels& kernels, const float* bias,
               ColumnRange columns, int64_t first_m, int64_t rows, const FinishedSums& sums) {
  const int64_t half = call.desc.n / 2;
  const int64_t size = DTypeBytes(call.desc.c_type);
  EpilogueRow row{};
  row.activation = call.desc.activation;
  row.count = columns.last - columns.first;
  row.bias = bias == nullptr ? nullptr : bias + columns.first;
  row.up_bias = (bias == nullptr || sums.up == nullptr) ? nullptr : bias + half + columns.first;
  for (int64_t i = 0; i < rows; ++i) {
    row.sums = sums.gate + i * sums.stride;
    row.up = sums.up == nullptr ? nullptr : sums.up + i * sums.stride;
    row.row_weight =
        call.epilogue.row_weight == nullptr ? nullptr : call.epilogue.row_weight + first_m + i;
    uint8_t* target =
        static_cast<uint8_t*>(call.c) + ((first_m + i) * call.c_stride + columns.first) * size;
    kernels.store_row(row, target, call.desc.c_type);
  }
}

GemmBlocking RowsBlocking(const GemmDesc& desc, int workers) {
  return {RowsPerPass(desc, ExactRowKernels(Isa::kScalar)),
          BlocksPerTask(desc, workers) * kBlockRows};
}

int64_t RowsWorkspaceBytes(const GemmDesc& desc, const RowKernels& kernels, int workers) {
  return RowsLayout(desc, kernels, workers).total_bytes;
}

void RunRows(const GemmCall& call, const RowKernels& kernels, ThreadPool& pool) {
  const GemmDesc& desc = call.desc;
  const PanelView view = static_cast<const PreparedPanels*>(call.weights)->View(call.expert);
  const ExactKernels::MultiplyBlock multiply = kernels.select(view);
  const GemmWorkspace layout = RowsLayout(desc, kernels, pool.worker_count());
  auto* workspace = static_cast<uint8_t*>(call.workspace);
  const float* bias = WidenBias(call, reinterpret_cast<float*>(workspace + layout.bias_offset));
  uint8_t* const x = workspace + layout.activations_offset;
  const int64_t x_stride = ActivationStride(desc, kernels);
  const TaskGrid grid = TaskGrid::Of(desc, BlocksPerTask(desc, pool.worker_count()));
  const int64_t a_bytes = DTypeBytes(desc.a_type);
  const int64_t sums_stride = SumsStride(desc, pool.worker_count());

  const int64_t rows_per_pass = RowsPerPass(desc, kernels);
  for (int64_t first_m = 0; first_m < desc.m; first_m += rows_per_pass) {
    const int64_t rows = std::min(rows_per_pass, desc.m - first_m);
    const auto pack = [&](int64_t i, int) {
      const auto* a = static_cast<const uint8_t*>(call.a) + (first_m + i) * call.a_stride * a_bytes;
      kernels.pack_row(*kernels.vector, a, desc.a_type, desc.k, x + i * x_stride);
    };
    // Packing one row takes less time than waking a second thread.
    if (rows == 1) {
      pack(0, 0);
    } else {
      pool.Run(rows, pack);
    }
    const RowsProduct product{view, multiply, x, x_stride, rows, sums_stride};
    pool.Run(grid.tasks, [&](int64_t task, int worker) {
      auto* scratch =
          reinterpret_cast<float*>(workspace + layout.worker_offset + worker * layout.worker_bytes);
      float* sums = scratch + ExactScratchFloats(rows);
      const ColumnRange columns = grid.Columns(task);
      const int64_t half = desc.n / 2;
      const float* gate = MultiplyColumns(product, columns, sums, scratch);
      const float* up = desc.gated
                            ? MultiplyColumns(product, {half + columns.first, half + columns.last},
                                              sums + rows * sums_stride, scratch)
                            : nullptr;
      StoreRows(call, *kernels.vector, bias, columns, first_m, rows, {gate, up, sums_stride});
    });
  }
}

}  // namespace marlin::cpu
