#include "text/text_codec.h"

#include <algorithm>
#include <utility>

#include "base/macros.h"

namespace marlin {
namespace {

/// U+FFFD, which decoders emit for invalid or incomplete bytes.
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

/// Length of the longest suffix of `text` that is a proper prefix of `stop`.
size_t Overlap(std::string_view text, std::string_view stop) {
  size_t count = std::min(text.size(), stop.size() - 1);
  while (count > 0 && !text.ends_with(stop.substr(0, count))) --count;
  return count;
}

Status WithoutTemplates() {
  return Status(Code::kUnsupported,
                "this program has no chat templates; use the command of the "
                "Python package");
}

}  // namespace

Result<std::vector<int32_t>> TextCodec::EncodeChat(std::string_view /*message*/,
                                                   const ChatPrompt& /*chat*/) {
  return WithoutTemplates();
}

Status TextCodec::CheckSameTokens(std::string_view /*option*/, const std::string& /*directory*/) {
  return {};
}

Status TextCodec::Chat(const ChatRequest& /*request*/) { return WithoutTemplates(); }

Status TextCodec::Serve(const ServeRequest& /*request*/) { return WithoutTemplates(); }

TextStream::TextStream(TextCodec& codec, std::span<const int32_t> prompt)
    : codec_(codec), tokens_(prompt.begin(), prompt.end()), shown_(prompt.size()) {
  // As many tokens as the longest character has bytes.
  constexpr size_t kContext = 4;
  context_ = shown_ - std::min(shown_, kContext);
}

Result<std::string> TextStream::Add(int32_t token) {
  tokens_.push_back(token);
  return Take(false);
}

Result<std::string> TextStream::Finish() { return Take(true); }

Result<std::string> TextStream::Take(bool finished) {
  const std::span<const int32_t> shown = std::span(tokens_).first(shown_);
  MARLIN_ASSIGN_OR_RETURN(std::string before, codec_.Decode(shown.subspan(context_)));
  while (before.empty() && context_ > 0) {
    context_ /= 2;
    MARLIN_ASSIGN_OR_RETURN(before, codec_.Decode(shown.subspan(context_)));
  }
  const std::span<const int32_t> tokens = std::span(tokens_).subspan(context_);
  MARLIN_ASSIGN_OR_RETURN(const std::string after, codec_.Decode(tokens));
  if (!finished && after.ends_with(kReplacement)) return std::string();
  if (after.size() > before.size()) context_ = shown_;
  shown_ = tokens_.size();
  // What was shown as incomplete may be part of a character now. Never start within one.
  const size_t most = std::min(before.size(), after.size());
  auto begin = static_cast<size_t>(std::mismatch(before.begin(),
                                                 before.begin() + static_cast<std::ptrdiff_t>(most),
                                                 after.begin())
                                       .first -
                                   before.begin());
  const auto continues = [&](size_t i) {
    return i < after.size() && (static_cast<unsigned char>(after[i]) & 0xC0U) == 0x80U;
  };
  while (begin > 0 && continues(begin)) --begin;
  return after.substr(begin);
}

std::string StopText::Add(std::string_view piece) {
  if (stopped_) return {};
  held_ += piece;
  size_t end = held_.size();
  for (const std::string& stop : stops_) {
    const size_t found = held_.find(stop);
    if (found == std::string::npos) continue;
    stopped_ = true;
    end = std::min(end, found);
  }
  if (stopped_) {
    held_.resize(end);
    return std::exchange(held_, {});
  }
  size_t kept = 0;
  for (const std::string& stop : stops_) kept = std::max(kept, Overlap(held_, stop));
  std::string shown = held_.substr(0, end - kept);
  held_.erase(0, end - kept);
  return shown;
}

std::string StopText::Finish() { return std::exchange(held_, {}); }

}  // namespace marlin
