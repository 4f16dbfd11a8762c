// The experts of a layer on two sides: a device, and the CPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "marlin/expert_placement.h"
#include "plan/moe/experts.h"

namespace marlin {

class HostStaging;

struct PlacedExperts::Storage {
  ExpertSet on_device;
  ExpertSet on_host;
  std::vector<bool> is_on_host;  ///< By expert.
  int64_t device_count = 0;
  int64_t hidden = 0;

  struct Counters {
    std::atomic<int64_t> runs{0};
    std::atomic<int64_t> device_selections{0};
    std::atomic<int64_t> host_selections{0};
    std::atomic<int64_t> host_rows{0};
  };
  mutable Counters counters;
};

/// The plan of placed experts with some on the host.
class PlacedPlan final : public PlannedExperts {
 public:
  /// Plans both sides. Errors: as for PlanExperts. Precondition: a checked problem with tokens.
  static Result<std::shared_ptr<const PlannedExperts>> Make(const Device& device,
                                                            const ExpertsProblem& problem,
                                                            const PlacedExperts& experts);

  int64_t workspace_bytes() const override { return workspace_bytes_; }
  Status Run(const ExpertsCall& call) const override;

 private:
  /// Offsets into the host memory of a run.
  struct HostLayout {
    int64_t x = 0;
    int64_t ids = 0;
    int64_t weights = 0;
    int64_t slot_of = 0;  ///< AddRowsCall::slot_of, followed by its rows.
    int64_t sums = 0;
    int64_t bytes = 0;
  };
  struct HostRows;

  PlacedPlan(const Device& device, const ExpertsProblem& problem, const PlacedExperts& experts);
  const PlacedExperts::Storage& experts() const { return *Internals::Storage(experts_); }
  /// The problem of the host's part with `rows` rows.
  ExpertsProblem HostProblem(int64_t rows) const;
  void LayOut();
  Status RunWith(const ExpertsCall& call, HostStaging& staging) const;
  Status CopyToHost(const ExpertsCall& call, HostStaging& staging) const;
  Status RunOnDevice(const ExpertsCall& call) const;
  Result<HostRows> GatherRows(HostStaging& staging) const;
  Status RunOnHost(int64_t rows, HostStaging& staging) const;

  const Device device_;
  const Device host_;
  const ExpertsProblem problem_;
  const PlacedExperts experts_;
  ExpertsPlan device_plan_;
  HostLayout at_;
  bool runs_on_device_ = false;  ///< Whether the device has any expert.
  int64_t sum_at_ = 0;           ///< Offsets into the workspace.
  int64_t host_sums_at_ = 0;     ///< The copy of HostLayout from slot_of on.
  int64_t device_plan_at_ = 0;
  int64_t workspace_bytes_ = 0;
};

}  // namespace marlin
