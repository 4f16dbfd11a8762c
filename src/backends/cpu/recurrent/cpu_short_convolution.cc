// ShortConvolution: a task is a block of channels of a sequence.
#include <algorithm>

#include "backends/cpu/decoder/cpu_decoder.h"
#include "backends/cpu/recurrent/recurrent_sequences.h"
#include "base/macros.h"

namespace marlin::cpu {
namespace {

class ShortConvolutionTasks {
 public:
  ShortConvolutionTasks(const ShortConvolutionCall& call, Isa level, int64_t workers,
                        void* workspace)
      : call_(call),
        sizes_(call.sizes),
        kernel_(RecurrentKernelsOf(level).short_convolution),
        scratch_floats_(ShortConvolutionScratchFloats(sizes_.conv_width)),
        scratch_(static_cast<float*>(workspace)),
        sequences_(call.rows, call.states,
                   reinterpret_cast<int32_t*>(scratch_ + workers * scratch_floats_)) {}

  static int64_t WorkspaceBytes(const ShortConvolutionCall& call, int64_t workers) {
    return workers * ShortConvolutionScratchFloats(call.sizes.conv_width) * int64_t{sizeof(float)} +
           RecurrentSequences::Integers(call.rows) * int64_t{sizeof(int32_t)};
  }

  int64_t count() const { return sequences_.count() * blocks(); }
  Status Prepare() { return sequences_.Prepare(); }

  void Run(int64_t task, int64_t worker) const {
    const int64_t sequence = task / blocks();
    const int64_t first = task % blocks() * kShortConvolutionChannels;
    const ShortConvolutionBlock block = BlockOf(sequence, first, worker);
    sequences_.ClearOthers(sequence, block.out, block.features);
    if (block.after != nullptr) kernel_(block);  // Otherwise no row takes part.
  }

 private:
  int64_t blocks() const {
    return (sizes_.channels + kShortConvolutionChannels - 1) / kShortConvolutionChannels;
  }

  ShortConvolutionBlock BlockOf(int64_t sequence, int64_t first, int64_t worker) const {
    const float* const before = sequences_.Page(sequence, 0);
    float* const after = sequences_.Page(sequence, 1);
    const float* const bias = call_.weights.conv_bias.As<float>();
    ShortConvolutionBlock block{};
    block.conv = {sequences_.Taking(sequence), sequences_.TakingCount(sequence), sizes_.conv_width,
                  sizes_.channels};
    block.values = ColumnOf(call_.inputs.values, first);
    block.in_gates = ColumnOf(call_.inputs.in_gates, first);
    block.out_gates = ColumnOf(call_.inputs.out_gates, first);
    block.weights = call_.weights.conv.As<float>() + first * sizes_.conv_width;
    block.bias = bias == nullptr ? nullptr : bias + first;
    block.features = std::min(kShortConvolutionChannels, sizes_.channels - first);
    block.before = before == nullptr ? nullptr : before + first;
    block.after = after == nullptr ? nullptr : after + first;
    block.out = MixedColumnOf(call_.out, first);
    block.scratch = scratch_ + worker * scratch_floats_;
    return block;
  }

  const ShortConvolutionCall& call_;
  const ShortConvolutionSizes& sizes_;
  void (*kernel_)(const ShortConvolutionBlock& block);
  int64_t scratch_floats_;
  float* scratch_;
  RecurrentSequences sequences_;
};

}  // namespace

int64_t ShortConvolutionScratchFloats(int64_t width) {
  return (2 * width + 1 + kShortConvolutionRows) * kShortConvolutionChannels;
}

int64_t CpuDecoder::WorkspaceBytes(const ShortConvolutionCall& call) const {
  return ShortConvolutionTasks::WorkspaceBytes(call, pool_.worker_count());
}

Status CpuDecoder::Run(const ShortConvolutionCall& call, const OperationContext& context) const {
  ShortConvolutionTasks tasks(call, level_, pool_.worker_count(), context.workspace);
  MARLIN_RETURN_IF_ERROR(tasks.Prepare());
  RunTasks(tasks, call.out.dim(0) * call.sizes.channels * call.sizes.conv_width, pool_);
  return {};
}

}  // namespace marlin::cpu
