// The driver of the AMX GEMM: packs activation tiles, schedules tasks over columns, epilogue.
#include <algorithm>

#include "backends/cpu/amx_kernel.h"
#include "backends/cpu/gemm_driver.h"
#include "base/checked.h"

namespace marlin::cpu {
namespace {

/// Rows of an MC block: their packed tiles of one KC block (256 KiB) stay in L2 beside the
/// accumulators of a task.
constexpr int64_t kRowsPerPass = 512;
/// Maximum 16-column blocks per task: 32 blocks x 512 rows of fp32 accumulators are 1 MiB of L2.
constexpr int64_t kMaxBlocksPerTask = 32;

/// Small M: four long runs per worker, as in the exact driver. Large M: as many blocks as fit,
/// because every task reads all activations, evened out over the fewest waves of tasks that keep
/// all workers busy.
int64_t BlocksPerTask(const GemmDesc& desc, int workers) {
  const int64_t columns = desc.gated ? desc.n / 2 : desc.n;
  const int64_t limit = desc.gated ? kMaxBlocksPerTask / 2 : kMaxBlocksPerTask;
  const int64_t blocks = std::max<int64_t>(CeilDivide(columns, kBlockRows), 1);
  const int64_t wanted = desc.m > 2 * amx::kTileM
                             ? limit
                             : std::clamp<int64_t>(CeilDivide(blocks, 4 * workers), 1, limit);
  const int64_t rounds = CeilDivide(blocks, wanted * workers);
  return RoundUp(CeilDivide(blocks, rounds * workers), 2);
}

}  // namespace

GemmBlocking AmxBlocking(const GemmDesc& desc, int workers) {
  return {kRowsPerPass, BlocksPerTask(desc, workers) * kBlockRows};
}

#if defined(__x86_64__)
namespace {

struct AmxLayout {
  GemmWorkspace base;
  int64_t tile_bytes = 0;  ///< All activation tiles of an MC block: one bf16 term, high or low.
  int64_t sums_bytes = 0;
  int64_t blocks_per_task = 0;
  int64_t strips = 0;  ///< Maximum strips (pairs of blocks) per task.
};

AmxLayout LayoutOf(const GemmDesc& desc, int workers) {
  AmxLayout layout;
  const int64_t m_tiles = CeilDivide(std::min(desc.m, kRowsPerPass), amx::kTileM);
  const int64_t padded_k = RoundUp(desc.k, amx::kMaxPanelK);
  layout.blocks_per_task = BlocksPerTask(desc, workers);
  // GLU: each half of a task may start inside one block and end inside another.
  const int64_t blocks = (layout.blocks_per_task + 1) * (desc.gated ? 2 : 1);
  layout.strips = CeilDivide(blocks, 2);
  layout.tile_bytes = m_tiles * amx::kTileM * padded_k * 2;
  layout.sums_bytes = layout.strips * m_tiles * 2 * amx::kTileBytes;
  const int64_t rows_bytes = amx::kTileM * layout.strips * 2 * kBlockRows * 4;
  layout.base.activations_offset = RoundUp(desc.n * 4, kBufferAlignment);
  layout.base.worker_offset =
      layout.base.activations_offset + layout.tile_bytes * (NeedsTwoTerms(desc) ? 2 : 1);
  layout.base.worker_bytes = amx::kScratchBytes + layout.sums_bytes + rows_bytes;
  layout.base.total_bytes = layout.base.worker_offset + workers * layout.base.worker_bytes;
  return layout;
}

/// The panel blocks of a task's columns: those of the gate half, then those of the up half. An odd
/// count is padded by repeating the last one.
struct TaskBlocks {
  int64_t blocks[2 * (kMaxBlocksPerTask + 2)];
  int64_t count = 0;
  int64_t up_first = 0;  ///< Index of the first block of the up half.

  void AddCovering(int64_t first_column, int64_t last_column) {
    const int64_t end = CeilDivide(last_column, kBlockRows);
    for (int64_t b = first_column / kBlockRows; b < end; ++b) blocks[count++] = b;
  }
  static TaskBlocks Of(const GemmDesc& desc, ColumnRange columns) {
    TaskBlocks task;
    task.AddCovering(columns.first, columns.last);
    task.up_first = task.count;
    if (desc.gated) task.AddCovering(desc.n / 2 + columns.first, desc.n / 2 + columns.last);
    if (task.count % 2 != 0) {
      task.blocks[task.count] = task.blocks[task.count - 1];
      ++task.count;
    }
    return task;
  }
};

/// State shared by the tasks of one MC block.
struct AmxPass {
  const GemmCall& call;
  const AmxLayout& layout;
  const PanelView& view;
  const float* bias;
  amx::ActivationTiles activations;
  int64_t first_m;
  int64_t rows;
};

void StoreTask(const AmxPass& pass, const TaskBlocks& blocks, ColumnRange columns,
               const float* sums, float* rows) {
  const int64_t stride = blocks.count * kBlockRows;
  const int64_t half = pass.call.desc.n / 2;
  const int64_t m_tiles = pass.activations.m_tiles;
  for (int64_t tile = 0; tile < m_tiles; ++tile) {
    for (int64_t b = 0; b < blocks.count; ++b) {
      const float* source = sums + ((b / 2 * m_tiles + tile) * 2 + b % 2) * 256;
      amx::TransposeTile(source, rows + b * kBlockRows, stride);
    }
    const int64_t first = tile * amx::kTileM;
    const float* gate = rows + columns.first % kBlockRows;
    const float* up = pass.call.desc.gated ? rows + blocks.up_first * kBlockRows +
                                                 (half + columns.first) % kBlockRows
                                           : nullptr;
    StoreRows(pass.call, ExactKernelsOf(Isa::kAmx), pass.bias, columns, pass.first_m + first,
              std::min(amx::kTileM, pass.rows - first), {gate, up, stride});
  }
}

void RunTask(const AmxPass& pass, ColumnRange columns, uint8_t* worker_memory) {
  const TaskBlocks blocks = TaskBlocks::Of(pass.call.desc, columns);
  auto* sums = reinterpret_cast<float*>(worker_memory + amx::kScratchBytes);
  auto* rows =
      reinterpret_cast<float*>(worker_memory + amx::kScratchBytes + pass.layout.sums_bytes);
  if (pass.view.chunks == 0) {
    std::fill(sums, sums + pass.layout.sums_bytes / 4, 0.0f);
  } else {
    amx::MultiplyStrips(
        {&pass.view, blocks.blocks, blocks.count / 2, pass.activations, sums, worker_memory});
  }
  StoreTask(pass, blocks, columns, sums, rows);
}

}  // namespace

int64_t AmxWorkspaceBytes(const GemmDesc& desc, int workers) {
  return LayoutOf(desc, workers).base.total_bytes;
}

void RunAmx(const GemmCall& call, ThreadPool& pool) {
  const GemmDesc& desc = call.desc;
  const PanelView view = static_cast<const PreparedPanels*>(call.weights)->View(call.expert);
  const AmxLayout layout = LayoutOf(desc, pool.worker_count());
  auto* workspace = static_cast<uint8_t*>(call.workspace);
  const float* bias =
      WidenBias(call, reinterpret_cast<float*>(workspace + layout.base.bias_offset));
  auto* high = reinterpret_cast<uint16_t*>(workspace + layout.base.activations_offset);
  uint16_t* low = NeedsTwoTerms(desc) ? high + layout.tile_bytes / 2 : nullptr;
  const TaskGrid grid = TaskGrid::Of(desc, layout.blocks_per_task);

  for (int64_t first_m = 0; first_m < desc.m; first_m += kRowsPerPass) {
    const int64_t rows = std::min(kRowsPerPass, desc.m - first_m);
    const int64_t m_tiles = CeilDivide(rows, amx::kTileM);
    pool.Run(m_tiles, [&](int64_t tile, int) {
      const int64_t row = first_m + tile * amx::kTileM;
      const auto* a =
          static_cast<const uint8_t*>(call.a) + row * call.a_stride * DTypeBytes(desc.a_type);
      const amx::TileSource source{a, desc.a_type, call.a_stride,
                                   std::min(amx::kTileM, desc.m - row), desc.k};
      amx::PackTiles(source, tile, m_tiles, high, low);
    });
    const AmxPass pass{call, layout, view, bias, {high, low, m_tiles}, first_m, rows};
    pool.Run(grid.tasks, [&](int64_t task, int worker) {
      RunTask(pass, grid.Columns(task),
              workspace + layout.base.worker_offset + worker * layout.base.worker_bytes);
    });
  }
}
#else
// Never planned: this architecture has no AMX level.
int64_t AmxWorkspaceBytes(const GemmDesc& /*desc*/, int /*workers*/) { return 0; }
void RunAmx(const GemmCall& /*call*/, ThreadPool& /*pool*/) {}
#endif

}  // namespace marlin::cpu
