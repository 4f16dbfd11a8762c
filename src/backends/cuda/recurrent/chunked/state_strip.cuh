// The state of a scan over chunks, and products with it: a warp has 16 rows, in fragments.
#pragma once

#include "backends/cuda/recurrent/chunked/chunk_tiles.cuh"
#include "backends/cuda/recurrent/sequence_state.cuh"

namespace marlin::cuda {

inline constexpr int kStrips = kChunkRows / 16;      ///< Strips of 16 rows of a chunk.
inline constexpr int kScanTiles = kScanColumns / 8;  ///< Tiles of 8 columns.

/// Calls run(n, half, row, column) for the pairs of a strip's fragment: sums[n][2 half] and the
/// next one are at (row, column) and (row, column + 1).
template <int kCount, typename Run>
MARLIN_DEVICE void ForPairs(int strip, int first_column, const Run& run) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      run(n, half, strip * 16 + (lane >> 2) + 8 * half, first_column + n * 8 + 2 * (lane & 3));
    }
  }
}

MARLIN_DEVICE void StorePairTf32(float* to, float low, float high) {
  *reinterpret_cast<float2*>(to) = {RoundTf32(low), RoundTf32(high)};
}

/// A warp's 16 rows of the CTA's columns of the state.
class StateStrip {
 public:
  MARLIN_DEVICE StateStrip(const RecurrentArguments& args, int strip, int head, int slice)
      : strip_(strip),
        stride_(args.value_dim),
        at_(args.conv_elements() + int64_t{head} * args.key_dim * args.value_dim +
            slice * kScanColumns) {}

  MARLIN_DEVICE void Load(const float* state) {
    ForPairs<kScanTiles>(strip_, 0, [&](int n, int half, int row, int column) {
      float2 v = {0.0f, 0.0f};
      if (state != nullptr)
        v = *reinterpret_cast<const float2*>(state + at_ + row * stride_ + column);
      state_[n][2 * half] = v.x;
      state_[n][2 * half + 1] = v.y;
    });
  }
  MARLIN_DEVICE void Store(float* state) const {
    ForPairs<kScanTiles>(strip_, 0, [&](int n, int half, int row, int column) {
      *reinterpret_cast<float2*>(state + at_ + row * stride_ + column) = {state_[n][2 * half],
                                                                          state_[n][2 * half + 1]};
    });
  }
  /// As an operand in shared memory.
  MARLIN_DEVICE void Publish(float* operand) const {
    ForPairs<kScanTiles>(strip_, 0, [&](int n, int half, int row, int column) {
      StorePairTf32(operand + row * kScanRow + column, state_[n][2 * half],
                    state_[n][2 * half + 1]);
    });
  }
  /// state = decay * state + keys^T news
  MARLIN_DEVICE void Advance(float decay, const float* keys, int key_row, const float* news) {
#pragma unroll
    for (int n = 0; n < kScanTiles; ++n) {
#pragma unroll
      for (float& value : state_[n]) value *= decay;
    }
#pragma unroll
    for (int k = 0; k < kChunkRows; k += 8) {
      uint32_t a[4];
      LoadColumnsTf32(a, keys + k * key_row + strip_ * 16, key_row);
      MultiplyRows(state_, a, news + k * kScanRow, kScanRow);
    }
  }

 private:
  int strip_;
  int64_t stride_;
  int64_t at_;
  float state_[kScanTiles][4];
};

/// sums += rows [16, 8 steps] * operand
template <int kCount>
MARLIN_DEVICE void MultiplyStrip(float (&sums)[kCount][4], const float* rows, int row,
                                 const float* operand, int steps) {
#pragma unroll 4
  for (int k = 0; k < steps; ++k) {
    uint32_t a[4];
    LoadRowsTf32(a, rows + k * 8, row);
    MultiplyRows(sums, a, operand + k * 8 * kScanRow, kScanRow);
  }
}

}  // namespace marlin::cuda
