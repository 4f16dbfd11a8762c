// Base of the launches of a pass of experts, whether its selections are sorted or not.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/metal/moe/expert_launches.h"
#include "backends/metal/moe/expert_table.h"
#include "backends/metal/runtime/driver.h"
#include "plan/moe/experts.h"

namespace marlin::metal {

inline uint32_t ToU32(int64_t count) { return static_cast<uint32_t>(count); }

/// The launches of one pass, in order. The operands must outlive it.
class PassLaunches {
 public:
  std::vector<KernelLaunch> Take() { return std::move(launches_); }

 protected:
  /// Threads per threadgroup of the elementwise kernels, along n.
  static constexpr int64_t kColumnThreads = 256;

  PassLaunches(const PlannedPass& planned, const ExpertsProblem& problem, const LayerExperts& layer,
               const ExpertTable& table, const ExpertsCall& call);

  /// The rows that GEMMs read.
  struct Rows {
    MemoryRange memory;
    int64_t stride;
    DType type;
    bool aligned;
    bool gathered;
  };
  /// The f32 rows of all slots that GEMMs write.
  struct SlotRows {
    MemoryRange memory;
    int64_t stride;
  };

  static void Read(int index, const MemoryRange& range, KernelLaunch* launch) {
    launch->buffers.push_back({index, range.data, range.bytes});
  }
  static void Write(int index, const MemoryRange& range, KernelLaunch* launch) {
    launch->buffers.push_back({index, range.data, range.bytes, true, false});
  }
  static void Update(int index, const MemoryRange& range, KernelLaunch* launch) {
    launch->buffers.push_back({index, range.data, range.bytes, true, true});
  }

  MemoryRange Ids() const;
  MemoryRange RoutingWeights() const;
  /// Without a gate of the shared expert there are no scores, and `instead` is not read.
  const MemoryRange& ScoresOr(const MemoryRange& instead) const {
    return arrays_.scores.bytes > 0 ? arrays_.scores : instead;
  }
  Rows XRows() const;
  Rows InnerRows() const;

  /// A launch with the parameters that all have.
  KernelLaunch Launch(std::string_view source, std::string_view function, uint32_t threads) const;
  /// The same for matrices of a group, with the rows that they are multiplied with.
  KernelLaunch GemmLaunch(std::string_view source, std::string_view function, uint32_t threads,
                          const MatrixGroup& group, const Rows& from) const;
  void SetGate(KernelLaunch* launch) const;
  /// Binds the output of the pass.
  void WriteOut(KernelLaunch* launch) const;
  /// The weighted sum of the results of all slots.
  KernelLaunch SumLaunch() const;

  const ExpertPass& pass_;
  const ExpertTiling& tiling_;
  const ExpertsProblem& problem_;
  const LayerExperts& layer_;
  const ExpertTable& table_;
  const ExpertsCall& call_;
  const ExpertArrays arrays_;
  std::vector<KernelLaunch> launches_;
};

}  // namespace marlin::metal
