// The arguments of commands that run a model: the model, and tokens from a file or from text.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/arguments.h"
#include "cli/console.h"
#include "cli/text_codec.h"
#include "marlin/evaluate.h"
#include "marlin/model.h"

namespace marlin::cli {

/// --device, --threads, --exact.
class RunArguments {
 public:
  void Declare(ArgumentList& arguments);
  Result<Model> Open(const std::string& path) const;

 private:
  std::string device_ = "auto";
  std::optional<int64_t> threads_;
  bool exact_ = false;
};

/// Reads token ids: decimal numbers between white space or commas, in brackets if need be. "-" is
/// the standard input. Errors: kIo, kMalformedFile naming the place and what stands there.
Result<std::vector<int32_t>> ReadTokens(const std::string& path);

/// Reads a text file, "-" for the standard input. Errors: kIo.
Result<std::string> ReadText(const std::string& path);

/// The tokenizer that the console was given, for a model. Errors: kUnsupported when there is none,
/// kMalformedFile when its vocabulary is larger than the model's.
Result<std::unique_ptr<TextCodec>> OpenCodec(const Console& console, const std::string& directory,
                                             const Model& model);

/// --text FILE or --tokens FILE, and the windows.
class CorpusArguments {
 public:
  void Declare(ArgumentList& arguments);
  /// Exactly one of --text and --tokens must be there.
  Status Check() const;
  Result<std::vector<int32_t>> Read(const Console& console, const std::string& directory,
                                    const Model& model) const;
  EvaluateOptions Windows() const;

 private:
  std::optional<std::string> text_;
  std::optional<std::string> tokens_;
  std::optional<int64_t> window_;
  std::optional<int64_t> stride_;
  std::optional<int64_t> max_windows_;
};

}  // namespace marlin::cli
