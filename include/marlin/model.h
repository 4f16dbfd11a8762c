// Decoder-only language models: loading a checkpoint, and running it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "marlin/device.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

#pragma GCC visibility push(default)
namespace marlin {

/// What a loaded model is.
struct ModelInfo {
  std::string model_type;  ///< "qwen3_moe", as config.json says.
  std::string recipe;      ///< Empty for a plain checkpoint.
  int64_t layers = 0;
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
  int64_t max_positions = 0;
  int64_t parameters = 0;
  int64_t bytes = 0;  ///< Of the weights as prepared for the device.
  double bits_per_weight = 0;
  std::vector<int32_t> eos_token_ids;  ///< From generation_config.json, else config.json.
};

struct ModelOptions {
  /// Lets products round activations to bf16 where a bf16 matrix unit is faster; sums stay fp32.
  /// False computes with fp32 activations throughout.
  bool allow_bf16_activations = true;
  /// A file that PrepareModel (prepared.h) wrote for this model and kind of device: its weights are
  /// mapped instead of prepared again. Empty: none.
  std::string prepared = {};
};

struct SequenceOptions {
  /// False: layers with a sliding window keep only the keys and values that their window reaches,
  /// and Truncate takes only lengths whose windows are there.
  bool truncatable = true;
};

/// The keys and values that one sequence has left behind. Movable; belongs to one model, which it
/// may outlive: Model::Forward answers a sequence of another or of a destroyed model with an error.
/// Not for several threads at once: a call that meets another one's sequence is refused.
class Sequence {
 public:
  struct State;
  Sequence(Sequence&&) noexcept;
  Sequence& operator=(Sequence&&) noexcept;
  ~Sequence();

  /// Tokens fed so far; 0 of a sequence that was moved from.
  int64_t length() const;
  /// Forgets all but the first `length` tokens. Errors: kInvalidArgument past length(), for a
  /// sequence that was moved from or that a call on another thread is feeding, and for a length
  /// whose windows a sequence that is not truncatable has lost; 0 is always possible.
  Status Truncate(int64_t length);
  /// Null after the sequence was moved from.
  State* state() const { return state_.get(); }
  explicit Sequence(std::unique_ptr<State> state);

 private:
  std::unique_ptr<State> state_;
};

/// New tokens of one sequence.
struct SequenceInput {
  Sequence* sequence = nullptr;
  std::span<const int32_t> tokens;  ///< At least one.
  bool all_logits = false;          ///< Logits after every token, not only after the last.
};

/// A loaded model. Copies share the weights; const calls are thread-safe (one Sequence is not). It
/// keeps its device open. A model that was moved from holds no weights: its info is empty, and
/// every call answers with kInvalidArgument.
class Model {
 public:
  /// Loads a plain or quantized Hugging Face directory for a device. Of a device that was opened as
  /// "auto" and cannot run the model, the next one is taken, the CPU in the end: device() says
  /// which, and buffers for the model's calls belong there. Errors: kIo, kMalformedFile
  /// naming tensor and shapes, kUnsupported naming the model_type and the supported ones, or saying
  /// that the directory is an adapter or newer than this program; before any tensor is read,
  /// kUnsupported naming the operation that the model needs and the device lacks; for
  /// options.prepared those of prepared.h.
  static Result<Model> Open(const std::string& path, const Device& device,
                            const ModelOptions& options = {});

  const ModelInfo& info() const;
  const Device& device() const;

  /// An empty sequence; its memory grows with its length up to info().max_positions.
  Result<Sequence> NewSequence(const SequenceOptions& options = {}) const;

  /// Feeds the tokens of all inputs at once and writes logits, f32 [rows, vocab_size]: one row an
  /// input, or one a token where all_logits. The logits are in the host's memory and may have any
  /// strides that are not negative and give every element a place of its own. A sequence may appear
  /// once, and belongs to this model. Errors: kInvalidArgument for a token id out of range or a
  /// sequence that would pass max_positions; the sequences are unchanged then.
  Status Forward(std::span<const SequenceInput> inputs, const MutableTensorView& logits) const;

  /// Forward that draws one token for every input from the logits after its last token, on the
  /// device: samplers are states that ResetSampler wrote, u8 [inputs.size(), SamplerStateBytes] in
  /// the device's memory, and tokens has one an input. Errors: also those of SampleTokens.
  Status ForwardAndSample(std::span<const SequenceInput> inputs, const MutableTensorView& samplers,
                          std::span<int32_t> tokens) const;

  struct Impl;
  /// False after the model was moved from.
  bool valid() const { return impl_ != nullptr; }
  /// Precondition: valid().
  const Impl& impl() const { return *impl_; }

 private:
  Model(const Device& device, std::shared_ptr<const Impl> impl)
      : device_(device), impl_(std::move(impl)) {}
  Device device_;
  std::shared_ptr<const Impl> impl_;
};

/// The model types that Model::Open runs, in alphabetical order.
std::vector<std::string> SupportedModelTypes();

}  // namespace marlin
#pragma GCC visibility pop
