#include "engine/speculation/speculation.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "base/errors.h"
#include "base/internals.h"
#include "base/macros.h"
#include "base/printable.h"
#include "engine/model_impl.h"
#include "engine/speculation/layer_drafts.h"
#include "engine/speculation/model_drafts.h"
#include "engine/speculation/prompt_lookup.h"

namespace marlin {
namespace {

std::string NameOf(const Model& model) {
  return Printable(Internals::Impl(model).decoder.checkpoint.path());
}

bool Disjoint(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  return !a.empty() && !b.empty() &&
         std::find_first_of(a.begin(), a.end(), b.begin(), b.end()) == a.end();
}

}  // namespace

std::string_view DraftSourceName(DraftSource source) {
  switch (source) {
    case DraftSource::kLookup:
      return "lookup";
    case DraftSource::kLayer:
      return "mtp";
    case DraftSource::kModel:
      return "model";
  }
  return "unknown";
}

Status CheckDraftModel(const Model& model, const Model& draft) {
  MARLIN_RETURN_IF_ERROR(CheckModel("model", model));
  MARLIN_RETURN_IF_ERROR(CheckModel("draft", draft));
  if (&Internals::Impl(model) == &Internals::Impl(draft)) {
    return Invalid(fmt::format("draft: {} is the model itself", NameOf(model)));
  }
  if (Internals::Impl(draft).decoder.joins()) {
    return Invalid("draft: expected a model, got a layer that predicts further tokens (MTP)");
  }
  const int64_t tokens = model.info().vocab_size;
  const int64_t of_draft = draft.info().vocab_size;
  if (std::abs(tokens - of_draft) > kVocabularyPadding) {
    return Invalid(
        fmt::format("draft: {} has a vocabulary of {} tokens, {} of {}; expected the same",
                    NameOf(draft), of_draft, NameOf(model), tokens));
  }
  const std::vector<int32_t>& ends = model.info().eos_token_ids;
  const std::vector<int32_t>& of_draft_ends = draft.info().eos_token_ids;
  if (Disjoint(ends, of_draft_ends)) {
    return Invalid(fmt::format("draft: {} ends texts with token {}, {} with {}; expected the same",
                               NameOf(draft), of_draft_ends.front(), NameOf(model), ends.front()));
  }
  return {};
}

Status CheckSpeculation(const Model& model, const SpeculationOptions& options) {
  const auto invalid = [](const std::string& what) { return Invalid("speculation." + what); };
  if (options.tokens < 0 || options.tokens > kMostDrafts) {
    return invalid(fmt::format("tokens: expected 0..{}, got {}", kMostDrafts, options.tokens));
  }
  const bool is_model = options.source == DraftSource::kModel;
  if (is_model != options.model.has_value()) {
    return invalid(is_model ? "model: expected one, which kModel needs"
                            : "model: only with the source kModel");
  }
  if (options.tokens == 0) {
    if (options.source == DraftSource::kLookup && !options.always) return {};
    return invalid("tokens: expected 1 or more, got 0");
  }
  if (options.source == DraftSource::kLayer) {
    return model.draft().status().WithContext("speculation");
  }
  return is_model ? CheckDraftModel(model, *options.model).WithContext("speculation") : Status();
}

Result<Speculation> Speculation::Make(const Model& model, const SpeculationOptions& options) {
  Speculation speculation;
  speculation.options_ = options;
  speculation.vocab_ = model.info().vocab_size;
  if (options.tokens == 0 || options.source == DraftSource::kLookup) return speculation;
  speculation.draft_ = options.model;
  if (options.source == DraftSource::kLayer) {
    MARLIN_ASSIGN_OR_RETURN(speculation.draft_, model.draft());
  }
  MARLIN_ASSIGN_OR_RETURN(speculation.samplers_, DraftSamplers::Make(*speculation.draft_));
  return speculation;
}

std::unique_ptr<Drafter> Speculation::NewDrafter() const {
  if (options_.tokens == 0) return nullptr;
  switch (options_.source) {
    case DraftSource::kLookup:
      return std::make_unique<PromptLookup>();
    case DraftSource::kLayer:
      return std::make_unique<LayerDrafts>(*draft_, samplers_);
    case DraftSource::kModel:
      return std::make_unique<ModelDrafts>(*draft_, vocab_, samplers_);
  }
  return nullptr;
}

}  // namespace marlin
