#include "backends/metal/moe/metal_experts.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "backends/metal/moe/decode_launches.h"
#include "backends/metal/moe/expert_launches.h"
#include "backends/metal/moe/expert_table.h"
#include "backends/metal/moe/expert_tiling.h"
#include "base/macros.h"
#include "plan/moe/expert_slots.h"

namespace marlin::metal {
namespace {

/// Checks that the device supports the GEMM of every matrix. The kernels of experts compute as
/// the selected ones do.
Status CheckGemms(const ExpertsProblem& problem, const LayerExperts& layer,
                  const SelectGemm& select) {
  std::vector<GemmDesc> checked;
  const auto check = [&](const ExpertOperand& matrix, DType a_type) -> Status {
    if (matrix.weights == nullptr) return Status();
    const GemmDesc desc = DescribeExpert(problem, matrix, 1, a_type);
    if (std::find(checked.begin(), checked.end(), desc) != checked.end()) return Status();
    checked.push_back(desc);
    return select(desc).status();
  };
  const auto check_expert = [&](const ExpertOperands& expert) -> Status {
    MARLIN_RETURN_IF_ERROR(check(expert.gate, problem.x_type));
    MARLIN_RETURN_IF_ERROR(check(expert.up, problem.x_type));
    return check(expert.down, DType::kF32);
  };
  for (const ExpertOperands& expert : layer.experts) MARLIN_RETURN_IF_ERROR(check_expert(expert));
  MARLIN_RETURN_IF_ERROR(check_expert(layer.shared));
  return check({layer.shared_gate, 0, nullptr}, problem.x_type);
}

/// Runs passes over the tokens in order.
class MetalExperts final : public PlannedExperts {
 public:
  MetalExperts(const ExpertsProblem& problem, const LayerExperts& layer,
               std::shared_ptr<const ExpertTable> table, Driver& driver,
               std::shared_ptr<ErrorWords> errors, const PassLimits& limits)
      : problem_(problem),
        layer_(layer),
        table_(std::move(table)),
        driver_(driver),
        errors_(std::move(errors)),
        tokens_of_pass_(TokensOfPass(problem, layer, table_->inner_stride(), limits)),
        whole_(PlanPass(tokens_of_pass_)),
        last_(PlanPass(problem.tokens % tokens_of_pass_)) {}

  int64_t workspace_bytes() const override {
    return std::max(Bytes(whole_), last_.pass.tokens == 0 ? 0 : Bytes(last_));
  }

  Status Run(const ExpertsCall& call) const override {
    for (int64_t first = 0; first < problem_.tokens; first += tokens_of_pass_) {
      ExpertsCall part = call;
      part.x = static_cast<const std::byte*>(call.x) +
               first * call.x_stride * DTypeBytes(problem_.x_type);
      part.out = static_cast<std::byte*>(call.out) +
                 first * call.out_stride * DTypeBytes(problem_.out_type);
      part.ids += first * problem_.top_k;
      part.weights += first * problem_.top_k;
      const bool whole = problem_.tokens - first >= tokens_of_pass_;
      MARLIN_RETURN_IF_ERROR(RunPass(whole ? whole_ : last_, part, first));
    }
    return Status();
  }

 private:
  PlannedPass PlanPass(int64_t tokens) const {
    PlannedPass planned;
    planned.pass.tokens = tokens;
    planned.pass.top_k = problem_.top_k;
    planned.pass.present = table_->present_experts();
    planned.pass.shared = layer_.shared.present();
    planned.pass.batch_invariant = problem_.determinism == Determinism::kBatchInvariant;
    planned.tiling = TileExperts(planned.pass, driver_.Shape());
    planned.unsorted = IsBestUnsorted(planned.pass, *table_);
    return planned;
  }

  int64_t Bytes(const PlannedPass& planned) const {
    return LayOutArrays(planned, layer_, *table_, nullptr).bytes;
  }

  Status RunPass(const PlannedPass& planned, const ExpertsCall& call, int64_t first) const {
    MARLIN_ASSIGN_OR_RETURN(const std::shared_ptr<ErrorWords::Word> error, errors_->Take());
    const std::vector<KernelLaunch> launches =
        ExpertLaunches(planned, problem_, layer_, *table_, call, error.get());
    const auto check = [error, first, top_k = problem_.top_k,
                        experts = static_cast<int64_t>(layer_.experts.size())] {
      if (error->selection == kernels::kNoSelection) return Status();
      return WrongExpert({first + error->selection / top_k, error->selection % top_k}, error->id,
                         experts);
    };
    return driver_.RunAndCheck(launches, call.stream, check);
  }

  const ExpertsProblem problem_;
  const LayerExperts& layer_;
  const std::shared_ptr<const ExpertTable> table_;
  Driver& driver_;
  const std::shared_ptr<ErrorWords> errors_;
  const int64_t tokens_of_pass_;
  const PlannedPass whole_;
  const PlannedPass last_;  ///< Without tokens: every pass is whole.
};

}  // namespace

Result<std::shared_ptr<const ExpertTable>> ExpertPlanner::TableOf(const LayerExperts& layer) const {
  const std::lock_guard lock(mutex_);
  std::erase_if(tables_, [](const auto& known) { return known.second.expired(); });
  std::weak_ptr<const ExpertTable>& known = tables_[&layer];
  if (std::shared_ptr<const ExpertTable> table = known.lock()) return table;
  MARLIN_ASSIGN_OR_RETURN(std::shared_ptr<const ExpertTable> table,
                          ExpertTable::Make(layer, driver_));
  known = table;
  return table;
}

Result<std::shared_ptr<const PlannedExperts>> ExpertPlanner::Plan(const ExpertsProblem& problem,
                                                                  const LayerExperts& layer,
                                                                  const SelectGemm& select,
                                                                  const PassLimits& limits) const {
  MARLIN_RETURN_IF_ERROR(CheckGemms(problem, layer, select));
  MARLIN_ASSIGN_OR_RETURN(std::shared_ptr<const ExpertTable> table, TableOf(layer));
  return {std::make_shared<const MetalExperts>(problem, layer, std::move(table), driver_, errors_,
                                               limits)};
}

}  // namespace marlin::metal
