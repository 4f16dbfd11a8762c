// Lists every way to run one GEMM, for bench to compare and tune to choose from.
#pragma once

#include <string>
#include <vector>

#include "marlin/gemm.h"

namespace marlin {

struct GemmCandidate {
  std::string name;  ///< A value of GemmOptions::kernel: "marlin_gemm_wgmma@128x2".
  std::string accuracy;
  int64_t workspace_bytes = 0;
  bool planned = false;     ///< Runs when no kernel is named.
  bool selectable = false;  ///< Estimated, or eligible for a tuning table (MayReplace).
};

/// Every kernel that supports the GEMM, in every variant; ignores `options.kernel`. Errors: as for
/// PlanGemm.
Result<std::vector<GemmCandidate>> ListCandidates(const Device& device, const TensorView& a,
                                                  const PreparedWeights& weights,
                                                  const MutableTensorView& out,
                                                  const GemmOptions& options);

}  // namespace marlin
