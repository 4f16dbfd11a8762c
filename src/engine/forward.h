// One forward pass of some tokens through the layers.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/kv_cache.h"
#include "engine/recorded_steps.h"
#include "engine/step_timer.h"
#include "marlin/device.h"
#include "marlin/model.h"
#include "marlin/moe.h"
#include "model/layers.h"
#include "ops/device/device.h"
#include "plan/step/decoder_step.h"

namespace marlin {

/// Device memory for the activations of one pass, allocated linearly and reused by the next.
class Arena {
 public:
  explicit Arena(const Device& device) : device_(device) {}
  /// Allocates a contiguous view. Errors: kOutOfMemory.
  Result<MutableTensorView> Take(DType type, const Shape& shape);
  /// Allocates a copy of host values, [values.size()]. Waits for the copy.
  Result<MutableTensorView> Upload(std::span<const int32_t> values);
  /// Copies a contiguous view of this arena to the host, and waits for the copy.
  Status Download(const TensorView& view, void* host) const;
  /// Copies host memory to a contiguous view of this arena, and waits for the copy.
  Status Fill(const MutableTensorView& view, const void* host) const;
  /// Memory apart from the arena's, for expanded pages; the same address in every pass. Errors:
  /// kOutOfMemory.
  Result<void*> Expanded(int64_t bytes);
  /// A position to which the arena can be rewound.
  struct Mark {
    size_t block = 0;
    int64_t used = 0;
    friend auto operator<=>(const Mark&, const Mark&) = default;
  };
  Mark mark() const { return at_; }
  void Return(const Mark& mark) { at_ = mark; }
  /// The recordings of passes in this memory.
  RecordedSteps& recorded() { return recorded_; }

 private:
  /// The block of a view of this arena, and the view's offset in it. Errors: kInternal.
  Result<std::pair<const DeviceBuffer*, int64_t>> Find(const TensorView& view) const;
  /// Advances to a block with room for `bytes`, at at_.used. Returns its index.
  Result<size_t> Reserve(int64_t bytes);

  Device device_;
  std::vector<DeviceBuffer> blocks_;
  DeviceBuffer expanded_;
  Mark at_;
  RecordedSteps recorded_;
};

/// Frees at the end of a scope what the scope allocated from an arena.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.Return(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  Arena::Mark mark_;
};

/// Learns the experts that tokens select.
class RoutingObserver {
 public:
  virtual ~RoutingObserver() = default;
  /// The selections of a pass's tokens in a layer, [tokens, top_k].
  virtual void Add(int64_t layer, std::span<const int32_t> ids) = 0;
};

/// Learns the inputs that a mixer computes for its own projections.
class InputObserver {
 public:
  virtual ~InputObserver() = default;
  /// The rows of ProjectionTensors::input `input`, f32 [rows, in], contiguous columns.
  virtual Status Add(size_t input, const TensorView& rows) = 0;
};

/// Whether `hidden` is complete or lacks `block`, which the next norm of `hidden` adds to it.
enum class Residual : uint8_t { kComplete, kLacksBlock };

/// The arguments that the operations of a pass share.
struct Pass {
  const Device& device;
  const Decoder& decoder;
  const PagePool& pool;
  ProductOptions products;
  Arena& arena;
  RoutingObserver* routing = nullptr;  ///< Null: selections are not observed.
  InputObserver* inputs = nullptr;     ///< Null: inputs are not observed.
  StepTimer* timer = nullptr;          ///< Null: operations are not timed.
  StepValues values = {};
  /// f32 [rows, hidden]: what a projection or the experts add to `hidden`.
  MutableTensorView block = {};
  /// The same of an MLP next to experts, until they are added; empty: no layer has both.
  MutableTensorView beside = {};
  /// f32 [rows, layers * features]: the layers' own embeddings; empty: they have none.
  MutableTensorView layer_embeddings = {};
  Residual residual = Residual::kComplete;
  /// f32 [rows, hidden]: what a decoder that joins() reads besides the tokens.
  TensorView previous = {};
  /// Null: plans of experts are not kept. A recorded step keeps those that it uses.
  std::vector<ExpertsPlan>* plans = nullptr;

  int64_t rows() const { return values.rows(); }
  void* stream() const { return products.stream; }
  const DecoderLayer& layer(int64_t index) const {
    return decoder.layers[static_cast<size_t>(index)];
  }
};

/// The result of a layer's mixer, [rows, mixer.out.in].
inline MutableTensorView MixedOf(const Pass& pass, int64_t layer) {
  const MutableTensorView& mixed = pass.values.mixed;
  return {mixed.data(), mixed.dtype(), {pass.rows(), pass.layer(layer).mixer.out.in}};
}

/// The result of an MLP's gate and up, [rows, mlp.down.in].
inline MutableTensorView InnerOf(const Pass& pass, int64_t layer) {
  const MutableTensorView& inner = pass.values.inner;
  return {inner.data(), inner.dtype(), {pass.rows(), pass.layer(layer).mlp.down.in}};
}

/// Tells the timer that an operation of `part` is enqueued.
inline Status Ended(const Pass& pass, StepPart part) {
  return pass.timer == nullptr ? Status() : pass.timer->End(part);
}

/// Allocates from the pass's arena all values that flow between its operations, except the logits
/// and the sampled tokens. Errors: kOutOfMemory.
Status TakeValues(Pass* pass);

/// Runs one operation of a layer, unfused. The unfused code reads the layers rather than the step's
/// description: while weights stream through the caches, every additional cache line costs time.
Status RunRoute(Pass& pass, int64_t layer);
Status RunExperts(Pass& pass, int64_t layer);
Status RunGateUp(Pass& pass, int64_t layer);
/// The MLP and the experts of a layer that has both.
Status RunBeside(Pass& pass, int64_t layer);
/// Ends a layer that has an embedding of its own.
Status RunAddEmbedding(Pass& pass, int64_t layer);
/// From values.mixed, or from values.inner.
Status RunProjectAdd(Pass& pass, int64_t layer, bool from_inner);
/// The operations of a layer's mixer, from values.hidden to values.mixed; `first`: only the first
/// one, which knows all inputs of its projections.
Status RunMixer(Pass& pass, int64_t layer, bool first = false);
/// inner = GLU of x.
Status RunGate(const Pass& pass, const MlpLayer& mlp, const TensorView& x,
               const MutableTensorView& inner);
/// out = the embeddings of ids, scaled.
Status Embed(const Device& device, const Decoder& decoder, const TensorView& ids,
             const MutableTensorView& out, void* stream);
/// out = the layers' own embeddings of ids, whose embeddings x are given.
Status EmbedLayers(const Device& device, const Decoder& decoder, const TensorView& ids,
                   const TensorView& x, const ProductOptions& products, Arena* arena,
                   const MutableTensorView& out);
/// logits = the head's product with normalized hidden states, capped.
Status ApplyHead(const Device& device, const Decoder& decoder, const TensorView& x,
                 const ProductOptions& products, const MutableTensorView& logits);

/// Adds the block that `hidden` lacks, for operations that read `hidden` itself.
Status CompleteHidden(Pass& pass);

/// out = norm(x); out may be x.
Status Normalize(const Pass& pass, const DeviceVector& norm, float epsilon, const TensorView& x,
                 const MutableTensorView& out);
/// out = norm(hidden), after the block that `hidden` lacks has been added to it.
Status NormalizeHidden(Pass& pass, const DeviceVector& norm, const MutableTensorView& out);
/// Leaves norm(block), or block without a norm, for the next norm of `hidden` to add.
Status AddBlock(Pass& pass, const DeviceVector& norm);
/// The same for the last block of a layer, if that has no embedding of its own to add.
Status AddLastBlock(Pass& pass, int64_t layer);

/// A step, with the runs of operations that the device has fused.
class StepProgram {
 public:
  StepProgram() = default;
  /// Offers the operations to the device. Errors: as DecoderBackend::Fuse; kUnsupported naming the
  /// device and an operation that it neither fuses nor has unfused.
  static Result<StepProgram> Make(const Device& device, const Decoder& decoder,
                                  StepDescription step);

  Status Run(Pass& pass) const;
  /// ModelInfo::fusion.
  std::string fusion() const;

 private:
  /// One operation, or a fused run, which is followed by its operations and shorter runs of them.
  struct Part {
    StepKind kind;
    bool from_inner;  ///< For ProjectAddStep.
    int64_t layer;
    std::unique_ptr<const FusedOperations> fused;
    size_t replaced = 0;  ///< Parts after a fused run that it stands for.
  };
  static Part PartOf(const StepOperation& operation);
  void AddOperations(std::span<const StepOperation> operations);
  /// Adds a run, for which the parts stand that are added until EndRun. Returns its index.
  size_t BeginRun(FusedRun run, const StepOperation& first);
  void EndRun(size_t part) { parts_[part].replaced = parts_.size() - part - 1; }
  /// Adds a run of `operations`.
  Status AddRun(const DecoderBackend& backend, FusedRun run,
                std::span<const StepOperation> operations);

  std::unique_ptr<const StepDescription> step_;  ///< Fused runs point into it.
  std::vector<Part> parts_;
  size_t fused_ = 0;     ///< Operations of runs.
  std::string refusal_;  ///< The first FusedRun::refusal.
};

}  // namespace marlin
