// Text to tokens and back. The command itself has no tokenizer; embedders (the Python package)
// supply one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/status.h"

namespace marlin {

struct ChatRequest;   // chat_request.h
struct ServeRequest;  // serve_request.h

/// How a message becomes a prompt.
struct ChatPrompt {
  std::optional<std::string> system;     ///< The system message before it.
  std::optional<std::string> file;       ///< A chat template instead of the model's own.
  std::optional<std::string> variables;  ///< Variables of the template: a JSON object.
};

class TextCodec {
 public:
  virtual ~TextCodec() = default;
  /// With `special`, the special tokens that the tokenizer adds to a text (BOS) are added.
  virtual Result<std::vector<int32_t>> Encode(std::string_view text, bool special) = 0;
  /// Special tokens have no text.
  virtual Result<std::string> Decode(std::span<const int32_t> tokens) = 0;
  /// The tokens of a user's message in the model's chat template, up to where the answer begins.
  /// Errors: kUnsupported where there is no template, the template's.
  virtual Result<std::vector<int32_t>> EncodeChat(std::string_view message, const ChatPrompt& chat);
  /// Errors: kInvalidArgument naming the option and the first token that is another one in the
  /// tokenizer of a directory. A directory without a tokenizer passes.
  virtual Status CheckSameTokens(std::string_view option, const std::string& directory);
  /// Holds a conversation on stdin and stdout, until the user ends it.
  virtual Status Chat(const ChatRequest& request);
  /// Serves a model over HTTP, until a signal ends the server. Errors: kDeviceLost once the device
  /// no longer answers.
  virtual Status Serve(const ServeRequest& request);
};

/// Loads the tokenizer of a model's directory; for an empty name one without a vocabulary, which
/// can only talk to a server.
using TextCodecFactory =
    std::function<Result<std::unique_ptr<TextCodec>>(const std::string& directory)>;

/// Streams tokens as text, holding back incomplete characters.
class TextStream {
 public:
  /// Continues after `prompt`, which is not shown.
  TextStream(TextCodec& codec, std::span<const int32_t> prompt);
  /// The text that a token adds, once it can be shown. Errors: the codec's.
  Result<std::string> Add(int32_t token);
  /// The text held back.
  Result<std::string> Finish();

 private:
  Result<std::string> Take(bool finished);

  TextCodec& codec_;
  std::vector<int32_t> tokens_;
  // Tokens are decoded together with those shown last, because some decoders treat the first token
  // of a text differently, and special tokens, which have no text, do not count as one.
  size_t context_ = 0;  ///< First token to decode.
  size_t shown_ = 0;    ///< First token not yet shown.
};

/// Cuts a text at the first stop string, holding back text that may become one.
class StopText {
 public:
  /// Precondition: no empty strings.
  explicit StopText(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  /// Takes the next chunk; returns the text that can be shown now.
  std::string Add(std::string_view piece);
  /// The text held back, when the text ends without a stop string.
  std::string Finish();
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace marlin
