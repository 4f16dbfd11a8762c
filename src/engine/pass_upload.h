// The upload of a pass: everything of it that depends on its tokens, in one copy.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/forward.h"
#include "engine/forward_call.h"
#include "engine/index_upload.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
#include "marlin/status.h"
#include "model/mixer.h"
#include "plan/step/decoder_step.h"

namespace marlin {

/// The rows of a pass.
struct PassRows {
  std::vector<int32_t> ids;
  std::vector<int32_t> positions;
  std::vector<int32_t> first_rows = {0};
  std::vector<int32_t> wanted;  ///< Rows whose logits are wanted.
  std::vector<const KvCache*> caches;
  std::vector<PassSequence> sequences;
};

/// The upload of one pass.
class PassUpload {
 public:
  /// `first_row`: the index of the first wanted row of the pass among all of the call.
  PassUpload(const Model::Impl& model, const Wanted& wanted, const PassRows& rows,
             int64_t first_row)
      : model_(model), wanted_(wanted), rows_(rows), first_row_(first_row) {}

  /// Uploads, and sets the views of what was uploaded.
  Status Send(Arena& arena, StepValues* values);
  /// The counts, then the tokens of a pass of several steps, as StepsWanted has them.
  const TensorView& step_results() const { return step_results_; }

 private:
  /// The places of a group's tables in an upload.
  struct GroupParts {
    IndexUpload::Part blocks;
    IndexUpload::Part pages;  ///< Empty: the pass expands none.
    IndexUpload::Part tokens;
    IndexUpload::Part expanded_blocks;
  };
  /// The places of a pass's vectors in its upload.
  struct PassParts {
    IndexUpload::Part ids;
    IndexUpload::Part positions;
    IndexUpload::Part first_rows;
    IndexUpload::Part wanted;
    IndexUpload::Part sampler_rows;
    std::vector<GroupParts> groups;
    IndexUpload::Part stop_ids;  ///< From here on: for several steps.
    IndexUpload::Part results;   ///< Counts [inputs], then tokens [inputs, steps].
  };

  GroupParts AddGroup(size_t group);
  Status ViewGroup(const GroupParts& parts, StepValues* values) const;
  Status ViewSteps(const PassParts& parts, StepValues* values);
  std::vector<int32_t> SamplerRows() const;
  std::vector<int32_t> BlockTables(size_t group) const;

  const Model::Impl& model_;
  const Wanted& wanted_;
  const PassRows& rows_;
  int64_t first_row_;
  IndexUpload upload_;
  TensorView step_results_;
};

}  // namespace marlin
