#include "cli/text_codec.h"

#include "base/macros.h"

namespace marlin::cli {
namespace {

/// What decoders write where bytes are no character, or not yet one.
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

}  // namespace

Result<std::string> TextStream::Add(int32_t token) {
  tokens_.push_back(token);
  MARLIN_ASSIGN_OR_RETURN(std::string text, codec_.Decode(tokens_));
  while (text.ends_with(kReplacement)) text.resize(text.size() - kReplacement.size());
  if (!text.starts_with(shown_) || text.size() == shown_.size()) return std::string();
  std::string added = text.substr(shown_.size());
  shown_ = std::move(text);
  return added;
}

Result<std::string> TextStream::Finish() {
  MARLIN_ASSIGN_OR_RETURN(std::string text, codec_.Decode(tokens_));
  std::string added = text.starts_with(shown_) ? text.substr(shown_.size()) : std::string();
  shown_ = std::move(text);
  return added;
}

}  // namespace marlin::cli
