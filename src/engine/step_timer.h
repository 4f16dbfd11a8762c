// The time of each operation of a pass, for profiles.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "marlin/status.h"
#include "plan/gemm/backend.h"

namespace marlin {

/// The operations of a pass that a profile tells apart.
enum class StepPart : uint8_t {
  kEmbed,
  kNorm,      ///< With the residual addition before it.
  kResidual,  ///< Where no norm follows.
  kQkv,       ///< All projections before attention.
  kRotateAppend,
  kAttention,
  kHeadProduct,  ///< Queries and results times matrices of their heads.
  kOut,
  kGateUp,  ///< With the activation.
  kDown,
  kRouter,  ///< With the selection.
  kExperts,
  kHead,
  kSample,
  kCopy,   ///< Hidden states from the host to the device.
  kFused,  ///< Runs of operations that the device has fused.
};
inline constexpr size_t kStepParts = static_cast<size_t>(StepPart::kFused) + 1;

/// "embed", "norm", ...
std::string_view StepPartName(StepPart part);

/// Times the operations of passes that run one after another on one stream.
class StepTimer {
 public:
  struct Sum {
    int64_t count = 0;
    double seconds = 0;
  };
  using Sums = std::array<Sum, kStepParts>;

  explicit StepTimer(std::unique_ptr<StreamMarks> marks) : marks_(std::move(marks)) {}
  Status BeginPass() { return marks_->Mark(); }
  /// The work since the last call of this or of BeginPass was an operation of `part`.
  Status End(StepPart part);
  /// Waits for the pass, and adds its times.
  Status EndPass();
  /// The sums of all passes since the last call.
  Sums Take() { return std::exchange(sums_, Sums()); }

 private:
  std::unique_ptr<StreamMarks> marks_;
  std::vector<StepPart> parts_;
  Sums sums_ = {};
};

}  // namespace marlin
