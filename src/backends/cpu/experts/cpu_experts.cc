#include "backends/cpu/experts/cpu_experts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <new>
#include <utility>
#include <vector>

#include "backends/cpu/decoder/cpu_decoder.h"
#include "backends/cpu/gemm/gemm_job.h"
#include "backends/cpu/gemm/job_list.h"
#include "backends/cpu/gemm/kernel_table.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "plan/moe/expert_slots.h"

namespace marlin::cpu {
namespace {

/// Tokens of a pass: their rows and results stay below some 100 MB. More tokens only add passes
/// that read the weights again, when every expert has dozens of rows per pass.
constexpr int64_t kTokensPerPass = 1024;

/// The workspace of a pass: offsets, and sizes.
struct ExpertsLayout {
  int64_t bytes = 0;
  int64_t begin = 0;
  int64_t token = 0;
  int64_t weight = 0;
  int64_t slot_of = 0;
  int64_t inner = 0;    ///< f32 [slots, 2 inner]: gate | up, then the product in the gate's place.
  int64_t results = 0;  ///< f32 [slots, hidden]
  int64_t jobs = 0;     ///< A JobList.
  int64_t packed = 0;   ///< The memory of its jobs.
  int64_t scratch = 0;
  int64_t scratch_bytes = 0;  ///< Per worker.
  int64_t most_jobs = 0;

  int64_t Add(int64_t size) {
    const int64_t offset = bytes;
    bytes += RoundUp(size, kBufferAlignment);
    return offset;
  }
};

class CpuExperts final : public PlannedExperts {
 public:
  CpuExperts(Isa level, ThreadPool& pool, const ExpertsProblem& problem,
             const LayerExperts& experts, const SelectGemm& select);

  /// Selects the GEMV kernels, and sizes the workspace. Errors: kUnsupported for a GEMM
  /// without a kernel.
  Status Plan();

  int64_t workspace_bytes() const override { return layout_.bytes; }
  Status Run(const ExpertsCall& call) const override;

 private:
  /// Rows of a GEMM whose kernel is chosen when planning.
  static constexpr int64_t kPlannedRows = 16;
  /// The kernels of the GEMMs with the weights of one spec.
  struct Choice {
    GemmDesc desc;                                              ///< m = 0.
    std::array<const KernelDesc*, kPlannedRows + 1> kernels{};  ///< By rows, from 1 on.
  };
  /// A pass over some tokens.
  struct Pass {
    const ExpertsCall& call;
    int64_t tokens;
    ExpertSlots slots;
    int workers;  ///< Workers per expert, if the experts share the pool evenly.

    int64_t count(int64_t expert) const { return slots.begin[expert + 1] - slots.begin[expert]; }
    template <typename T>
    T* At(int64_t offset) const {
      return reinterpret_cast<T*>(call.workspace + offset);
    }
  };

  const ExpertOperands& ExpertAt(int64_t e) const {
    return e < static_cast<int64_t>(layer_.experts.size()) ? layer_.experts[static_cast<size_t>(e)]
                                                           : layer_.shared;
  }
  Status AddChoice(const ExpertOperand& matrix, DType a_type);
  Result<const KernelDesc*> KernelOf(const GemmDesc& desc) const;
  void LayOut();
  int64_t ScratchBytes() const;

  Status RunPass(const ExpertsCall& call, int64_t first, int64_t tokens) const;
  /// Adds the jobs of `call` (any number of rows) to a list, with memory from `packed` on.
  Status AddJobs(const GemmCall& call, const int32_t* gather, int workers, JobList* list,
                 std::byte** packed) const;
  Status RunGateUp(const Pass& pass) const;
  void Activate(const Pass& pass) const;
  Status RunDown(const Pass& pass) const;
  void Sum(const Pass& pass) const;

  ThreadPool& pool_;
  const DecoderKernels& kernels_;
  const ExpertsProblem problem_;
  const LayerExperts& layer_;
  const SelectGemm select_;
  std::vector<Choice> choices_;
  int64_t inner_ = 0;
  ExpertsLayout layout_;
};

CpuExperts::CpuExperts(Isa level, ThreadPool& pool, const ExpertsProblem& problem,
                       const LayerExperts& experts, const SelectGemm& select)
    : pool_(pool),
      kernels_(DecoderKernelsOf(level)),
      problem_(problem),
      layer_(experts),
      select_(select),
      inner_(experts.shared.inner()) {
  for (const ExpertOperands& expert : layer_.experts) inner_ = std::max(inner_, expert.inner());
}

Status CpuExperts::Plan() {
  for (int64_t e = 0; e <= static_cast<int64_t>(layer_.experts.size()); ++e) {
    const ExpertOperands& expert = ExpertAt(e);
    MARLIN_RETURN_IF_ERROR(AddChoice(expert.gate, problem_.x_type));
    MARLIN_RETURN_IF_ERROR(AddChoice(expert.up, problem_.x_type));
    MARLIN_RETURN_IF_ERROR(AddChoice(expert.down, DType::kF32));
  }
  MARLIN_RETURN_IF_ERROR(AddChoice({layer_.shared_gate, 0, nullptr}, problem_.x_type));
  LayOut();
  return {};
}

Status CpuExperts::AddChoice(const ExpertOperand& matrix, DType a_type) {
  if (matrix.weights == nullptr) return {};
  Choice choice{DescribeExpert(problem_, matrix, 0, a_type), {}};
  const auto same = [&](const Choice& known) { return known.desc == choice.desc; };
  if (std::any_of(choices_.begin(), choices_.end(), same)) return {};
  for (int64_t rows = 1; rows <= kPlannedRows; ++rows) {
    GemmDesc desc = choice.desc;
    desc.m = rows;
    MARLIN_ASSIGN_OR_RETURN(const KernelChoice chosen, select_(desc));
    choice.kernels[static_cast<size_t>(rows)] = chosen.kernel;
  }
  choices_.push_back(choice);
  return {};
}

Result<const KernelDesc*> CpuExperts::KernelOf(const GemmDesc& desc) const {
  if (desc.m <= kPlannedRows) {
    GemmDesc any_rows = desc;
    any_rows.m = 0;
    for (const Choice& choice : choices_) {
      if (choice.desc == any_rows) return choice.kernels[static_cast<size_t>(desc.m)];
    }
  }
  MARLIN_ASSIGN_OR_RETURN(const KernelChoice chosen, select_(desc));
  return chosen.kernel;
}

/// The scratch of a worker for the largest job of any kernel.
int64_t CpuExperts::ScratchBytes() const {
  int64_t most = 0;
  for (const Choice& choice : choices_) {
    GemmDesc desc = choice.desc;
    desc.m = std::min(problem_.tokens, kTokensPerPass) * problem_.top_k;
    for (const KernelDesc& kernel : CpuKernels()) {
      for (int workers = 1; workers <= pool_.worker_count(); ++workers) {
        most = std::max(most, JobBytesOf(kernel, desc, workers).worker);
      }
    }
  }
  return most;
}

void CpuExperts::LayOut() {
  const int64_t tokens = std::min(problem_.tokens, kTokensPerPass);
  const auto experts = static_cast<int64_t>(layer_.experts.size());
  const int64_t selections = tokens * problem_.top_k;
  const int64_t slots = selections + (layer_.shared.present() ? tokens : 0);
  // MC blocks of 24 rows or more, of the gate and of up, and the gate of the shared expert.
  constexpr int64_t kLeastBlock = 24;
  layout_.most_jobs =
      2 * (std::min(experts + 1, slots) + slots / kLeastBlock) + 1 + tokens / kLeastBlock + 1;
  layout_.begin = layout_.Add((experts + 2) * 4);
  layout_.token = layout_.Add(slots * 4);
  layout_.weight = layout_.Add(slots * 4);
  layout_.slot_of = layout_.Add(selections * 4);
  layout_.inner = layout_.Add(slots * 2 * inner_ * 4);
  layout_.results = layout_.Add(slots * layer_.hidden * 4);
  layout_.jobs = layout_.Add(JobList::BytesFor(layout_.most_jobs));
  // A packed activation takes 4 bytes or less; rows are padded to tiles of 16 and 256 k.
  const int64_t k = RoundUp(std::max(layer_.hidden, inner_), 256);
  const int64_t n = std::max(layer_.hidden, 2 * inner_);
  const int64_t rows = 2 * slots + tokens + 15 * layout_.most_jobs;
  layout_.packed =
      layout_.Add(rows * (k * 4 + kBufferAlignment) +
                  layout_.most_jobs * (RoundUp(n * 4, kBufferAlignment) + kBufferAlignment));
  layout_.scratch_bytes = ScratchBytes();
  layout_.scratch = layout_.Add(layout_.scratch_bytes * pool_.worker_count());
}

Status CpuExperts::Run(const ExpertsCall& call) const {
  for (int64_t first = 0; first < problem_.tokens; first += kTokensPerPass) {
    ExpertsCall part = call;
    part.x =
        static_cast<const std::byte*>(call.x) + first * call.x_stride * DTypeBytes(problem_.x_type);
    part.out =
        static_cast<std::byte*>(call.out) + first * call.out_stride * DTypeBytes(problem_.out_type);
    part.ids += first * problem_.top_k;
    part.weights += first * problem_.top_k;
    const int64_t tokens = std::min(kTokensPerPass, problem_.tokens - first);
    MARLIN_RETURN_IF_ERROR(RunPass(part, first, tokens));
  }
  return {};
}

Status CpuExperts::RunPass(const ExpertsCall& call, int64_t first, int64_t tokens) const {
  Pass pass{call, tokens, {}, 1};
  pass.slots = {static_cast<int64_t>(layer_.experts.size()), pass.At<int32_t>(layout_.begin),
                pass.At<int32_t>(layout_.token), pass.At<float>(layout_.weight),
                pass.At<int32_t>(layout_.slot_of)};
  MARLIN_RETURN_IF_ERROR(
      SortByExpert({call.ids, call.weights, tokens, problem_.top_k, first}, layer_, pass.slots));
  int64_t active = 0;
  for (int64_t e = 0; e <= pass.slots.experts; ++e) active += pass.count(e) > 0 ? 1 : 0;
  pass.workers = static_cast<int>(CeilDivide(pool_.worker_count(), std::max<int64_t>(active, 1)));
  MARLIN_RETURN_IF_ERROR(RunGateUp(pass));
  Activate(pass);
  MARLIN_RETURN_IF_ERROR(RunDown(pass));
  Sum(pass);
  return {};
}

Status CpuExperts::AddJobs(const GemmCall& call, const int32_t* gather, int workers, JobList* list,
                           std::byte** packed) const {
  MARLIN_ASSIGN_OR_RETURN(const KernelDesc* const kernel, KernelOf(call.desc));
  const int64_t most = MaxJobRows(*kernel, call.desc);
  for (int64_t first = 0; first < call.desc.m; first += most) {
    GemmCall part = RowsOf(call, first, std::min(most, call.desc.m - first));
    JobRows rows;
    if (gather != nullptr) {
      part.a = call.a;
      rows.gather = gather + first;
    }
    list->Add(MakeJob(*kernel, part, workers, *packed, rows));
    *packed += RoundUp(JobBytesOf(*kernel, part.desc, workers).job, kBufferAlignment);
  }
  return {};
}

Status CpuExperts::RunGateUp(const Pass& pass) const {
  JobList list(pass.At<std::byte>(layout_.jobs), layout_.most_jobs);
  auto* packed = pass.At<std::byte>(layout_.packed);
  for (int64_t e = 0; e <= pass.slots.experts; ++e) {
    const int64_t rows = pass.count(e);
    if (rows == 0) continue;
    const ExpertOperands& expert = ExpertAt(e);
    const int64_t first = pass.slots.begin[e];
    float* const inner = pass.At<float>(layout_.inner) + first * 2 * inner_;
    const auto add = [&](const ExpertOperand& matrix, float* out, int64_t out_stride) {
      GemmCall gemm;
      gemm.desc = DescribeExpert(problem_, matrix, rows, problem_.x_type);
      gemm.weights = matrix.weights;
      gemm.expert = matrix.index;
      gemm.a = pass.call.x;
      gemm.a_stride = pass.call.x_stride;
      gemm.c = out;
      gemm.c_stride = out_stride;
      gemm.epilogue.bias = matrix.bias;
      return AddJobs(gemm, pass.slots.token + first, pass.workers, &list, &packed);
    };
    MARLIN_RETURN_IF_ERROR(add(expert.gate, inner, 2 * inner_));
    if (expert.up.weights != nullptr) {
      MARLIN_RETURN_IF_ERROR(add(expert.up, inner + expert.inner(), 2 * inner_));
    }
    if (&expert == &layer_.shared && layer_.shared_gate != nullptr) {
      MARLIN_RETURN_IF_ERROR(add({layer_.shared_gate, 0, nullptr}, pass.slots.weight + first, 1));
    }
  }
  list.Run(pool_, pass.At<std::byte>(layout_.scratch), layout_.scratch_bytes);
  return {};
}

/// Replaces the gates by the products with up, and the scores of the shared expert by its weights.
void CpuExperts::Activate(const Pass& pass) const {
  const ExpertSlots& slots = pass.slots;
  pool_.Run(slots.slots(), [&](int64_t slot, int) {
    const int64_t e =
        std::upper_bound(slots.begin, slots.begin + slots.experts + 2, slot) - slots.begin - 1;
    const int64_t width = ExpertAt(e).inner();
    float* const gate = pass.At<float>(layout_.inner) + slot * 2 * inner_;
    kernels_.gate(problem_.gate, gate, gate + width, width, gate);
    if (e < slots.experts) return;
    float& weight = slots.weight[slot];
    weight = layer_.shared_gate == nullptr ? 1.0F : 1.0F / (1.0F + std::exp(-weight));
  });
}

Status CpuExperts::RunDown(const Pass& pass) const {
  JobList list(pass.At<std::byte>(layout_.jobs), layout_.most_jobs);
  auto* packed = pass.At<std::byte>(layout_.packed);
  for (int64_t e = 0; e <= pass.slots.experts; ++e) {
    const int64_t rows = pass.count(e);
    if (rows == 0) continue;
    const ExpertOperand& matrix = ExpertAt(e).down;
    const int64_t first = pass.slots.begin[e];
    GemmCall gemm;
    gemm.desc = DescribeExpert(problem_, matrix, rows, DType::kF32);
    gemm.weights = matrix.weights;
    gemm.expert = matrix.index;
    gemm.a = pass.At<float>(layout_.inner) + first * 2 * inner_;
    gemm.a_stride = 2 * inner_;
    gemm.c = pass.At<float>(layout_.results) + first * layer_.hidden;
    gemm.c_stride = layer_.hidden;
    gemm.epilogue.bias = matrix.bias;
    gemm.epilogue.row_weight = pass.slots.weight + first;
    MARLIN_RETURN_IF_ERROR(AddJobs(gemm, nullptr, pass.workers, &list, &packed));
  }
  list.Run(pool_, pass.At<std::byte>(layout_.scratch), layout_.scratch_bytes);
  return {};
}

/// Adds the results of each token, in the order of its selections, in the place of the first one.
void CpuExperts::Sum(const Pass& pass) const {
  const ExpertSlots& slots = pass.slots;
  const int64_t hidden = layer_.hidden;
  const int64_t size = DTypeBytes(problem_.out_type);
  pool_.Run(pass.tokens, [&](int64_t t, int) {
    float* sum = nullptr;
    const auto add = [&](int64_t slot) {
      float* const row = pass.At<float>(layout_.results) + slot * hidden;
      if (sum == nullptr) {
        sum = row;
      } else {
        kernels_.add_scaled(row, 1.0F, hidden, sum);
      }
    };
    for (int64_t s = 0; s < problem_.top_k; ++s) {
      const int32_t slot = slots.slot_of[t * problem_.top_k + s];
      if (slot >= 0) add(slot);
    }
    if (layer_.shared.present()) add(slots.begin[slots.experts] + t);
    auto* const out = static_cast<std::byte*>(pass.call.out) + t * pass.call.out_stride * size;
    if (sum == nullptr) {
      std::fill(out, out + hidden * size, std::byte{0});
    } else {
      kernels_.narrow(sum, hidden, problem_.out_type, out);
    }
  });
}

}  // namespace

Result<std::shared_ptr<const PlannedExperts>> PlanCpuExperts(Isa level, ThreadPool& pool,
                                                             const ExpertsProblem& problem,
                                                             const LayerExperts& experts,
                                                             const SelectGemm& select) {
  auto planned = std::make_shared<CpuExperts>(level, pool, problem, experts, select);
  MARLIN_RETURN_IF_ERROR(planned->Plan());
  return std::shared_ptr<const PlannedExperts>(std::move(planned));
}

}  // namespace marlin::cpu
