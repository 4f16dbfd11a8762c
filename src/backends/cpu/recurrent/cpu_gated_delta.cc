// GatedDelta: a task is a value head of a sequence. The heads of a key head share its convolution's
// kept inputs, so that the last of them to finish replaces those.
#include <algorithm>
#include <atomic>

#include "backends/cpu/decoder/cpu_decoder.h"
#include "backends/cpu/recurrent/recurrent_sequences.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cpu {
namespace {

class DeltaTasks {
 public:
  DeltaTasks(const GatedDeltaCall& call, Isa level, int64_t workers, void* workspace)
      : call_(call),
        sizes_(call.sizes),
        kernel_(RecurrentKernelsOf(level).delta_head),
        scratch_floats_(DeltaScratchFloats(sizes_)),
        scratch_(static_cast<float*>(workspace)),
        waiting_(reinterpret_cast<int32_t*>(scratch_ + workers * scratch_floats_)),
        sequences_(call.rows, call.states,
                   waiting_ + call.rows.pages.dim(0) * call.sizes.key_heads) {}

  static int64_t WorkspaceBytes(const GatedDeltaCall& call, int64_t workers) {
    const int64_t integers =
        RecurrentSequences::Integers(call.rows) + call.rows.pages.dim(0) * call.sizes.key_heads;
    return workers * DeltaScratchFloats(call.sizes) * int64_t{sizeof(float)} +
           integers * int64_t{sizeof(int32_t)};
  }

  int64_t count() const { return sequences_.count() * sizes_.value_heads; }

  Status Prepare() {
    std::fill_n(waiting_, sequences_.count() * sizes_.key_heads,
                static_cast<int32_t>(sizes_.value_heads / sizes_.key_heads));
    return sequences_.Prepare();
  }

  void Run(int64_t task, int64_t worker) const {
    const int64_t sequence = task / sizes_.value_heads;
    const int64_t value_head = task % sizes_.value_heads;
    const int64_t key_head = value_head / (sizes_.value_heads / sizes_.key_heads);
    sequences_.ClearOthers(sequence, MixedColumnOf(call_.out, value_head), sizes_.value_dim);
    float* const after = sequences_.Page(sequence, 1);
    if (after == nullptr) return;  // No row takes part.
    const DeltaHead head = HeadOf(sequence, value_head, worker);
    if (head.conv.count > 0) {
      kernel_(head);
    } else {
      CopyState(head.state_before, sizes_.key_dim * sizes_.value_dim, head.state_after);
    }
    const int64_t key_channels = sizes_.key_heads * sizes_.key_dim;
    KeepInputs(head.conv, head.values, after + 2 * key_channels + value_head * sizes_.value_dim);
    std::atomic_ref<int32_t> waiting(waiting_[sequence * sizes_.key_heads + key_head]);
    if (waiting.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    KeepInputs(head.conv, head.queries, after + key_head * sizes_.key_dim);
    KeepInputs(head.conv, head.keys, after + key_channels + key_head * sizes_.key_dim);
  }

 private:
  DeltaHead HeadOf(int64_t sequence, int64_t value_head, int64_t worker) const {
    const GatedDeltaWeights& weights = call_.weights;
    const int64_t heads = sizes_.value_heads / sizes_.key_heads;
    const int64_t key_head = value_head / heads;
    const int64_t part = value_head % heads;
    const float* const before = sequences_.Page(sequence, 0);
    const auto column = [&](const TensorView& x, int64_t first) {
      return RowColumn{x.As<float>() + key_head * x.stride(1) + first, x.stride(0)};
    };
    const auto channels = [&](const TensorView& x, int64_t first_column, int64_t first,
                              int64_t count) {
      return ConvChannels{column(x, first_column).rows,
                          x.stride(0),
                          before == nullptr ? nullptr : before + first,
                          weights.conv.As<float>() + first * sizes_.conv_width,
                          nullptr,
                          count};
    };
    const int64_t key_channels = sizes_.key_heads * sizes_.key_dim;
    DeltaHead head{};
    head.conv = {sequences_.Taking(sequence), sequences_.TakingCount(sequence), sizes_.conv_width,
                 sizes_.channels()};
    head.queries = channels(call_.inputs.queries, 0, key_head * sizes_.key_dim, sizes_.key_dim);
    head.keys =
        channels(call_.inputs.keys, 0, key_channels + key_head * sizes_.key_dim, sizes_.key_dim);
    head.values = channels(call_.inputs.values, part * sizes_.value_dim,
                           2 * key_channels + value_head * sizes_.value_dim, sizes_.value_dim);
    head.gates = column(call_.inputs.gates, part * sizes_.value_dim);
    head.writes = column(call_.inputs.writes, part);
    head.decays = column(call_.inputs.decays, part);
    head.log_decay = weights.log_decay.As<float>()[value_head];
    head.decay_bias = weights.decay_bias.As<float>()[value_head];
    head.norm = weights.norm.As<float>();
    head.epsilon = weights.epsilon;
    const int64_t state = sizes_.conv_elements() + value_head * sizes_.key_dim * sizes_.value_dim;
    head.state_before = before == nullptr ? nullptr : before + state;
    head.state_after = sequences_.Page(sequence, 1) + state;
    head.out = MixedColumnOf(call_.out, value_head);
    head.scratch = scratch_ + worker * scratch_floats_;
    return head;
  }

  const GatedDeltaCall& call_;
  const GatedDeltaSizes& sizes_;
  void (*kernel_)(const DeltaHead& head);
  int64_t scratch_floats_;
  float* scratch_;
  int32_t* waiting_;  ///< [sequences, key_heads]: value heads that have not finished.
  RecurrentSequences sequences_;
};

}  // namespace

int64_t DeltaScratchFloats(const GatedDeltaSizes& sizes) {
  const int64_t values = RoundUp(sizes.value_dim, kRecurrentPad);
  const int64_t channels = 2 * RoundUp(sizes.key_dim, kRecurrentPad) + values;
  return (sizes.conv_width + 2) * channels + 6 * values;
}

int64_t CpuDecoder::WorkspaceBytes(const GatedDeltaCall& call) const {
  return DeltaTasks::WorkspaceBytes(call, pool_.worker_count());
}

Status CpuDecoder::Run(const GatedDeltaCall& call, const OperationContext& context) const {
  DeltaTasks tasks(call, level_, pool_.worker_count(), context.workspace);
  MARLIN_RETURN_IF_ERROR(tasks.Prepare());
  RunTasks(tasks, tasks.count() * call.sizes.key_dim * call.sizes.value_dim, pool_);
  return {};
}

}  // namespace marlin::cpu
