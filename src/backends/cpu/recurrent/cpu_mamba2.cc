// Mamba2: a task is a head of a sequence. The last head of a group to finish replaces the kept
// inputs that they share, and norms the group's results, for which f32 values come from the
// workspace if the results are not f32 themselves.
#include <algorithm>
#include <atomic>

#include "backends/cpu/decoder/cpu_decoder.h"
#include "backends/cpu/recurrent/recurrent_sequences.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cpu {
namespace {

class Mamba2Tasks {
 public:
  Mamba2Tasks(const Mamba2Call& call, Isa level, int64_t workers, void* workspace)
      : call_(call),
        sizes_(call.sizes),
        kernels_(RecurrentKernelsOf(level)),
        scratch_floats_(Mamba2ScratchFloats(sizes_)),
        scratch_(static_cast<float*>(workspace)),
        mixed_(call.out),
        waiting_(
            reinterpret_cast<int32_t*>(scratch_ + workers * scratch_floats_ + MixedFloats(call))),
        sequences_(call.rows, call.states, waiting_ + call.rows.pages.dim(0) * sizes_.groups) {
    if (MixedFloats(call) == 0) return;
    mixed_ = MutableTensorView(scratch_ + workers * scratch_floats_, DType::kF32,
                               {call.out.dim(0), sizes_.heads, sizes_.head_dim});
  }

  static int64_t WorkspaceBytes(const Mamba2Call& call, int64_t workers) {
    const int64_t integers =
        RecurrentSequences::Integers(call.rows) + call.rows.pages.dim(0) * call.sizes.groups;
    return (workers * Mamba2ScratchFloats(call.sizes) + MixedFloats(call)) *
               int64_t{sizeof(float)} +
           integers * int64_t{sizeof(int32_t)};
  }

  int64_t count() const { return sequences_.count() * sizes_.heads; }

  Status Prepare() {
    std::fill_n(waiting_, sequences_.count() * sizes_.groups,
                static_cast<int32_t>(sizes_.heads / sizes_.groups));
    return sequences_.Prepare();
  }

  void Run(int64_t task, int64_t worker) const {
    const int64_t sequence = task / sizes_.heads;
    const int64_t index = task % sizes_.heads;
    const int64_t group = index / (sizes_.heads / sizes_.groups);
    sequences_.ClearOthers(sequence, MixedColumnOf(call_.out, index), sizes_.head_dim);
    float* const after = sequences_.Page(sequence, 1);
    if (after == nullptr) return;  // No row takes part.
    const Mamba2Head head = HeadOf(sequence, index, worker);
    if (head.conv.count > 0) {
      kernels_.mamba2_head(head);
    } else {
      CopyState(head.state_before, sizes_.state_size * sizes_.head_dim, head.state_after);
    }
    KeepInputs(head.conv, head.values, after + index * sizes_.head_dim);
    std::atomic_ref<int32_t> waiting(waiting_[sequence * sizes_.groups + group]);
    if (waiting.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    KeepInputs(head.conv, head.keys, after + KeyChannel(group));
    KeepInputs(head.conv, head.queries, after + QueryChannel(group));
    if (HasNorm()) kernels_.mamba2_norm(NormOf(sequence, group, worker));
  }

 private:
  /// Elements of f32 values before the norm; 0: they are in `out`.
  static int64_t MixedFloats(const Mamba2Call& call) {
    const bool apart = !call.weights.norm.empty() && call.out.dtype() != DType::kF32;
    return apart ? RoundUp(call.out.dim(0) * call.sizes.features(), kRecurrentPad) : 0;
  }

  bool HasNorm() const { return !call_.weights.norm.empty(); }
  bool GatesAfterNorm() const { return HasNorm() && call_.weights.norm_before_gate; }
  int64_t KeyChannel(int64_t group) const { return sizes_.features() + group * sizes_.state_size; }
  int64_t QueryChannel(int64_t group) const { return KeyChannel(sizes_.groups + group); }

  Mamba2Head HeadOf(int64_t sequence, int64_t index, int64_t worker) const {
    const Mamba2Weights& weights = call_.weights;
    const Mamba2Inputs& inputs = call_.inputs;
    const int64_t group = index / (sizes_.heads / sizes_.groups);
    const float* const before = sequences_.Page(sequence, 0);
    const float* const bias = weights.conv_bias.As<float>();
    const auto channels = [&](const TensorView& x, int64_t column, int64_t first, int64_t count) {
      return ConvChannels{ColumnOf(x, column).rows,
                          x.stride(0),
                          before == nullptr ? nullptr : before + first,
                          weights.conv.As<float>() + first * sizes_.conv_width,
                          bias == nullptr ? nullptr : bias + first,
                          count};
    };
    Mamba2Head head{};
    head.conv = {sequences_.Taking(sequence), sequences_.TakingCount(sequence), sizes_.conv_width,
                 sizes_.channels()};
    head.values = channels(inputs.values, index, index * sizes_.head_dim, sizes_.head_dim);
    head.keys = channels(inputs.keys, group, KeyChannel(group), sizes_.state_size);
    head.queries = channels(inputs.queries, group, QueryChannel(group), sizes_.state_size);
    if (!GatesAfterNorm()) head.gates = ColumnOf(inputs.gates, index);
    head.steps = ColumnOf(inputs.steps, index);
    head.log_decay = weights.log_decay.As<float>()[index];
    head.step_bias = weights.step_bias.As<float>()[index];
    head.skip = weights.skip.As<float>()[index];
    head.min_step = weights.min_step;
    head.max_step = weights.max_step;
    const int64_t state = sizes_.conv_elements() + index * sizes_.state_size * sizes_.head_dim;
    head.state_before = before == nullptr ? nullptr : before + state;
    head.state_after = sequences_.Page(sequence, 1) + state;
    head.out = MixedColumnOf(mixed_, index);
    head.scratch = scratch_ + worker * scratch_floats_;
    return head;
  }

  Mamba2Norm NormOf(int64_t sequence, int64_t group, int64_t worker) const {
    const int64_t heads = sizes_.heads / sizes_.groups;
    Mamba2Norm norm{};
    norm.rows = sequences_.Taking(sequence);
    norm.count = sequences_.TakingCount(sequence);
    norm.heads = heads;
    norm.head_dim = sizes_.head_dim;
    norm.mixed = ColumnOf(mixed_, group * heads);
    norm.mixed_head = mixed_.stride(1);
    if (GatesAfterNorm()) norm.gates = ColumnOf(call_.inputs.gates, group * heads);
    norm.gate_head = call_.inputs.gates.stride(1);
    norm.norm = call_.weights.norm.As<float>() + group * heads * sizes_.head_dim;
    norm.epsilon = call_.weights.epsilon;
    norm.out = MixedColumnOf(call_.out, group * heads);
    norm.out_head = call_.out.stride(1) * DTypeBytes(call_.out.dtype());
    norm.scratch = scratch_ + worker * scratch_floats_;
    return norm;
  }

  const Mamba2Call& call_;
  const Mamba2Sizes& sizes_;
  const RecurrentKernels& kernels_;
  int64_t scratch_floats_;
  float* scratch_;
  MutableTensorView mixed_;  ///< The results before the norm.
  int32_t* waiting_;         ///< [sequences, groups]: heads that have not finished.
  RecurrentSequences sequences_;
};

}  // namespace

int64_t Mamba2ScratchFloats(const Mamba2Sizes& sizes) {
  const int64_t values = RoundUp(sizes.head_dim, kRecurrentPad);
  const int64_t channels = 2 * RoundUp(sizes.state_size, kRecurrentPad) + values;
  const int64_t features = RoundUp(sizes.features() / sizes.groups, kRecurrentPad);
  // Weights and biases of the convolution, its results, and the head's other vectors.
  return std::max((sizes.conv_width + 2) * channels + 3 * values, 3 * features);
}

int64_t CpuDecoder::WorkspaceBytes(const Mamba2Call& call) const {
  return Mamba2Tasks::WorkspaceBytes(call, pool_.worker_count());
}

Status CpuDecoder::Run(const Mamba2Call& call, const OperationContext& context) const {
  Mamba2Tasks tasks(call, level_, pool_.worker_count(), context.workspace);
  MARLIN_RETURN_IF_ERROR(tasks.Prepare());
  RunTasks(tasks, tasks.count() * call.sizes.state_size * call.sizes.head_dim, pool_);
  return {};
}

}  // namespace marlin::cpu
