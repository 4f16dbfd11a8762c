#include "backends/metal/recurrent/recurrent_views.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>

#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

/// A launch of these rows ends within a second: a row of a state takes about a microsecond.
constexpr int64_t kMostRows = int64_t{1} << 17;
/// The limit of a grid's second dimension.
constexpr int64_t kMostSequences = 65535;

/// The error of what sequences have reported, in the order of the host's checks.
Status SequenceErrors(int64_t rows, CallContext::Words words) {
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i].selection != kernels::kWrongFirstRow) continue;
    return Invalid(fmt::format("first_rows: expected to ascend from 0 to {}, got {} at {}", rows,
                               words[i].id, i));
  }
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i].selection != kernels::kNoStatePage) continue;
    return Invalid(fmt::format("pages: no page {} for sequence {}", words[i].id, i));
  }
  return Status();
}

}  // namespace

bool TakesSequences(const RecurrentRows& rows, const RecurrentStates& states, int64_t conv_width) {
  constexpr int64_t kMostConvWidth = 16;
  return rows.positions.dim(0) <= kMostRows && rows.pages.dim(0) <= kMostSequences &&
         std::ssize(states.slabs) <= kernels::kMostStateSlabs && conv_width <= kMostConvWidth;
}

kernels::HeadStrides HeadStridesOf(const TensorView& view) {
  return {view.stride(0), view.stride(1)};
}

kernels::ConvParameters ParametersOf(const ConvOperands& conv) {
  kernels::ConvParameters p{};
  for (size_t i = 0; i < conv.inputs.size(); ++i) {
    const TensorView& input = conv.inputs[i];
    if (input.rank() < 2) continue;
    p.inputs[i] = HeadStridesOf(input);
    p.heads[i] = static_cast<int32_t>(input.rank() == 3 ? input.dim(1) : 1);
    p.widths[i] = static_cast<int32_t>(input.dim(input.rank() - 1));
  }
  p.channels = static_cast<int32_t>(conv.channels);
  p.conv_width = static_cast<int32_t>(conv.conv_width);
  p.has_bias = conv.bias.empty() ? 0 : 1;
  p.multiplies = conv.multiplies ? 1 : 0;
  return p;
}

Result<kernels::RecurrentPlaces> PlacesOf(const RecurrentRows& rows, const RecurrentStates& states,
                                          const Driver& driver) {
  kernels::RecurrentPlaces places{};
  places.page_stride = states.page_stride;
  places.first_element = states.first_element;
  places.rows = static_cast<int32_t>(rows.positions.dim(0));
  places.sequences = static_cast<int32_t>(rows.pages.dim(0));
  // No page number is larger.
  places.slab_pages = static_cast<int32_t>(
      std::min<int64_t>(states.slab_pages, std::numeric_limits<int32_t>::max()));
  places.slab_count = static_cast<int32_t>(states.slabs.size());
  for (size_t i = 0; i < states.slabs.size(); ++i) {
    if (states.slabs[i] == nullptr) continue;
    places.slabs[i] = static_cast<int64_t>(driver.AddressOf(states.slabs[i]));
    if (places.slabs[i] == 0) return Invalid("states: a slab is not memory of the device");
  }
  return places;
}

KernelBuffer BoundOr(int index, const TensorView& view, const TensorView& other) {
  const TensorView& bound = view.ElementCount() == 0 || view.data() == nullptr ? other : view;
  int64_t last = 0;
  for (int i = 0; i < bound.rank(); ++i) last += (bound.dim(i) - 1) * bound.stride(i);
  return {index, bound.data(), (last + 1) * DTypeBytes(bound.dtype())};
}

KernelLaunch SequenceLaunch(const char* source, const char* function, const RecurrentRows& rows,
                            int64_t columns, int64_t count) {
  KernelLaunch launch;
  launch.source = source;
  launch.function = function;
  launch.threads = kernels::kRecurrentThreads;
  launch.threadgroups[0] = static_cast<uint32_t>(columns);
  launch.threadgroups[1] = static_cast<uint32_t>(count);
  const TensorView& first_rows = rows.first_rows;
  launch.buffers.push_back(BoundOr(MARLIN_BUFFER_TAKING, rows.positions, first_rows));
  launch.buffers.push_back(BoundOr(MARLIN_BUFFER_SEQUENCE_ROWS, first_rows, first_rows));
  launch.buffers.push_back(BoundOr(MARLIN_BUFFER_STATE_PAGES, rows.pages, first_rows));
  return launch;
}

void BindInputs(const ConvOperands& conv, const RecurrentRows& rows, KernelLaunch* launch) {
  for (size_t i = 0; i < conv.inputs.size(); ++i) {
    launch->buffers.push_back(
        BoundOr(MARLIN_BUFFER_CONV_INPUT_0 + static_cast<int>(i), conv.inputs[i], rows.first_rows));
  }
}

void BindWeights(const ConvOperands& conv, KernelLaunch* launch) {
  launch->buffers.push_back(BoundOr(MARLIN_BUFFER_CONV_WEIGHTS, conv.weights, conv.weights));
  launch->buffers.push_back(BoundOr(MARLIN_BUFFER_CONV_BIAS, conv.bias, conv.weights));
}

void ReachStates(const RecurrentStates& states, bool written, KernelLaunch* launch) {
  for (const void* const slab : states.slabs) {
    if (slab == nullptr) continue;
    launch->addressed.push_back(
        {slab, states.slab_pages * states.page_stride * int64_t{sizeof(float)}, written});
  }
}

Status BindSequenceErrors(const RecurrentRows& rows, CallContext* context, KernelLaunch* launch) {
  const int64_t count = rows.positions.dim(0);
  const auto error_of = [count](CallContext::Words words) { return SequenceErrors(count, words); };
  MARLIN_ASSIGN_OR_RETURN(
      const std::span<ErrorWords::Word> words,
      context->TakeWords(rows.pages.dim(0) + 1, {kernels::kSequenceIsRight, 0}, error_of));
  launch->buffers.push_back({MARLIN_BUFFER_SEQUENCE_ERRORS, words.data(),
                             static_cast<int64_t>(words.size_bytes()), true, true});
  return Status();
}

void LaunchMix(const ConvOperands& conv, const kernels::RecurrentPlaces& places,
               const RecurrentRows& rows, const RecurrentStates& states, float* mixed,
               CallContext* context) {
  if (places.rows == 0) return;
  KernelLaunch launch =
      SequenceLaunch("recurrent_convolution.metal", "recurrent_mix", rows,
                     CeilDivide(conv.channels, kernels::kRecurrentThreads), places.rows);
  kernels::MixParameters p{};
  p.places = places;
  p.conv = ParametersOf(conv);
  launch.other_parameters = ParameterBlock(p);
  BindInputs(conv, rows, &launch);
  BindWeights(conv, &launch);
  launch.buffers.push_back({MARLIN_BUFFER_MIXED, mixed,
                            places.rows * conv.channels * int64_t{sizeof(float)}, true, false});
  ReachStates(states, false, &launch);
  context->launches.push_back(std::move(launch));
}

}  // namespace marlin::metal
