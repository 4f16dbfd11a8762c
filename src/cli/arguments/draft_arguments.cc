#include "cli/arguments/draft_arguments.h"

#include <fmt/core.h>

#include <filesystem>

#include "base/errors.h"
#include "base/macros.h"
#include "base/text_table.h"

namespace marlin::cli {
namespace {

constexpr const char* kLookup = "lookup";
constexpr const char* kLayer = "mtp";

}  // namespace

void DraftArguments::Declare(ArgumentList& arguments) {
  arguments.Option("--speculate", &tokens_, WholeRange{0, kMostDrafts}, "N",
                   "Guess up to N tokens per pass, and verify them; default 0");
  arguments.Flag("--speculate-always", &always_,
                 "Guess N tokens in every pass; default: as many as measured times make worth it");
  arguments.OptionalValue("--draft", &draft_, "SOURCE",
                          "What guesses: lookup, the text so far (default); mtp, the model's MTP "
                          "layer (--draft alone); or a smaller model with the same tokenizer");
  arguments.Choices({kLookup, kLayer});
  arguments.Model(
      [this]() -> std::string* { return source() == DraftSource::kModel ? &*draft_ : nullptr; });
}

DraftSource DraftArguments::source() const {
  if (!draft_ || draft_ == kLookup) return DraftSource::kLookup;
  return draft_->empty() || draft_ == kLayer ? DraftSource::kLayer : DraftSource::kModel;
}

std::string DraftArguments::name() const {
  const DraftSource from = source();
  return from == DraftSource::kModel ? *draft_ : std::string(DraftSourceName(from));
}

Status DraftArguments::Check() const {
  if (given()) return {};
  if (draft_) return Invalid("--draft: only with --speculate");
  return always_ ? Invalid("--speculate-always: only with --speculate") : Status();
}

Result<SpeculationOptions> DraftArguments::Options(const Model& model, TextCodec* codec,
                                                   const Open& open) const {
  SpeculationOptions options;
  if (!given()) return options;
  options.tokens = *tokens_;
  options.always = always_;
  options.source = source();
  if (options.source != DraftSource::kModel) return options;
  if (!std::filesystem::exists(*draft_)) {
    return Status(Code::kIo, fmt::format("--draft: {}: no such directory; expected lookup, mtp or "
                                         "a model",
                                         *draft_));
  }
  if (codec != nullptr) {
    MARLIN_RETURN_IF_ERROR(codec->CheckSameTokens("--draft", *draft_));
  }
  Result<Model> draft = open(*draft_);
  if (!draft.ok()) return draft.status().WithContext("--draft");
  MARLIN_RETURN_IF_ERROR(CheckDraftModel(model, *draft).WithContext("--draft"));
  options.model = *std::move(draft);
  return options;
}

std::string DescribeDrafts(const DraftCounts& drafts) {
  if (drafts.passes == 0) return {};
  return fmt::format("accepted {} of {}, {:.1f} per pass with guesses", drafts.accepted,
                     FormatCounted(drafts.drafted, "guessed token"), drafts.MeanAccepted());
}

}  // namespace marlin::cli
