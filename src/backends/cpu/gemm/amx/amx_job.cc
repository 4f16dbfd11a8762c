// The job of the AMX GEMM: packs activation tiles, multiplies columns, runs the epilogue.
#include <algorithm>

#include "backends/cpu/gemm/amx/amx_kernel.h"
#include "backends/cpu/gemm/gemm_driver.h"
#include "backends/cpu/gemm/gemm_job.h"
#include "base/checked.h"

namespace marlin::cpu {
namespace {

/// Rows of an MC block: their packed tiles of one KC block (256 KiB) stay in L2 with the
/// accumulators of a task.
constexpr int64_t kRowsPerPass = 512;
/// Maximum 16-column blocks per task: 32 blocks x 512 rows of fp32 accumulators are 1 MiB of L2.
constexpr int64_t kMaxBlocksPerTask = 32;

/// Small M: four long runs per worker, as in the exact driver. Large M: as many blocks as fit,
/// because every task reads all activations, evened out over the fewest waves of tasks that keep
/// all workers busy.
int64_t AmxBlocksPerTask(const GemmDesc& desc, int workers) {
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
  return {kRowsPerPass, AmxBlocksPerTask(desc, workers) * kBlockRows};
}

#if defined(__x86_64__)
namespace {

/// The panel blocks of a task's columns: of the gate half, then of the up half. An odd
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

int64_t TileCount(const GemmDesc& desc) { return CeilDivide(desc.m, amx::kTileM); }

/// Bytes of all activation tiles in one bf16 term, high or low.
int64_t TermBytes(const GemmDesc& desc) {
  return TileCount(desc) * amx::kTileM * RoundUp(desc.k, amx::kMaxPanelK) * 2;
}

/// The maximum of strips (pairs of blocks) per task. GLU: each half of a task may start inside one
/// block and end inside another.
int64_t MaxStrips(const GemmDesc& desc, int workers) {
  const int64_t blocks = (AmxBlocksPerTask(desc, workers) + 1) * (desc.gated ? 2 : 1);
  return CeilDivide(blocks, 2);
}

int64_t SumsBytes(const GemmDesc& desc, int workers) {
  return MaxStrips(desc, workers) * TileCount(desc) * 2 * amx::kTileBytes;
}

/// Runs the epilogue on the C tiles of a task; `rows` is scratch for the rows of one m tile.
void StoreTiles(const GemmCall& call, const float* bias, const TaskBlocks& blocks,
                ColumnRange columns, const float* sums, float* rows) {
  const int64_t stride = blocks.count * kBlockRows;
  const int64_t half = call.desc.n / 2;
  const int64_t m_tiles = TileCount(call.desc);
  for (int64_t tile = 0; tile < m_tiles; ++tile) {
    for (int64_t b = 0; b < blocks.count; ++b) {
      const float* source = sums + ((b / 2 * m_tiles + tile) * 2 + b % 2) * 256;
      amx::TransposeTile(source, rows + b * kBlockRows, stride);
    }
    const int64_t first = tile * amx::kTileM;
    const float* gate = rows + columns.first % kBlockRows;
    const float* up =
        call.desc.gated ? rows + blocks.up_first * kBlockRows + (half + columns.first) % kBlockRows
                        : nullptr;
    const int64_t count = std::min(amx::kTileM, call.desc.m - first);
    StoreRows(RowsOf(call, first, count), ExactKernelsOf(Isa::kAmx), bias, columns,
              {gate, up, stride});
  }
}

}  // namespace

JobBytes AmxJob::Bytes(const GemmDesc& desc, int workers) {
  const int64_t rows_bytes = amx::kTileM * MaxStrips(desc, workers) * 2 * kBlockRows * 4;
  return {RoundUp(desc.n * 4, kBufferAlignment) + TermBytes(desc) * (NeedsTwoTerms(desc) ? 2 : 1),
          amx::kScratchBytes + SumsBytes(desc, workers) + rows_bytes};
}

int64_t AmxJob::MaxRows() { return kRowsPerPass; }

AmxJob::AmxJob(const GemmCall& call, int workers, std::byte* memory, const JobRows& rows)
    : call_(call),
      rows_(rows),
      weights_(static_cast<const PreparedPanels*>(call.weights)->View(call.expert)),
      bias_(WidenBias(call, reinterpret_cast<float*>(memory))),
      high_(reinterpret_cast<uint16_t*>(memory + RoundUp(call.desc.n * 4, kBufferAlignment))),
      low_(NeedsTwoTerms(call.desc) ? high_ + TermBytes(call.desc) / 2 : nullptr),
      sums_bytes_(SumsBytes(call.desc, workers)),
      grid_(TaskGrid::Of(call.desc, AmxBlocksPerTask(call.desc, workers))) {}

int64_t AmxJob::pack_tasks() const { return TileCount(call_.desc); }

void AmxJob::Pack(int64_t task) const {
  const GemmDesc& desc = call_.desc;
  const int64_t first = task * amx::kTileM;
  amx::TileSource source{call_.a, desc.a_type, call_.a_stride,
                         std::min(amx::kTileM, desc.m - first), desc.k};
  if (rows_.gather != nullptr) {
    source.gather = rows_.gather + first;
  } else {
    source.a =
        static_cast<const uint8_t*>(call_.a) + first * call_.a_stride * DTypeBytes(desc.a_type);
  }
  amx::PackTiles(source, task, pack_tasks(), high_, low_);
}

void AmxJob::Run(int64_t task, std::byte* scratch) const {
  const ColumnRange columns = grid_.Columns(task);
  const TaskBlocks blocks = TaskBlocks::Of(call_.desc, columns);
  auto* const sums = reinterpret_cast<float*>(scratch + amx::kScratchBytes);
  auto* const rows = reinterpret_cast<float*>(scratch + amx::kScratchBytes + sums_bytes_);
  if (weights_.chunks == 0) {
    std::fill(sums, sums + sums_bytes_ / 4, 0.0f);
  } else {
    const amx::ActivationTiles activations{high_, low_, pack_tasks()};
    amx::MultiplyStrips({&weights_, blocks.blocks, blocks.count / 2, activations, sums, scratch});
  }
  StoreTiles(call_, bias_, blocks, columns, sums, rows);
}
#else
// Never planned: this architecture has no AMX level.
JobBytes AmxJob::Bytes(const GemmDesc& /*desc*/, int /*workers*/) { return {}; }
int64_t AmxJob::MaxRows() { return kRowsPerPass; }
AmxJob::AmxJob(const GemmCall& call, int /*workers*/, std::byte* /*memory*/,
               const JobRows& /*rows*/)
    : call_(call) {}
int64_t AmxJob::pack_tasks() const { return 0; }
void AmxJob::Pack(int64_t /*task*/) const {}
void AmxJob::Run(int64_t /*task*/, std::byte* /*scratch*/) const {}
#endif

}  // namespace marlin::cpu
