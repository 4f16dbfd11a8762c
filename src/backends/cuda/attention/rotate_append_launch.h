// The launches of the kernels of RotateAndAppend.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/layout/value_record.h"

namespace marlin::cuda {

/// Features of a head that a warp holds, at most.
inline constexpr int kMostRotateFeatures = 512;
/// From this many rows on, rows have CTAs of their own.
inline constexpr int kManyRotateRows = 256;

/// The heads of a step's rows before attention; norms are null where there are none.
struct RotateAppendArguments {
  RowsView queries;  ///< [rows, heads] rows.
  RowsView keys;     ///< [rows, kv_heads] rows, as the values.
  RowsView values;
  int heads = 0;
  const void* query_norm = nullptr;
  const void* key_norm = nullptr;
  Element query_norm_type = Element::kF32;
  Element key_norm_type = Element::kF32;
  float epsilon = 0;
  RotaryView rotary;
  SequencesView sequences;
  PagesView pages;
  bool slabs_are_aligned = false;  ///< To 16 bytes.
  ErrorView errors;

  MARLIN_HOST_DEVICE int AllHeads() const { return heads + 2 * pages.kv_heads; }
};

/// Whether heads may be loaded and stored as vectors: in fp32, at multiples of 16 bytes.
bool HasVectorHeads(const RotateAppendArguments& args);

/// Each Load prepares the kernels of the launch below it.
cudaError_t LoadRotateAppend();
/// A warp has a head at a time. Precondition: key_dim is at most kMostRotateFeatures.
cudaError_t LaunchRotateAppend(const RotateAppendArguments& args, cudaStream_t stream);

/// A CTA has a row. The same bits; for heads that it takes alone.
cudaError_t LoadRotateRows();
bool TakesRotateRows(const RotateAppendArguments& args);
cudaError_t LaunchRotateRows(const RotateAppendArguments& args, cudaStream_t stream);

}  // namespace marlin::cuda
