#include "backends/metal/moe/decode_launches.h"

#include <algorithm>
#include <string_view>

#include "backends/metal/kernels/moe/expert_parameters.h"
#include "backends/metal/moe/pass_launches.h"
#include "backends/metal/plan/launch_plan.h"
#include "base/checked.h"

namespace marlin::metal {
namespace {

using kernels::ExpertParameters;
using kernels::kLanes;
using kernels::kStripOutputs;

constexpr std::string_view kSource = "expert_decode.metal";
constexpr int64_t kDownSimdgroups = 8;

ExpertParameters& ParametersOf(KernelLaunch* launch) {
  return launch->other_parameters.As<ExpertParameters>();
}

class UnsortedLaunches : public PassLaunches {
 public:
  UnsortedLaunches(const PlannedPass& planned, const ExpertsProblem& problem,
                   const LayerExperts& layer, const ExpertTable& table, const ExpertsCall& call)
      : PassLaunches(planned, problem, layer, table, call) {}

  std::vector<KernelLaunch> Build(ErrorWords::Word* error) {
    const SlotRows inner{arrays_.inner, table_.inner_stride()};
    for (const MatrixGroup& group : table_.first_groups()) AddGateUp(group, inner, error);
    // The shared expert without its kind among the others', as its gate has: rows of tokens.
    for (const MatrixGroup& group : table_.score_groups()) {
      AddGateUp(group, {arrays_.scores, 1}, error);
    }
    const bool sums = table_.down_groups().size() == 1;
    for (const MatrixGroup& group : table_.down_groups()) AddDown(group, sums);
    if (!sums) AddSum();
    return Take();
  }

 private:
  /// The rows of a group of gate and up, or of the shared expert's gate.
  void AddGateUp(const MatrixGroup& group, const SlotRows& to, ErrorWords::Word* error) {
    const int64_t strips = CeilDivide(group.columns, int64_t{kStripOutputs});
    const int64_t first_slot = group.routed ? 0 : pass_.selections();
    const int64_t end_slot = group.shared ? pass_.slots() : pass_.selections();
    KernelLaunch launch =
        GemmLaunch(kSource, GateUpFunction(group),
                   ToU32(GemvSimdgroups(strips, group.chunks, false) * kLanes), group, XRows());
    launch.constants[MARLIN_CONSTANT_GATHERED] = 0;
    launch.threadgroups = {ToU32(strips), ToU32(end_slot - first_slot), 1};
    ExpertParameters& p = ParametersOf(&launch);
    p.output_stride = to.stride;
    p.first_slot = static_cast<int32_t>(first_slot);
    p.reports = launches_.empty() ? 1 : 0;
    if (p.reports != 0) {
      Write(MARLIN_BUFFER_WRONG_ID, {error, sizeof(*error)}, &launch);
    } else {
      Read(MARLIN_BUFFER_WRONG_ID, RoutingWeights(), &launch);  // Not touched.
    }
    Read(MARLIN_BUFFER_IDS, Ids(), &launch);
    Write(MARLIN_BUFFER_OUTPUT, to.memory, &launch);
    launches_.push_back(std::move(launch));
  }

  static std::string_view GateUpFunction(const MatrixGroup& group) {
    if (!group.gated()) return "moe_shared_score";
    if (!group.routed) return "moe_shared_expert";
    const bool fp4 = group.constants[MARLIN_CONSTANT_CODE_KIND] == kernels::kCodesFp4;
    return fp4 ? "moe_expert_gemm_fp4" : "moe_gate_up_1";
  }

  /// Simdgroups that share the k of a slot: all have work where a token has few slots.
  int64_t PartsOfSlot(const MatrixGroup& group) const {
    const int64_t slots = pass_.top_k + (pass_.shared ? 1 : 0);
    int64_t parts = 1;
    while (2 * parts * slots <= kDownSimdgroups && 2 * parts <= group.chunks) parts *= 2;
    return parts;
  }

  /// `sums`: the launch adds the results; otherwise it stores them.
  void AddDown(const MatrixGroup& group, bool sums) {
    const int64_t strips = CeilDivide(group.columns, int64_t{kStripOutputs});
    KernelLaunch launch =
        GemmLaunch(kSource, "moe_down_sum_1", ToU32(kDownSimdgroups * kLanes), group, InnerRows());
    launch.threadgroups = {ToU32(strips), ToU32(pass_.tokens), 1};
    launch.constants[MARLIN_CONSTANT_PARTIAL] = sums ? 0 : 1;
    ExpertParameters& p = ParametersOf(&launch);
    p.parts_of_slot = static_cast<int32_t>(PartsOfSlot(group));
    const MemoryRange table{group.table.data, group.table.bytes};
    Read(MARLIN_BUFFER_TABLE, table.bytes > 0 ? table : table_.matrices(), &launch);
    if (sums) {
      WriteOut(&launch);
    } else {
      p.output_stride = layer_.hidden;
      // Launches of other kinds write the other rows.
      Update(MARLIN_BUFFER_OUTPUT, arrays_.results, &launch);
    }
    Read(MARLIN_BUFFER_IDS, Ids(), &launch);
    Read(MARLIN_BUFFER_SLOT_WEIGHTS, RoutingWeights(), &launch);
    Read(MARLIN_BUFFER_SCORES, ScoresOr(RoutingWeights()), &launch);
    launches_.push_back(std::move(launch));
  }

  void AddSum() {
    KernelLaunch launch = SumLaunch();
    ParametersOf(&launch).unsorted = 1;
    Read(MARLIN_BUFFER_SLOT_BEGIN, Ids(), &launch);  // Not read.
    Read(MARLIN_BUFFER_SLOT_OF, Ids(), &launch);
    Read(MARLIN_BUFFER_SCORES, ScoresOr(RoutingWeights()), &launch);
    launches_.push_back(std::move(launch));
  }
};

}  // namespace

bool IsBestUnsorted(const ExpertPass& pass, const ExpertTable& table) {
  const auto has_one_table = [](const MatrixGroup& group) { return group.one_table; };
  const auto has_columns = [](const MatrixGroup& group) { return group.columns > 0; };
  // With more selections than experts, some experts' weights would be read several times.
  return !pass.batch_invariant && pass.selections() <= kernels::kMostUnsorted &&
         (pass.tokens == 1 || pass.selections() <= table.present_experts()) &&
         table.ungated_inner() == 0 && !table.first_groups().empty() &&
         std::ranges::all_of(table.first_groups(), has_columns) &&
         std::ranges::all_of(table.down_groups(), has_one_table);
}

std::vector<KernelLaunch> DecodeLaunches(const PlannedPass& planned, const ExpertsProblem& problem,
                                         const LayerExperts& layer, const ExpertTable& table,
                                         const ExpertsCall& call, ErrorWords::Word* error) {
  return UnsortedLaunches(planned, problem, layer, table, call).Build(error);
}

}  // namespace marlin::metal
