// A state in the registers of a CTA: a warp has 16 columns, a lane 4 of them in an eighth of the
// rows.
#pragma once

#include "backends/cuda/recurrent/recurrent_layout.h"

namespace marlin::cuda {

inline constexpr int kColumnLanes = 4;  ///< Lanes with the columns of a warp, of 4 each.
inline constexpr int kRowLanes = 32 / kColumnLanes;
inline constexpr int kMostThreads = kSliceColumns / kWarpColumns * 32;

/// A lane's part of the state: kRows adjacent rows of 4 adjacent columns.
template <int kRows, bool kVector>
class LaneState {
 public:
  /// Columns [first, first + columns) of the value head are the CTA's.
  MARLIN_DEVICE LaneState(const RecurrentArguments& args, int head, int first, int columns)
      : lane_(static_cast<int>(threadIdx.x) & 31),
        column_((static_cast<int>(threadIdx.x) >> 5) * kWarpColumns + lane_ % kColumnLanes * 4),
        first_row_(lane_ / kColumnLanes * kRows),
        columns_(columns),
        key_dim_(args.key_dim),
        value_dim_(args.value_dim),
        at_(args.conv_elements() + int64_t{head} * args.key_dim * args.value_dim + first +
            column_) {}

  MARLIN_DEVICE void Load(const float* state) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
      if (state != nullptr && first_row_ + r < key_dim_) {
        const float* const from = state + at_ + int64_t{first_row_ + r} * value_dim_;
        if constexpr (kVector) {
          if (column_ < columns_) v = *reinterpret_cast<const float4*>(from);
        } else {
          if (column_ < columns_) v.x = from[0];
          if (column_ + 1 < columns_) v.y = from[1];
          if (column_ + 2 < columns_) v.z = from[2];
          if (column_ + 3 < columns_) v.w = from[3];
        }
      }
      state_[r][0] = v.x;
      state_[r][1] = v.y;
      state_[r][2] = v.z;
      state_[r][3] = v.w;
    }
  }

  MARLIN_DEVICE void Store(float* state) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first_row_ + r >= key_dim_) continue;
      float* const to = state + at_ + int64_t{first_row_ + r} * value_dim_;
      if constexpr (kVector) {
        if (column_ >= columns_) continue;
        *reinterpret_cast<float4*>(to) = {state_[r][0], state_[r][1], state_[r][2], state_[r][3]};
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (column_ + c < columns_) to[c] = state_[r][c];
        }
      }
    }
  }

 protected:
  /// Loads the elements of a lane's rows from a row of queries or keys.
  MARLIN_DEVICE void LoadRows(const float* row, float (&rows)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; r += 4) {
      const float4 v = *reinterpret_cast<const float4*>(row + first_row_ + r);
      rows[r] = v.x;
      rows[r + 1] = v.y;
      rows[r + 2] = v.z;
      rows[r + 3] = v.w;
    }
  }

  const int lane_;
  const int column_;  ///< The lane's first column of the slice.
  const int first_row_;
  const int columns_;
  const int key_dim_;
  const int value_dim_;
  const int64_t at_;
  float state_[kRows][4];
};

/// Rows of the state of a lane; its instances' range.
inline int LaneRows(int key_dim) {
  int rows = 4;
  while (rows * kRowLanes < key_dim) rows *= 2;
  return rows;
}

}  // namespace marlin::cuda
