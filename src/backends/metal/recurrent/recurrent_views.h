// The arguments of recurrent calls as kernels take them.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "backends/metal/decoder/operations.h"
#include "backends/metal/kernels/recurrent/recurrent_parameters.h"
#include "marlin/recurrent.h"

namespace marlin::metal {

/// f32 heads of a call's rows that a convolution sees: [rows, heads, features], or [rows, features]
/// as one head.
struct ConvOperands {
  std::array<TensorView, kernels::kConvInputs> inputs;
  TensorView weights;
  TensorView bias;  ///< May have no data.
  int64_t channels = 0;
  int64_t conv_width = 1;
  bool multiplies = false;
};

/// Whether the kernels have room for the sequences of a call.
bool TakesSequences(const RecurrentRows& rows, const RecurrentStates& states, int64_t conv_width);

kernels::HeadStrides HeadStridesOf(const TensorView& view);
kernels::ConvParameters ParametersOf(const ConvOperands& conv);
/// Errors: kInvalidArgument (slabs that are not the device's memory).
Result<kernels::RecurrentPlaces> PlacesOf(const RecurrentRows& rows, const RecurrentStates& states,
                                          const Driver& driver);

/// The memory of a view from its first to its last element; absent: `other`, which is not read.
KernelBuffer BoundOr(int index, const TensorView& view, const TensorView& other);

/// A launch of threadgroups of kRecurrentThreads with the buffers that all kernels of sequences
/// have.
KernelLaunch SequenceLaunch(const char* source, const char* function, const RecurrentRows& rows,
                            int64_t columns, int64_t count);
/// Binds a convolution's inputs.
void BindInputs(const ConvOperands& conv, const RecurrentRows& rows, KernelLaunch* launch);
/// Binds a convolution's weights and bias.
void BindWeights(const ConvOperands& conv, KernelLaunch* launch);
/// Declares the slabs.
void ReachStates(const RecurrentStates& states, bool written, KernelLaunch* launch);
/// Binds the words in which sequences report what is wrong with them.
Status BindSequenceErrors(const RecurrentRows& rows, CallContext* context, KernelLaunch* launch);

/// Appends the launch of recurrent_mix: SiLU of the convolution of all rows, f32 [rows][channels].
void LaunchMix(const ConvOperands& conv, const kernels::RecurrentPlaces& places,
               const RecurrentRows& rows, const RecurrentStates& states, float* mixed,
               CallContext* context);

}  // namespace marlin::metal
