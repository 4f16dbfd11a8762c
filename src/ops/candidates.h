// Every way to run one product: what bench compares and tune chooses from.
#pragma once

#include <string>
#include <vector>

#include "marlin/gemm.h"

namespace marlin {

struct GemmCandidate {
  std::string name;  ///< What GemmOptions::kernel takes: "marlin_gemm_wgmma@128x2".
  std::string accuracy;
  int64_t workspace_bytes = 0;
  bool planned = false;     ///< What runs when no kernel is named.
  bool selectable = false;  ///< What rules choose, or may be replaced with by a table (MayReplace).
};

/// Every kernel that supports the product, in every variant; `options.kernel` does not count.
/// Errors: those of PlanGemm.
Result<std::vector<GemmCandidate>> ListCandidates(const Device& device, const TensorView& a,
                                                  const PreparedWeights& weights,
                                                  const MutableTensorView& out,
                                                  const GemmOptions& options);

}  // namespace marlin
