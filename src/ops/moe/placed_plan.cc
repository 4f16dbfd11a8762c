#include "ops/moe/placed_plan.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "ops/device/device.h"
#include "ops/moe/experts_state.h"
#include "plan/gemm/host_staging.h"
#include "plan/moe/expert_slots.h"

namespace marlin {
namespace {

/// Adds a part to a layout that has `bytes` so far, and returns its offset.
int64_t AddPart(int64_t* bytes, int64_t size) {
  const int64_t offset = *bytes;
  *bytes += RoundUp(size, kBufferAlignment);
  return offset;
}

}  // namespace

/// The tokens with a selection on the host.
struct PlacedPlan::HostRows {
  int64_t count = 0;
  int64_t selections = 0;  ///< Selections of experts on the host.
};

PlacedPlan::PlacedPlan(const Device& device, const ExpertsProblem& problem,
                       const PlacedExperts& experts)
    : device_(device),
      host_(Internals::Make<Device>(
          Internals::Storage(Internals::Storage(experts)->on_host)->device)),
      problem_(problem),
      experts_(experts) {}

Result<std::shared_ptr<const PlannedExperts>> PlacedPlan::Make(const Device& device,
                                                               const ExpertsProblem& problem,
                                                               const PlacedExperts& experts) {
  const std::shared_ptr<PlacedPlan> plan(new PlacedPlan(device, problem, experts));
  ExpertsProblem on_device = problem;
  on_device.out_type = DType::kF32;
  MARLIN_ASSIGN_OR_RETURN(plan->device_plan_,
                          PlanExperts(device, on_device, plan->experts().on_device));
  // Errors come now, and the set of experts remembers the plan.
  MARLIN_RETURN_IF_ERROR(
      PlanExperts(plan->host_, plan->HostProblem(problem.tokens), plan->experts().on_host)
          .status());
  plan->LayOut();
  return std::shared_ptr<const PlannedExperts>(plan);
}

ExpertsProblem PlacedPlan::HostProblem(int64_t rows) const {
  ExpertsProblem problem = problem_;
  problem.out_type = DType::kF32;
  // Plans of powers of two are few enough for the set to remember.
  problem.tokens =
      std::min(problem_.tokens, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows))));
  return problem;
}

void PlacedPlan::LayOut() {
  runs_on_device_ = experts().on_device.hidden() > 0;
  const int64_t tokens = problem_.tokens;
  const int64_t row_bytes = experts().hidden * 4;
  const int64_t selections = tokens * problem_.top_k;
  at_.x = AddPart(&at_.bytes, tokens * experts().hidden * DTypeBytes(problem_.x_type));
  at_.ids = AddPart(&at_.bytes, selections * 4);
  at_.weights = AddPart(&at_.bytes, selections * 4);
  at_.slot_of = AddPart(&at_.bytes, tokens * 4);
  at_.sums = AddPart(&at_.bytes, tokens * row_bytes);
  sum_at_ = AddPart(&workspace_bytes_, runs_on_device_ ? tokens * row_bytes : 0);
  host_sums_at_ = AddPart(&workspace_bytes_, at_.bytes - at_.slot_of);
  device_plan_at_ = AddPart(&workspace_bytes_, device_plan_.workspace_bytes());
}

Status PlacedPlan::Run(const ExpertsCall& call) const {
  Device::Impl& device = Internals::Impl(device_);
  MARLIN_RETURN_IF_ERROR(device.backend().CheckHostMayWait(call.stream));
  MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<HostStaging> staging, device.TakeStaging(at_.bytes));
  Status status = RunWith(call, *staging);
  // After an error copies may still be on the stream.
  if (!status.ok()) (void)staging->Record(call.stream);
  device.ReturnStaging(std::move(staging));
  return status;
}

Status PlacedPlan::RunWith(const ExpertsCall& call, HostStaging& staging) const {
  const Backend& backend = Internals::Impl(device_).backend();
  MARLIN_RETURN_IF_ERROR(CopyToHost(call, staging));
  MARLIN_RETURN_IF_ERROR(staging.Record(call.stream));
  // The device's part is enqueued before the host waits for the copies, so that both run at once.
  if (runs_on_device_) MARLIN_RETURN_IF_ERROR(RunOnDevice(call));
  MARLIN_RETURN_IF_ERROR(staging.Wait());
  MARLIN_ASSIGN_OR_RETURN(const HostRows rows, GatherRows(staging));
  AddRowsCall add;
  add.sum = runs_on_device_ ? reinterpret_cast<const float*>(call.workspace + sum_at_) : nullptr;
  add.tokens = problem_.tokens;
  add.width = experts().hidden;
  add.out = call.out;
  add.out_stride = call.out_stride;
  add.out_type = problem_.out_type;
  if (rows.count > 0) {
    MARLIN_RETURN_IF_ERROR(RunOnHost(rows.count, staging));
    std::byte* const sums = call.workspace + host_sums_at_;
    const int64_t rows_at = at_.sums - at_.slot_of;
    MARLIN_RETURN_IF_ERROR(backend.CopyToDeviceAsync(
        sums, staging.data() + at_.slot_of, rows_at + rows.count * add.width * 4, call.stream));
    MARLIN_RETURN_IF_ERROR(staging.Record(call.stream));
    add.slot_of = reinterpret_cast<const int32_t*>(sums);
    add.rows = reinterpret_cast<const float*>(sums + rows_at);
    add.slots = rows.count;
  }
  MARLIN_RETURN_IF_ERROR(backend.AddRows(add, call.stream));
  PlacedExperts::Storage::Counters& counters = experts().counters;
  counters.runs += 1;
  counters.device_selections += problem_.tokens * problem_.top_k - rows.selections;
  counters.host_selections += rows.selections;
  counters.host_rows += rows.count;
  return {};
}

Status PlacedPlan::CopyToHost(const ExpertsCall& call, HostStaging& staging) const {
  const Backend& backend = Internals::Impl(device_).backend();
  const int64_t element = DTypeBytes(problem_.x_type);
  const RowsCopy x = {staging.data() + at_.x, call.x, problem_.tokens, experts().hidden * element,
                      call.x_stride * element};
  const int64_t selections_bytes = problem_.tokens * problem_.top_k * 4;
  MARLIN_RETURN_IF_ERROR(backend.CopyRowsToHostAsync(x, call.stream));
  MARLIN_RETURN_IF_ERROR(
      backend.CopyToHostAsync(staging.data() + at_.ids, call.ids, selections_bytes, call.stream));
  return backend.CopyToHostAsync(staging.data() + at_.weights, call.weights, selections_bytes,
                                 call.stream);
}

Status PlacedPlan::RunOnDevice(const ExpertsCall& call) const {
  const Shape rows{problem_.tokens, experts().hidden};
  const Shape selections{problem_.tokens, problem_.top_k};
  ExpertsArguments arguments;
  arguments.workspace = call.workspace + device_plan_at_;
  arguments.workspace_bytes = device_plan_.workspace_bytes();
  arguments.stream = call.stream;
  return device_plan_.Run({call.x, problem_.x_type, rows, {call.x_stride, 1}},
                          {call.ids, DType::kI32, selections},
                          {call.weights, DType::kF32, selections},
                          {call.workspace + sum_at_, DType::kF32, rows}, arguments);
}

/// Moves the rows with a selection on the host to the front, in order.
Result<PlacedPlan::HostRows> PlacedPlan::GatherRows(HostStaging& staging) const {
  const auto experts_count = static_cast<int64_t>(experts().is_on_host.size());
  const int64_t top_k = problem_.top_k;
  const int64_t row_bytes = experts().hidden * DTypeBytes(problem_.x_type);
  std::byte* const x = staging.data() + at_.x;
  auto* const ids = reinterpret_cast<int32_t*>(staging.data() + at_.ids);
  auto* const weights = reinterpret_cast<float*>(staging.data() + at_.weights);
  auto* const slot_of = reinterpret_cast<int32_t*>(staging.data() + at_.slot_of);
  HostRows rows;
  for (int64_t t = 0; t < problem_.tokens; ++t) {
    int64_t on_host = 0;
    for (int64_t s = 0; s < top_k; ++s) {
      const int32_t id = ids[t * top_k + s];
      if (id < 0 || id >= experts_count) return WrongExpert({t, s}, id, experts_count);
      on_host += experts().is_on_host[static_cast<size_t>(id)] ? 1 : 0;
    }
    slot_of[t] = on_host > 0 ? static_cast<int32_t>(rows.count) : -1;
    if (on_host == 0) continue;
    const int64_t to = rows.count++;
    rows.selections += on_host;
    if (to == t) continue;
    std::memcpy(x + to * row_bytes, x + t * row_bytes, static_cast<size_t>(row_bytes));
    std::copy_n(ids + t * top_k, top_k, ids + to * top_k);
    std::copy_n(weights + t * top_k, top_k, weights + to * top_k);
  }
  if (rows.count == 0) return rows;
  // The rows that fill up the host's plan select nothing that is there.
  const auto first_on_device =
      std::find(experts().is_on_host.begin(), experts().is_on_host.end(), false);
  const auto elsewhere =
      static_cast<int32_t>(std::distance(experts().is_on_host.begin(), first_on_device));
  const int64_t planned = HostProblem(rows.count).tokens;
  std::fill(ids + rows.count * top_k, ids + planned * top_k, elsewhere);
  return rows;
}

Status PlacedPlan::RunOnHost(int64_t rows, HostStaging& staging) const {
  const ExpertsProblem problem = HostProblem(rows);
  MARLIN_ASSIGN_OR_RETURN(const ExpertsPlan plan, PlanExperts(host_, problem, experts().on_host));
  const Shape shape{problem.tokens, experts().hidden};
  const Shape selections{problem.tokens, problem.top_k};
  return plan.Run({staging.data() + at_.x, problem.x_type, shape},
                  {staging.data() + at_.ids, DType::kI32, selections},
                  {staging.data() + at_.weights, DType::kF32, selections},
                  {staging.data() + at_.sums, DType::kF32, shape});
}

}  // namespace marlin
