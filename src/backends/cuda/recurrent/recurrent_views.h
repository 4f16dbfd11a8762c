// The arguments of recurrent calls as kernels take them.
#pragma once

#include <cstdint>

#include "backends/cuda/decoder/views.h"
#include "backends/cuda/recurrent/recurrent_layout.h"
#include "marlin/recurrent.h"

namespace marlin::cuda {

/// The states as a cache of pages of one token, for PagesOf.
PagedCache CacheOf(const RecurrentStates& states);

/// Whether quads of the features of a state's rows, which have `value_dim` each, can be loaded at
/// once.
bool HasQuads(const PagedCache& states, int64_t value_dim);

/// Precondition: f32 of rank 3, or of rank 2 with heads of one feature.
HeadsView HeadsOf(const TensorView& view);

/// Sets the sequences, what is written and where errors go.
void SetRows(const RecurrentRows& rows, const TensorView& out, const ErrorView& errors,
             RecurrentArguments* args);

/// Limits of the kernels; `operation` names the call in messages.
struct RecurrentSizes {
  const char* operation;
  int64_t key_dim;
  int64_t value_dim;
  int64_t conv_width;
  int64_t sequences;
};
Status CheckLimits(const RecurrentSizes& sizes);

}  // namespace marlin::cuda
