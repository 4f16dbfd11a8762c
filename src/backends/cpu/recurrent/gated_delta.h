// One value head of one sequence of GatedDelta, as one function per instruction set.
#pragma once

#include <cstdint>

#include "marlin/recurrent.h"

namespace marlin::cpu {

/// Scratch vectors are zero-padded to multiples of this many floats.
inline constexpr int64_t kDeltaPad = 16;

/// Consecutive channels of the convolution.
struct DeltaChannels {
  const float* rows;     ///< The first channel in row 0 of the tensor.
  int64_t stride;        ///< Elements from a row to the next.
  const float* before;   ///< The first channel in the oldest kept input; null: zeros.
  const float* weights;  ///< [count, width]
  int64_t count;
};

/// A head's column of a tensor with rows.
struct DeltaColumn {
  const float* rows;
  int64_t stride;

  const float* At(int64_t row) const { return rows + row * stride; }
};

struct DeltaHead {
  DeltaChannels queries;
  DeltaChannels keys;
  DeltaChannels values;
  int64_t width;     ///< Convolution width.
  int64_t channels;  ///< All heads' channels: from a kept input to the next.
  DeltaColumn gates;
  DeltaColumn writes;
  DeltaColumn decays;
  float log_decay;
  float decay_bias;
  const float* norm;
  float epsilon;
  const int32_t* rows;  ///< [count]: the sequence's rows that take part, count > 0.
  int64_t count;
  const float* state_before;  ///< [key_dim, value_dim]; null: zeros.
  float* state_after;         ///< May be state_before.
  uint8_t* out;               ///< The head's part of row 0.
  int64_t out_stride;         ///< In bytes.
  DType out_type;
  float* scratch;  ///< DeltaScratchFloats, aligned to 64 bytes.
};

/// Floats of DeltaHead::scratch, a multiple of 16.
int64_t DeltaScratchFloats(const GatedDeltaSizes& sizes);

/// Computes the rows one after another, so that a row has the same bits however its sequence is
/// divided into calls. Leaves the kept inputs as they are.
using DeltaKernel = void (*)(const DeltaHead& head);

namespace scalar {
void RunDeltaHead(const DeltaHead& head);
}
namespace avx2 {
void RunDeltaHead(const DeltaHead& head);
}
namespace avx512 {
void RunDeltaHead(const DeltaHead& head);
}
namespace neon {
void RunDeltaHead(const DeltaHead& head);
}

}  // namespace marlin::cpu
