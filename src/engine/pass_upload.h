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
#include "engine/recurrent_turns.h"
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
  /// For each of these, if not all are the only row of an input, or samplers are out of order: its
  /// sampler, or -1.
  std::vector<int32_t> state_rows;
  /// For each wanted row, if any has another use than to be sampled: the token whose
  /// log-probability it gives; kNoToken: the one sampled.
  std::vector<int32_t> targets;
  std::vector<int32_t> drafts;  ///< For each wanted row, if any has one: as in SampleTokensCall.
  std::vector<int32_t> masks;   ///< The words of all masks.
  /// The mask of each wanted row, or -1, if there is a mask.
  std::vector<int32_t> mask_rows;
  std::vector<const KvCache*> caches;
  std::vector<PassSequence> sequences;
};

/// The upload of one pass.
class PassUpload {
 public:
  PassUpload(const Model::Impl& model, const Wanted& wanted, const PassRows& rows)
      : model_(model), wanted_(wanted), rows_(rows) {}

  /// Uploads, and sets the views of what was uploaded.
  Status Send(Arena& arena, StepValues* values);
  /// The counts, then the tokens of a pass of several steps, as StepsWanted has them.
  const TensorView& step_results() const { return step_results_; }

 private:
  /// The places of a group's tables in an upload.
  struct GroupParts {
    IndexUpload::Part blocks;
    IndexUpload::Part continued;           ///< For a recurrent group and several steps.
    std::vector<IndexUpload::Part> turns;  ///< For a recurrent group: its pages.
    IndexUpload::Part pages;               ///< Empty: the pass expands none.
    IndexUpload::Part tokens;
    IndexUpload::Part expanded_blocks;
  };
  /// The places of a turn's vectors.
  struct TurnParts {
    IndexUpload::Part positions;
    IndexUpload::Part first_rows;
  };
  /// The places of a pass's vectors in its upload.
  struct PassParts {
    IndexUpload::Part ids;
    IndexUpload::Part positions;
    IndexUpload::Part first_rows;
    IndexUpload::Part wanted;
    IndexUpload::Part sampler_rows;
    IndexUpload::Part targets;
    IndexUpload::Part drafts;
    IndexUpload::Part masks;
    IndexUpload::Part mask_rows;
    std::vector<TurnParts> turns;
    std::vector<GroupParts> groups;
    IndexUpload::Part stop_ids;  ///< From here on: for several steps.
    IndexUpload::Part results;   ///< Counts [inputs], then tokens [inputs, steps].
  };

  std::vector<TurnParts> AddTurns();
  GroupParts AddGroup(size_t group);
  void ViewTurns(const PassParts& parts, StepValues* values) const;
  Status ViewGroup(const GroupParts& parts, StepValues* values) const;
  Status ViewSteps(const PassParts& parts, StepValues* values);
  Status ViewSampling(const PassParts& parts, StepValues* values) const;
  std::vector<int32_t> BlockTables(size_t group, int64_t fed) const;
  std::vector<int32_t> StatePages(size_t group, const PlannedTurn& turn) const;

  const Model::Impl& model_;
  const Wanted& wanted_;
  const PassRows& rows_;
  std::vector<PlannedTurn> turns_;  ///< Empty: one of all rows.
  IndexUpload upload_;
  TensorView step_results_;
};

}  // namespace marlin
