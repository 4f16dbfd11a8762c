#include "backends/metal/rows/row_views.h"

#include <algorithm>
#include <limits>

#include "base/checked.h"
#include "base/macros.h"
#include "plan/step/indices.h"

namespace marlin::metal {
namespace {

/// Threads of a threadgroup of an elementwise kernel, at most, and columns that each has.
constexpr int64_t kRowThreads = 256;
constexpr int64_t kColumnsOfThread = 4;

}  // namespace

kernels::RowStrides StridesOf(const TensorView& view) {
  return {0, view.stride(0), view.rank() == 3 ? view.stride(1) : 0, 0, 0};
}

int64_t BytesOf(const TensorView& view) {
  if (view.empty() || view.ElementCount() <= 0) return 0;
  int64_t last = 0;
  for (int i = 0; i < view.rank(); ++i) last += (view.dim(i) - 1) * view.stride(i);
  return (last + 1) * DTypeBytes(view.dtype());
}

KernelBuffer OperandOf(int index, const TensorView& view, Use use) {
  return {index, view.data(), BytesOf(view), use != Use::kRead, use != Use::kWritten};
}

namespace {

/// Addresses from the first element to the end of the last one.
struct Range {
  explicit Range(const TensorView& view)
      : begin(reinterpret_cast<uintptr_t>(view.data())),
        end(begin + static_cast<uintptr_t>(BytesOf(view))) {}
  bool Meets(const Range& other) const { return begin < other.end && other.begin < end; }

  uintptr_t begin;
  uintptr_t end;
};

}  // namespace

bool Interleaved(const TensorView& a, const TensorView& b) { return Range(a).Meets(Range(b)); }

void BindRows(std::initializer_list<RowInput> inputs, const TensorView& output, Use use,
              kernels::RowStrides* output_strides, KernelLaunch* launch) {
  const Range own(output);
  Range all = own;
  bool grows = true;
  while (grows) {
    grows = false;
    for (const RowInput& input : inputs) {
      const Range range(input.view);
      if (!range.Meets(all) || (range.begin >= all.begin && range.end <= all.end)) continue;
      all.begin = std::min(all.begin, range.begin);
      all.end = std::max(all.end, range.end);
      grows = true;
    }
  }
  const auto* const first =
      static_cast<const std::byte*>(output.data()) - static_cast<ptrdiff_t>(own.begin - all.begin);
  for (const RowInput& input : inputs) {
    *input.strides = StridesOf(input.view);
    const Range range(input.view);
    if (range.Meets(all)) {
      use = use == Use::kWritten ? Use::kChanged : use;
      input.strides->first = static_cast<int64_t>(range.begin - all.begin);
      input.strides->in_output = 1;
      launch->buffers.push_back({input.index, nullptr, 0});
    } else {
      launch->buffers.push_back(OperandOf(input.index, input.view));
    }
  }
  *output_strides = StridesOf(output);
  output_strides->first = static_cast<int64_t>(own.begin - all.begin);
  launch->buffers.push_back({MARLIN_BUFFER_OUTPUT, first, static_cast<int64_t>(all.end - all.begin),
                             use != Use::kRead, use != Use::kWritten});
}

int64_t RowsOf(const TensorView& view) {
  return view.rank() == 3 ? view.dim(0) * view.dim(1) : view.dim(0);
}

bool Fits(const TensorView& view) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  // Columns of a thread's next step are also counted.
  return RowsOf(view) <= kMost && view.dim(view.rank() - 1) <= kMost / 2;
}

KernelLaunch ElementLaunch(std::string_view function, const TensorView& view,
                           kernels::RowParameters* parameters) {
  const int64_t columns = view.dim(view.rank() - 1);
  const int64_t threads =
      std::min(RoundUp(std::max<int64_t>(columns, 1), int64_t{kernels::kLanes}), kRowThreads);
  const int64_t groups =
      std::clamp<int64_t>(CeilDivide(columns, threads * kColumnsOfThread), 1, 1024);
  KernelLaunch launch;
  launch.source = "rows_elementwise.metal";
  launch.function = function;
  launch.threads = static_cast<uint32_t>(threads);
  launch.threadgroups = {static_cast<uint32_t>(groups),
                         static_cast<uint32_t>(view.rank() == 3 ? view.dim(1) : 1),
                         static_cast<uint32_t>(view.dim(0))};
  parameters->columns = static_cast<int32_t>(columns);
  parameters->step = static_cast<int32_t>(groups * threads);
  return launch;
}

kernels::RotaryParameters RotaryOf(const RotaryEmbedding& rotary) {
  const TensorView& frequencies = rotary.inverse_frequencies;
  const int64_t pairs = frequencies.empty() ? 0 : frequencies.ElementCount();
  return {static_cast<int32_t>(pairs), rotary.interleaved ? 1 : 0, rotary.attention_factor};
}

Status BindIndices(const char* name, const TensorView& indices, int64_t limit, KernelLaunch* launch,
                   kernels::IndexParameters* parameters, CallContext* context) {
  *parameters = {limit, static_cast<int32_t>(indices.dim(0)),
                 indices.dtype() == DType::kI64 ? 1 : 0};
  launch->buffers.push_back(OperandOf(MARLIN_BUFFER_INDICES, indices));
  const auto error_of = [name, limit](const ErrorWords::Word& word) {
    const auto low = static_cast<uint32_t>(word.id);
    const auto high = static_cast<uint64_t>(static_cast<uint32_t>(word.more[0]));
    return WrongIndex(name, static_cast<int64_t>(high << 32 | low), word.selection, limit);
  };
  MARLIN_ASSIGN_OR_RETURN(ErrorWords::Word* const word,
                          context->TakeWord({kernels::kNoError, 0}, error_of));
  launch->buffers.push_back({MARLIN_BUFFER_INDEX_ERROR, word, sizeof(*word), true, true});
  return Status();
}

}  // namespace marlin::metal
