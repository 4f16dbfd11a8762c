#include "backends/metal/moe/pass_launches.h"

#include "backends/metal/gemm/product_launches.h"
#include "backends/metal/gemm/strip_layout.h"
#include "backends/metal/kernels/moe/expert_parameters.h"
#include "base/checked.h"

namespace marlin::metal {
namespace {

bool IsAligned(const ExpertsCall& call, DType type) {
  constexpr uintptr_t kVector = 16;
  return reinterpret_cast<uintptr_t>(call.x) % kVector == 0 &&
         static_cast<uintptr_t>(call.x_stride * DTypeBytes(type)) % kVector == 0;
}

}  // namespace

PassLaunches::PassLaunches(const PlannedPass& planned, const ExpertsProblem& problem,
                           const LayerExperts& layer, const ExpertTable& table,
                           const ExpertsCall& call)
    : pass_(planned.pass),
      tiling_(planned.tiling),
      problem_(problem),
      layer_(layer),
      table_(table),
      call_(call),
      arrays_(LayOutArrays(planned, layer, table, call.workspace)) {}

MemoryRange PassLaunches::Ids() const {
  return {call_.ids, pass_.selections() * int64_t{sizeof(int32_t)}};
}

MemoryRange PassLaunches::RoutingWeights() const {
  return {call_.weights, pass_.selections() * int64_t{sizeof(float)}};
}

PassLaunches::Rows PassLaunches::XRows() const {
  const DType type = problem_.x_type;
  const int64_t bytes = ExtentBytes(pass_.tokens, layer_.hidden, call_.x_stride, type);
  return {{call_.x, bytes}, call_.x_stride, type, IsAligned(call_, type), true};
}

PassLaunches::Rows PassLaunches::InnerRows() const {
  return {arrays_.inner, table_.inner_stride(), DType::kF32, true, false};
}

KernelLaunch PassLaunches::Launch(std::string_view source, std::string_view function,
                                  uint32_t threads) const {
  KernelLaunch launch;
  launch.source = source;
  launch.function = function;
  launch.threads = threads;
  kernels::ExpertParameters p{};
  p.tokens = static_cast<int32_t>(pass_.tokens);
  p.top_k = static_cast<int32_t>(pass_.top_k);
  p.experts = static_cast<int32_t>(layer_.experts.size());
  if (pass_.shared) {
    p.shared =
        layer_.shared_gate == nullptr ? kernels::kSharedWithoutGate : kernels::kSharedWithGate;
  }
  p.columns = static_cast<int32_t>(layer_.hidden);
  p.most_few_rows = static_cast<int32_t>(tiling_.most_few_rows);
  p.few_tile_rows = static_cast<int32_t>(tiling_.few_tile_rows);
  p.many_tile_rows = static_cast<int32_t>(tiling_.many_tile_rows);
  p.few_tiles = static_cast<int32_t>(tiling_.few_tiles);
  p.many_tiles = static_cast<int32_t>(tiling_.many_tiles);
  p.gate_limit = problem_.gate.limit;
  p.gate_alpha = problem_.gate.alpha;
  launch.other_parameters = ParameterBlock(p);
  return launch;
}

KernelLaunch PassLaunches::GemmLaunch(std::string_view source, std::string_view function,
                                      uint32_t threads, const MatrixGroup& group,
                                      const Rows& from) const {
  KernelLaunch launch = Launch(source, function, threads);
  launch.reached = table_.reached();
  launch.constants = group.constants;
  launch.constants[MARLIN_CONSTANT_INPUT_TYPE] = ElementTypeOf(from.type);
  launch.constants[MARLIN_CONSTANT_ALIGNED_INPUT] = from.aligned ? 1 : 0;
  launch.constants[MARLIN_CONSTANT_GATHERED] = from.gathered ? 1 : 0;
  if (group.gated()) SetGate(&launch);
  auto& p = launch.other_parameters.As<kernels::ExpertParameters>();
  p.input_stride = from.stride;
  p.first_part = group.part;
  Read(MARLIN_BUFFER_EXPERTS, table_.matrices(), &launch);
  Read(MARLIN_BUFFER_INPUT, from.memory, &launch);
  return launch;
}

void PassLaunches::SetGate(KernelLaunch* launch) const {
  launch->constants[MARLIN_CONSTANT_ACTIVATION] = static_cast<int32_t>(problem_.gate.activation);
  launch->constants[MARLIN_CONSTANT_GATE_LIMITED] = problem_.gate.limit > 0 ? 1 : 0;
}

void PassLaunches::WriteOut(KernelLaunch* launch) const {
  launch->constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(problem_.out_type);
  launch->other_parameters.As<kernels::ExpertParameters>().output_stride = call_.out_stride;
  const int64_t bytes =
      ExtentBytes(pass_.tokens, layer_.hidden, call_.out_stride, problem_.out_type);
  Write(MARLIN_BUFFER_OUTPUT, {call_.out, bytes}, launch);
}

KernelLaunch PassLaunches::SumLaunch() const {
  KernelLaunch launch = Launch("combine_experts.metal", "moe_sum_experts", kColumnThreads);
  launch.threadgroups = {static_cast<uint32_t>(CeilDivide(layer_.hidden, kColumnThreads)),
                         static_cast<uint32_t>(pass_.tokens), 1};
  launch.other_parameters.As<kernels::ExpertParameters>().input_stride = layer_.hidden;
  Read(MARLIN_BUFFER_EXPERTS, table_.matrices(), &launch);
  Read(MARLIN_BUFFER_INPUT, arrays_.results, &launch);
  WriteOut(&launch);
  Read(MARLIN_BUFFER_SLOT_WEIGHTS, RoutingWeights(), &launch);
  return launch;
}

}  // namespace marlin::metal
