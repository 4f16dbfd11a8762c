// Kernels of recurrent operations: the work of one task, as one function per instruction set. They
// compute rows one after another, so that a row has the same bits however its sequence is divided
// into calls.
#pragma once

#include <cstdint>

#include "marlin/recurrent.h"

namespace marlin::cpu {

/// Scratch vectors are zero-padded to multiples of this many floats.
inline constexpr int64_t kRecurrentPad = 16;

/// The sequence's rows that take part, and the convolution of all of its channels.
struct ConvRows {
  const int32_t* rows;  ///< [count]
  int64_t count;
  int64_t width;
  int64_t channels;  ///< From a kept input to the next.
};

/// Consecutive channels of a causal convolution.
struct ConvChannels {
  const float* rows;     ///< The first channel in row 0 of the tensor.
  int64_t stride;        ///< Elements from a row to the next.
  const float* before;   ///< The first channel in the oldest kept input; null: zeros.
  const float* weights;  ///< [count, width]
  const float* bias;     ///< [count], or null.
  int64_t count;
};

/// Columns of a tensor with rows.
struct RowColumn {
  const float* rows;
  int64_t stride;

  const float* At(int64_t row) const { return rows + row * stride; }
};

/// Where a task's columns of the results go.
struct MixedColumn {
  uint8_t* rows;   ///< The task's part of row 0.
  int64_t stride;  ///< In bytes.
  DType type;

  void* At(int64_t row) const { return rows + row * stride; }
};

/// A value head of a sequence of GatedDelta. The kernel leaves the kept inputs as they are, and so
/// does the kernel of Mamba2Head.
struct DeltaHead {
  ConvRows conv;  ///< count > 0.
  ConvChannels queries;
  ConvChannels keys;
  ConvChannels values;
  RowColumn gates;
  RowColumn writes;
  RowColumn decays;
  float log_decay;
  float decay_bias;
  const float* norm;
  float epsilon;
  const float* state_before;  ///< [key_dim, value_dim]; null: zeros.
  float* state_after;         ///< May be state_before.
  MixedColumn out;
  float* scratch;  ///< DeltaScratchFloats, aligned to 64 bytes.
};

/// Floats of DeltaHead::scratch, a multiple of 16.
int64_t DeltaScratchFloats(const GatedDeltaSizes& sizes);

/// A head of a sequence of Mamba2.
struct Mamba2Head {
  ConvRows conv;  ///< count > 0.
  ConvChannels values;
  ConvChannels keys;
  ConvChannels queries;
  RowColumn gates;  ///< Null: the gate comes after the norm.
  RowColumn steps;
  float log_decay;
  float step_bias;
  float skip;
  float min_step;
  float max_step;
  const float* state_before;  ///< [state_size, head_dim]; null: zeros.
  float* state_after;         ///< May be state_before.
  MixedColumn out;
  float* scratch;  ///< Mamba2ScratchFloats, aligned to 64 bytes.
};

/// The norm of a group of Mamba2, of the rows of a sequence.
struct Mamba2Norm {
  const int32_t* rows;  ///< [count]
  int64_t count;
  int64_t heads;
  int64_t head_dim;
  RowColumn mixed;     ///< May be `out`.
  int64_t mixed_head;  ///< Elements from a head to the next.
  RowColumn gates;     ///< Null: the gate came before the norm.
  int64_t gate_head;   ///< As mixed_head.
  const float* norm;   ///< [heads, head_dim]
  float epsilon;
  MixedColumn out;
  int64_t out_head;  ///< Bytes from a head to the next.
  float* scratch;    ///< Mamba2ScratchFloats, aligned to 64 bytes.
};

/// Floats of scratch for a head and a norm, a multiple of 16.
int64_t Mamba2ScratchFloats(const Mamba2Sizes& sizes);

/// Some channels of a sequence of ShortConvolution. The kernel replaces the kept inputs.
struct ShortConvolutionBlock {
  ConvRows conv;
  RowColumn values;
  RowColumn in_gates;
  RowColumn out_gates;
  const float* weights;  ///< [features, width]
  const float* bias;     ///< [features], or null.
  int64_t features;
  const float* before;  ///< The oldest kept input; null: zeros.
  float* after;         ///< May be `before`.
  MixedColumn out;
  float* scratch;  ///< ShortConvolutionScratchFloats, aligned to 64 bytes.
};

/// Channels of a block, a multiple of 16, and rows whose inputs its scratch holds at once.
inline constexpr int64_t kShortConvolutionChannels = 256;
inline constexpr int64_t kShortConvolutionRows = 32;
/// Floats of ShortConvolutionBlock::scratch, a multiple of 16.
int64_t ShortConvolutionScratchFloats(int64_t width);

/// The kernels of a level.
struct RecurrentKernels {
  void (*delta_head)(const DeltaHead& head);
  void (*mamba2_head)(const Mamba2Head& head);
  void (*mamba2_norm)(const Mamba2Norm& norm);
  void (*short_convolution)(const ShortConvolutionBlock& block);
};

#define MARLIN_RECURRENT_KERNELS(level)                         \
  namespace level {                                             \
  void RunDeltaHead(const DeltaHead& head);                     \
  void RunMamba2Head(const Mamba2Head& head);                   \
  void RunMamba2Norm(const Mamba2Norm& norm);                   \
  void RunShortConvolution(const ShortConvolutionBlock& block); \
  }
MARLIN_RECURRENT_KERNELS(scalar)
MARLIN_RECURRENT_KERNELS(avx2)
MARLIN_RECURRENT_KERNELS(avx512)
MARLIN_RECURRENT_KERNELS(neon)
#undef MARLIN_RECURRENT_KERNELS

}  // namespace marlin::cpu
