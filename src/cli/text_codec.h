// Text to tokens and back. The command itself has no tokenizer; who embeds it (the Python package)
// brings one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/status.h"

namespace marlin::cli {

class TextCodec {
 public:
  virtual ~TextCodec() = default;
  virtual int64_t vocab_size() const = 0;
  /// No special tokens are added.
  virtual Result<std::vector<int32_t>> Encode(std::string_view text) = 0;
  virtual Result<std::string> Decode(std::span<const int32_t> tokens) = 0;
};

/// Loads the tokenizer of a model's directory.
using TextCodecFactory =
    std::function<Result<std::unique_ptr<TextCodec>>(const std::string& directory)>;

/// Turns tokens into text as they come, holding back what is not a whole character yet.
class TextStream {
 public:
  explicit TextStream(TextCodec& codec) : codec_(codec) {}
  /// What a token adds to the text that can be shown. Errors: the codec's.
  Result<std::string> Add(int32_t token);
  /// What was held back.
  Result<std::string> Finish();
  /// All of the text that was shown.
  const std::string& text() const { return shown_; }

 private:
  TextCodec& codec_;
  std::vector<int32_t> tokens_;
  std::string shown_;
};

}  // namespace marlin::cli
