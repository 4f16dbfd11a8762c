// GatedDelta: a task is a value head of a sequence. The heads of a key head share its convolution's
// kept inputs, so that the last of them to finish replaces those.
#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "backends/cpu/decoder/cpu_decoder.h"
#include "backends/cpu/recurrent/gated_delta.h"
#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"
#include "plan/step/indices.h"

namespace marlin::cpu {
namespace {

/// Calls with at most this many multiplications run on the calling thread.
constexpr int64_t kSerialWork = 1 << 14;

DeltaKernel DeltaKernelOf(Isa level) {
  switch (level) {
#if defined(__x86_64__)
    case Isa::kAmx:
    case Isa::kAvx512:
      return avx512::RunDeltaHead;
    case Isa::kAvx2:
      return avx2::RunDeltaHead;
#elif defined(__aarch64__)
    case Isa::kNeon:
      return neon::RunDeltaHead;
#endif
    default:
      return scalar::RunDeltaHead;
  }
}

class DeltaTasks {
 public:
  DeltaTasks(const GatedDeltaCall& call, DeltaKernel kernel, int64_t workers, void* workspace)
      : call_(call),
        sizes_(call.sizes),
        kernel_(kernel),
        scratch_floats_(DeltaScratchFloats(sizes_)),
        scratch_(static_cast<float*>(workspace)),
        rows_(reinterpret_cast<int32_t*>(scratch_ + workers * scratch_floats_)),
        counts_(rows_ + call.out.dim(0)),
        waiting_(counts_ + sequences()) {}

  static int64_t WorkspaceBytes(const GatedDeltaCall& call, int64_t workers) {
    const int64_t sequences = call.rows.pages.dim(0);
    const int64_t integers = call.out.dim(0) + sequences * (1 + call.sizes.key_heads);
    return workers * DeltaScratchFloats(call.sizes) * int64_t{sizeof(float)} +
           integers * int64_t{sizeof(int32_t)};
  }

  int64_t sequences() const { return call_.rows.pages.dim(0); }
  int64_t count() const { return sequences() * sizes_.value_heads; }

  /// Checks the contents of the index vectors, and lists the rows that take part.
  Status Prepare() {
    MARLIN_RETURN_IF_ERROR(CheckFirstRows(call_.rows.first_rows, call_.out.dim(0)));
    for (int64_t s = 0; s < sequences(); ++s) {
      int32_t* const taking = rows_ + FirstRow(s);
      counts_[s] = 0;
      for (int64_t row = FirstRow(s); row < FirstRow(s + 1); ++row) {
        const int32_t position = call_.rows.positions.As<int32_t>()[row];
        if (position >= 0) taking[counts_[s]++] = static_cast<int32_t>(row);
      }
      MARLIN_RETURN_IF_ERROR(CheckPages(s));
      std::fill_n(waiting_ + s * sizes_.key_heads, sizes_.key_heads,
                  static_cast<int32_t>(sizes_.value_heads / sizes_.key_heads));
    }
    return {};
  }

  void Run(int64_t task, int64_t worker) const {
    const int64_t sequence = task / sizes_.value_heads;
    const int64_t value_head = task % sizes_.value_heads;
    const int64_t heads = sizes_.value_heads / sizes_.key_heads;
    const int64_t key_head = value_head / heads;
    ClearOthers(sequence, value_head);
    float* const after = Page(sequence, 1);
    if (after == nullptr) return;  // No row takes part.
    const DeltaHead head = HeadOf(sequence, value_head, worker);
    if (head.count > 0) {
      kernel_(head);
    } else {
      CopyState(head);
    }
    const int64_t key_channels = sizes_.key_heads * sizes_.key_dim;
    KeepInputs(head, head.values, after + 2 * key_channels + value_head * sizes_.value_dim);
    std::atomic_ref<int32_t> waiting(waiting_[sequence * sizes_.key_heads + key_head]);
    if (waiting.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    KeepInputs(head, head.queries, after + key_head * sizes_.key_dim);
    KeepInputs(head, head.keys, after + key_channels + key_head * sizes_.key_dim);
  }

 private:
  int64_t FirstRow(int64_t sequence) const { return call_.rows.first_rows.As<int32_t>()[sequence]; }

  /// The state of a sequence before (0) or after (1) its rows; null if there is none.
  float* Page(int64_t sequence, int64_t which) const {
    const int64_t page = call_.rows.pages.As<int32_t>()[2 * sequence + which];
    const int64_t slab = page < 0 ? -1 : page / call_.states.slab_pages;
    if (slab < 0 || slab >= static_cast<int64_t>(call_.states.slabs.size())) return nullptr;
    auto* const data = static_cast<float*>(call_.states.slabs[static_cast<size_t>(slab)]);
    if (data == nullptr) return nullptr;
    return data + page % call_.states.slab_pages * call_.states.page_stride +
           call_.states.first_element;
  }

  Status CheckPages(int64_t sequence) const {
    for (int64_t which = 0; which < 2; ++which) {
      const int32_t page = call_.rows.pages.As<int32_t>()[2 * sequence + which];
      if (Page(sequence, which) != nullptr) continue;
      if (page == -1 && (which == 0 || counts_[sequence] == 0)) continue;
      return Invalid(fmt::format("pages: no page {} for sequence {}", page, sequence));
    }
    return {};
  }

  DeltaHead HeadOf(int64_t sequence, int64_t value_head, int64_t worker) const {
    const GatedDeltaWeights& weights = call_.weights;
    const int64_t heads = sizes_.value_heads / sizes_.key_heads;
    const int64_t key_head = value_head / heads;
    const int64_t part = value_head % heads;
    const float* const before = Page(sequence, 0);
    const auto channels = [&](const TensorView& x, int64_t column, int64_t first, int64_t count) {
      return DeltaChannels{Column(x, key_head, column).rows, x.stride(0),
                           before == nullptr ? nullptr : before + first,
                           weights.conv.As<float>() + first * sizes_.conv_width, count};
    };
    const int64_t key_channels = sizes_.key_heads * sizes_.key_dim;
    DeltaHead head{};
    head.queries = channels(call_.inputs.queries, 0, key_head * sizes_.key_dim, sizes_.key_dim);
    head.keys =
        channels(call_.inputs.keys, 0, key_channels + key_head * sizes_.key_dim, sizes_.key_dim);
    head.values = channels(call_.inputs.values, part * sizes_.value_dim,
                           2 * key_channels + value_head * sizes_.value_dim, sizes_.value_dim);
    head.width = sizes_.conv_width;
    head.channels = sizes_.channels();
    head.gates = Column(call_.inputs.gates, key_head, part * sizes_.value_dim);
    head.writes = Column(call_.inputs.writes, key_head, part);
    head.decays = Column(call_.inputs.decays, key_head, part);
    head.log_decay = weights.log_decay.As<float>()[value_head];
    head.decay_bias = weights.decay_bias.As<float>()[value_head];
    head.norm = weights.norm.As<float>();
    head.epsilon = weights.epsilon;
    head.rows = rows_ + FirstRow(sequence);
    head.count = counts_[sequence];
    const int64_t state = sizes_.conv_elements() + value_head * StateElements();
    head.state_before = before == nullptr ? nullptr : before + state;
    head.state_after = Page(sequence, 1) + state;
    head.out = Out(value_head);
    head.out_stride = call_.out.stride(0) * DTypeBytes(call_.out.dtype());
    head.out_type = call_.out.dtype();
    head.scratch = scratch_ + worker * scratch_floats_;
    return head;
  }

  static DeltaColumn Column(const TensorView& x, int64_t key_head, int64_t column) {
    return {x.As<float>() + key_head * x.stride(1) + column, x.stride(0)};
  }

  uint8_t* Out(int64_t value_head) const {
    return call_.out.As<uint8_t>() +
           value_head * call_.out.stride(1) * DTypeBytes(call_.out.dtype());
  }

  int64_t StateElements() const { return sizes_.key_dim * sizes_.value_dim; }

  /// Rows that do not take part get zeros.
  void ClearOthers(int64_t sequence, int64_t value_head) const {
    if (counts_[sequence] == FirstRow(sequence + 1) - FirstRow(sequence)) return;
    const int64_t bytes = DTypeBytes(call_.out.dtype());
    for (int64_t row = FirstRow(sequence); row < FirstRow(sequence + 1); ++row) {
      if (call_.rows.positions.As<int32_t>()[row] >= 0) continue;
      std::memset(Out(value_head) + row * call_.out.stride(0) * bytes, 0,
                  static_cast<size_t>(sizes_.value_dim * bytes));
    }
  }

  void CopyState(const DeltaHead& head) const {
    if (head.state_before == nullptr) {
      std::fill_n(head.state_after, StateElements(), 0.0F);
    } else if (head.state_before != head.state_after) {
      std::copy_n(head.state_before, StateElements(), head.state_after);
    }
  }

  /// Keeps the last inputs of channels. `after` is the oldest one, which may be the oldest before:
  /// inputs only move towards it.
  static void KeepInputs(const DeltaHead& head, const DeltaChannels& channels, float* after) {
    const int64_t kept = head.width - 1;
    for (int64_t i = 0; i < kept; ++i) {
      const int64_t from = i + head.count;
      float* const to = after + i * head.channels;
      if (from >= kept) {
        std::copy_n(channels.rows + head.rows[from - kept] * channels.stride, channels.count, to);
      } else if (channels.before == nullptr) {
        std::fill_n(to, channels.count, 0.0F);
      } else if (const float* const old = channels.before + from * head.channels; old != to) {
        std::copy_n(old, channels.count, to);
      }
    }
  }

  const GatedDeltaCall& call_;
  const GatedDeltaSizes& sizes_;
  DeltaKernel kernel_;
  int64_t scratch_floats_;
  float* scratch_;
  int32_t* rows_;     ///< The rows that take part, each sequence's from its first row on.
  int32_t* counts_;   ///< [sequences]: how many take part.
  int32_t* waiting_;  ///< [sequences, key_heads]: value heads that have not finished.
};

}  // namespace

int64_t DeltaScratchFloats(const GatedDeltaSizes& sizes) {
  const int64_t values = RoundUp(sizes.value_dim, kDeltaPad);
  const int64_t channels = 2 * RoundUp(sizes.key_dim, kDeltaPad) + values;
  return (sizes.conv_width + 2) * channels + 6 * values;
}

int64_t CpuDecoder::WorkspaceBytes(const GatedDeltaCall& call) const {
  return DeltaTasks::WorkspaceBytes(call, pool_.worker_count());
}

Status CpuDecoder::Run(const GatedDeltaCall& call, const OperationContext& context) const {
  DeltaTasks tasks(call, DeltaKernelOf(level_), pool_.worker_count(), context.workspace);
  MARLIN_RETURN_IF_ERROR(tasks.Prepare());
  const int64_t work = call.sizes.key_dim * call.sizes.value_dim;
  if (tasks.count() * work <= kSerialWork) {
    for (int64_t task = 0; task < tasks.count(); ++task) tasks.Run(task, 0);
    return {};
  }
  pool_.Run(tasks.count(), [&](int64_t task, int worker) { tasks.Run(task, worker); });
  return {};
}

}  // namespace marlin::cpu
