// Arguments of commands that run a model: the model, and tokens from a file or from text.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/arguments/arguments.h"
#include "cli/arguments/device_argument.h"
#include "cli/console.h"
#include "marlin/device.h"
#include "marlin/evaluate.h"
#include "marlin/model.h"
#include "text/text_codec.h"

namespace marlin::cli {

/// --kv-cache: the element type of a KV cache.
class KvCacheArgument {
 public:
  void Declare(ArgumentList& arguments, const char* help);
  bool given() const { return name_.has_value(); }
  /// None if it is not given. Errors: kInvalidArgument listing the types.
  Result<std::optional<DType>> Type() const;

 private:
  std::optional<std::string> name_;
};

/// --gpu-layers: how many of a model's layers are on a GPU.
class GpuLayersArgument {
 public:
  void Declare(ArgumentList& arguments);
  /// ModelOptions::gpu_layers. Errors: kInvalidArgument for anything but a number and "auto".
  Result<int64_t> Count() const;

 private:
  std::string count_ = "auto";
};

/// Where the layers of a model are, and what that means; empty if all are on its device. Errors: as
/// MeasureReadBandwidth.
Result<std::string> DescribeLayers(const Model& model);

/// --device, --threads, --exact, --kv-cache, --prepared, --gpu-memory, --gpu-layers,
/// --host-experts, --frequencies.
class RunArguments {
 public:
  /// Their heading in --help.
  static constexpr const char* kGroup = "Model and device";

  void Declare(ArgumentList& arguments);
  /// Errors: kInvalidArgument naming the option, as Device::Open.
  Result<Device> OpenDevice() const;
  /// Models of one command share a device: the worker threads of two would compete. Names the
  /// device that "auto" chose on stderr.
  Result<Model> Open(Console& console, const std::string& path, const Device& device) const;
  /// With ModelOptions::draft for models that are opened from here on, except references.
  void WithDraft() { draft_ = true; }
  /// Opens a second model, without --prepared and --kv-cache.
  Result<Model> OpenReference(const std::string& path, const Device& device) const;
  /// Opens the draft of a model, whole on the device.
  Result<Model> OpenDraft(const std::string& path, const Device& device) const;
  bool prepared() const { return !prepared_.empty(); }
  bool chooses_cache() const { return kv_cache_.given(); }
  bool places_experts() const { return !host_experts_.empty(); }
  /// Opens a model on a device of its own.
  Result<Model> Open(Console& console, const std::string& path) const;

 private:
  /// Without --prepared, --kv-cache and --frequencies.
  Result<ModelOptions> Options() const;
  Result<Model> OpenWith(ModelOptions options, const std::string& path, const Device& device) const;

  DeviceArgument device_;
  std::optional<int64_t> threads_;
  bool exact_ = false;
  bool batch_invariant_ = false;
  bool allow_extra_tensors_ = false;
  bool draft_ = false;
  KvCacheArgument kv_cache_;
  std::string prepared_;
  std::string gpu_memory_;
  GpuLayersArgument gpu_layers_;
  std::string host_experts_;
  std::string frequencies_;
};

/// One line on stderr, if the host has run operations in place of the model's device: which, how
/// often, and why.
void SayHostOperations(Console& console, const Model& model);

/// Reads token ids: decimal numbers separated by white space or commas, or a JSON array of numbers.
/// "-" is standard input. Errors: kIo, kMalformedFile naming line, column and offending text.
Result<std::vector<int32_t>> ReadTokens(const std::string& path);

/// Reads a text file, "-" for standard input. Errors: kIo.
Result<std::string> ReadText(const std::string& path);

/// Writes a whole file. Errors: CannotWrite.
Status WriteText(const std::string& path, const std::string& text);
/// kIo, naming the path.
Status CannotWrite(const std::string& path);

/// --no-special-tokens.
class SpecialTokensArgument {
 public:
  void Declare(ArgumentList& arguments);
  /// Whether texts get the special tokens that the tokenizer adds.
  bool added() const { return !without_; }

 private:
  bool without_ = false;
};

/// A model's tokenizer, from the console's factory. `option` is the option that needs it. It may
/// have more tokens than the model. Errors: kUnsupported if there is no factory, the tokenizer's.
Result<std::unique_ptr<TextCodec>> OpenCodec(const Console& console, std::string_view option,
                                             const std::string& directory);

/// The token ids of a text. Errors: the tokenizer's, kMalformedFile for an id outside of the
/// model's vocabulary.
Result<std::vector<int32_t>> EncodeText(TextCodec& codec, std::string_view text,
                                        const SpecialTokensArgument& special,
                                        const std::string& directory, const Model& model);

/// Errors: kMalformedFile for an id, of a directory's tokenizer, that the model lacks.
Status CheckVocabulary(std::span<const int32_t> tokens, const std::string& directory,
                       const Model& model);

/// Errors: kUnsupported if the console has no tokenizers, saying which program has; `ids` is the
/// option that takes token ids instead, or empty. Commands check before loading a model.
Status CheckHasCodec(const Console& console, std::string_view option, std::string_view ids);

/// --text FILE or --tokens FILE, and the windows.
class CorpusArguments {
 public:
  /// Their heading in --help.
  static constexpr const char* kGroup = "Text";

  void Declare(ArgumentList& arguments);
  /// Checks for exactly one of --text and --tokens, --text only with a tokenizer.
  Status Check(const Console& console) const;
  Result<std::vector<int32_t>> Read(const Console& console, const std::string& directory,
                                    const Model& model) const;
  EvaluateOptions Windows() const;

 private:
  std::optional<std::string> text_;
  std::optional<std::string> tokens_;
  SpecialTokensArgument special_;
  std::optional<int64_t> window_;
  std::optional<int64_t> stride_;
  std::optional<int64_t> max_windows_;
};

}  // namespace marlin::cli
