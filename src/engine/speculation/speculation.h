// Makes what guesses the tokens of texts.
#pragma once

#include <memory>
#include <optional>

#include "engine/speculation/draft_samplers.h"
#include "engine/speculation/drafter.h"
#include "marlin/model.h"
#include "marlin/speculation.h"
#include "marlin/status.h"

namespace marlin {

/// Errors: kInvalidArgument naming the option, as Model::draft and CheckDraftModel.
Status CheckSpeculation(const Model& model, const SpeculationOptions& options);

/// Makes the drafters of texts, which share samplers and guess together.
class Speculation {
 public:
  /// Precondition: CheckSpeculation. Errors: kOutOfMemory.
  static Result<Speculation> Make(const Model& model, const SpeculationOptions& options);

  /// Null where nothing is to be guessed.
  std::unique_ptr<Drafter> NewDrafter() const;

 private:
  SpeculationOptions options_;
  int64_t vocab_ = 0;
  std::optional<Model> draft_;  ///< The layer or the model.
  std::shared_ptr<DraftSamplers> samplers_;
};

}  // namespace marlin
