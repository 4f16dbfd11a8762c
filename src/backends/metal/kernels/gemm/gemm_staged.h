// GemmStaged: GEMM with tiles of 64 rows x 64 outputs x 32 k, staged in threadgroup memory as
// activations of type T and dequantized weights; single- or double-buffered.
//
//   out[m, n] = epilogue(sum over k of A[m, k] * W[k, n])
//
//   two buffers:  fetch 1 | multiply 0 | put 1 | barrier | fetch 2 | multiply 1 | put 0 | barrier
//   one buffer:   fetch | put | barrier | multiply | barrier
//   simdgroup s accumulates 32x32 from row 32 (s / 2) and output 32 (s % 2) on: 4x4 fragments.
//
// A work unit is one split of k of one tile. Threadgroup g takes units [g, g + 1) * units_of_group,
// ordered by tile, then split (several per threadgroup: stream-K). Tiles of the same outputs are
// consecutive, for locality of the weights. Consecutive splits of one tile accumulate in registers
// and are stored as the first of them: marlin_zero_reduction clears the others, marlin_finish adds
// all of them in order.
// Threadgroup memory: 13,824 bytes per buffer for 16-bit activations, 16,384 for fp32, at least
// 16,384 in all. Barriers: one per 32 k with two buffers, two with one; three per unit. Error
// model: weights rounded to fp32 (3 * 2^-24), fp32 sums; k + splits additions.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_GEMM_GEMM_STAGED_H_
#define MARLIN_BACKENDS_METAL_KERNELS_GEMM_GEMM_STAGED_H_

#include "backends/metal/kernels/activations.h"
#include "backends/metal/kernels/decode.h"
#include "backends/metal/kernels/epilogue.h"
#include "backends/metal/kernels/fragments.h"

namespace marlin {
namespace kernels {

constant constexpr int kTile = 64;  // Rows and outputs.
constant constexpr int kStagedThreads = 128;
constant constexpr int kFragments = 4;  // Per simdgroup, along m and along n.
constant constexpr int kTileStrips = kTile / kStripOutputs;
constant constexpr int kStripsOfThread = kTileStrips * kLanes / kStagedThreads;
constant constexpr int kQuadsOfRow = kBlockK / 4;
constant constexpr int kQuadsOfThread = kTile * kQuadsOfRow / kStagedThreads;
constant constexpr int kBlocksOfChunk = kChunkK / kBlockK;

static_assert(2 * kFragments * kSide == kTile, "2 x 2 simdgroups cover the tile");

/// Layout of a buffer in threadgroup memory. Padding avoids bank conflicts between the rows of a
/// fragment; with fp32 activations two buffers leave no room for it.
template <typename T>
struct TileLayout {
  static constexpr constant int kInputStride = sizeof(T) == 2 ? kBlockK + 8 : kBlockK;
  static constexpr constant int kWeightStride = sizeof(T) == 2 ? kTile + 4 : kTile;
  static constexpr constant int kInputBytes = kTile * kInputStride * int(sizeof(T));
  static constexpr constant int kBytes = kInputBytes + kBlockK * kWeightStride * 4;
};

/// Threadgroup memory in float4: the buffers, which the epilogue reuses for a tile of accumulators.
template <typename T, int kBuffers>
struct StagedQuads {
  static constexpr constant int kBufferBytes = kBuffers * TileLayout<T>::kBytes;
  static constexpr constant int kOutputBytes = kTile * kTile * 4;
  static constexpr constant int kCount =
      (kBufferBytes > kOutputBytes ? kBufferBytes : kOutputBytes) / 16;
};

/// Coordinates of a tile: its first row and strip, and the last strip of the GEMM.
struct TilePlace {
  int row;
  int strip;
  int last_strip;
};

/// A thread's prefetched registers: 4 quads of A, and the codes of 2 strips for a whole chunk.
struct Fetched {
  float4 input[kQuadsOfThread];
  ChunkCodes codes[kStripsOfThread];
};

/// The input operands.
struct Operands {
  PackedWeights weights;
  Input input;
};

static inline Strip StripOfThread(Operands from, TilePlace place, int i, ushort simdgroup,
                                  Parameters p) {
  // Strips beyond the last one repeat it; their accumulators are not stored.
  const int strip = metal::min(place.strip + simdgroup + 4 * i, place.last_strip);
  return StripAt(strip, from.weights, p);
}

/// Loads A of step `step` (32 k) into registers; the first step of a chunk loads the chunk's codes.
static inline void Fetch(thread Fetched& fetched, Operands from, TilePlace place, int step,
                         ushort thread_index, Parameters p) {
  MARLIN_UNROLL
  for (int i = 0; i < kQuadsOfThread; ++i) {
    const int quad = thread_index + i * kStagedThreads;
    fetched.input[i] = LoadInput(from.input, place.row + quad / kQuadsOfRow,
                                 step * kBlockK + quad % kQuadsOfRow * 4, p);
  }
  if (step % kBlocksOfChunk != 0) return;
  MARLIN_UNROLL
  for (int i = 0; i < kStripsOfThread; ++i) {
    const Strip strip = StripOfThread(from, place, i, thread_index / kLanes, p);
    fetched.codes[i] = LoadCodes(strip, step / kBlocksOfChunk, thread_index % kLanes);
  }
}

/// Stores fetched activations and dequantized weights into a threadgroup buffer.
template <typename T>
static inline void Put(threadgroup float4* buffer, thread Fetched& fetched, Operands from,
                       TilePlace place, int step, ushort thread_index, Parameters p) {
  threadgroup T* input = (threadgroup T*)buffer;
  threadgroup float* weights = (threadgroup float*)buffer + TileLayout<T>::kInputBytes / 4;
  MARLIN_UNROLL
  for (int i = 0; i < kQuadsOfThread; ++i) {
    const int quad = thread_index + i * kStagedThreads;
    threadgroup T* to =
        input + quad / kQuadsOfRow * TileLayout<T>::kInputStride + quad % kQuadsOfRow * 4;
    MARLIN_UNROLL
    for (int e = 0; e < 4; ++e) to[e] = T(fetched.input[i][e]);
  }
  const ushort simdgroup = thread_index / kLanes;
  const ushort lane = thread_index % kLanes;
  const int chunk = step / kBlocksOfChunk;
  MARLIN_UNROLL
  for (int i = 0; i < kStripsOfThread; ++i) {
    const Strip strip = StripOfThread(from, place, i, simdgroup, p);
    const BlockWeights w = DecodeBlock(strip, fetched.codes[i], LoadChunkGroup(strip, chunk, lane),
                                       chunk, step % kBlocksOfChunk, lane);
    threadgroup float* to = weights + 4 * FragmentRow(lane) * TileLayout<T>::kWeightStride +
                            (simdgroup + 4 * i) * kStripOutputs + FragmentColumn(lane);
    MARLIN_UNROLL
    for (int j = 0; j < 4; ++j) {
      to[j * TileLayout<T>::kWeightStride] = w.pair[j].x;
      to[j * TileLayout<T>::kWeightStride + 1] = w.pair[j].y;
    }
  }
}

/// The accumulators of a simdgroup: 32 rows x 32 outputs.
struct Sums {
  simdgroup_float8x8 fragment[kFragments][kFragments];
};

static inline void Clear(thread Sums& sums) {
  MARLIN_UNROLL
  for (int i = 0; i < kFragments; ++i) {
    MARLIN_UNROLL
    for (int j = 0; j < kFragments; ++j) {
      sums.fragment[i][j] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
}

/// Multiply-accumulates the tiles in a buffer.
template <typename T>
static inline void Multiply(thread Sums& sums, threadgroup float4* buffer, ushort simdgroup) {
  const threadgroup T* input =
      (threadgroup T*)buffer + simdgroup / 2 * kFragments * kSide * TileLayout<T>::kInputStride;
  const threadgroup float* weights = (threadgroup float*)buffer + TileLayout<T>::kInputBytes / 4 +
                                     simdgroup % 2 * kFragments * kSide;
  MARLIN_UNROLL
  for (int k = 0; k < kBlockK; k += kSide) {
    simdgroup_float8x8 a[kFragments];
    MARLIN_UNROLL
    for (int i = 0; i < kFragments; ++i) {
      metal::simdgroup_matrix<T, 8, 8> stored;
      metal::simdgroup_load(stored, input + i * kSide * TileLayout<T>::kInputStride + k,
                            TileLayout<T>::kInputStride);
      a[i] = FragmentOf(ElementsOf(stored));
    }
    MARLIN_UNROLL
    for (int j = 0; j < kFragments; ++j) {
      simdgroup_float8x8 b;
      metal::simdgroup_load(b, weights + k * TileLayout<T>::kWeightStride + j * kSide,
                            TileLayout<T>::kWeightStride);
      MARLIN_UNROLL
      for (int i = 0; i < kFragments; ++i) {
        metal::simdgroup_multiply_accumulate(sums.fragment[i][j], a[i], b, sums.fragment[i][j]);
      }
    }
  }
}

/// Main loop over steps [step, end) of a tile. The buffers are free before and after.
template <typename T, int kBuffers>
static inline void AddSteps(thread Sums& sums, threadgroup float4* buffers, Operands from,
                            TilePlace place, int step, int end, ushort thread_index, Parameters p) {
  constexpr int kBufferQuads = TileLayout<T>::kBytes / 16;
  const ushort simdgroup = thread_index / kLanes;
  Fetched fetched;
  if (kBuffers == 1) {
    for (; step < end; ++step) {
      Fetch(fetched, from, place, step, thread_index, p);
      Put<T>(buffers, fetched, from, place, step, thread_index, p);
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      Multiply<T>(sums, buffers, simdgroup);
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
    return;
  }
  if (step >= end) return;
  Fetch(fetched, from, place, step, thread_index, p);
  Put<T>(buffers, fetched, from, place, step, thread_index, p);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int buffer = 0; step < end; ++step, buffer = 1 - buffer) {
    const bool more = step + 1 < end;
    if (more) Fetch(fetched, from, place, step + 1, thread_index, p);
    Multiply<T>(sums, buffers + buffer * kBufferQuads, simdgroup);
    if (more) {
      Put<T>(buffers + (1 - buffer) * kBufferQuads, fetched, from, place, step + 1, thread_index,
             p);
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
}

/// Stores a tile's accumulators through the buffers, which must be free and are free afterwards.
static inline void StoreTile(thread Sums& sums, threadgroup float4* buffers, Output output,
                             TilePlace place, int split, ushort thread_index, Parameters p) {
  threadgroup float* tile = (threadgroup float*)buffers;
  const ushort simdgroup = thread_index / kLanes;
  threadgroup float* corner =
      tile + simdgroup / 2 * kFragments * kSide * kTile + simdgroup % 2 * kFragments * kSide;
  MARLIN_UNROLL
  for (int i = 0; i < kFragments; ++i) {
    MARLIN_UNROLL
    for (int j = 0; j < kFragments; ++j) {
      metal::simdgroup_store(sums.fragment[i][j], corner + i * kSide * kTile + j * kSide, kTile);
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int i = thread_index; i < kTile * kTile; i += kStagedThreads) {
    StoreSum(output, split, place.row + i / kTile, place.strip * kStripOutputs + i % kTile, tile[i],
             p);
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

template <typename T, int kBuffers>
static METAL_FUNC void GemmStaged(Operands from, Output output, threadgroup float4* buffers,
                                  uint group, ushort thread_index, Parameters p) {
  const int row_tiles = (p.m + kTile - 1) / kTile;
  const int steps = p.chunks * kBlocksOfChunk;
  const int last_unit = metal::min(int(group + 1) * p.units_of_group, p.units);
  int unit = int(group) * p.units_of_group;
  while (unit < last_unit) {
    const int tile = unit / p.splits;
    const int split = unit % p.splits;
    const int end_split = metal::min(p.splits, split + last_unit - unit);
    const TilePlace place = {tile % row_tiles * kTile, tile / row_tiles * kTileStrips,
                             (p.n - 1) / kStripOutputs};
    Sums sums;
    Clear(sums);
    AddSteps<T, kBuffers>(sums, buffers, from, place, split * p.steps_of_split,
                          metal::min(end_split * p.steps_of_split, steps), thread_index, p);
    StoreTile(sums, buffers, output, place, split, thread_index, p);
    unit += end_split - split;
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_GEMM_GEMM_STAGED_H_
