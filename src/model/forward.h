// One pass of some tokens through the layers.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "marlin/device.h"
#include "marlin/model.h"
#include "model/kv_cache.h"
#include "model/layers.h"
#include "ops/device.h"
#include "plan/decoder_step.h"

namespace marlin {

/// Memory of the device for the activations of one pass, handed out front to back and reused by the
/// next.
class Arena {
 public:
  explicit Arena(const Device& device) : device_(device) {}
  /// A view of new memory, contiguous. Errors: kOutOfMemory.
  Result<MutableTensorView> Take(DType type, const Shape& shape);
  /// New memory that holds numbers of the host, [values.size()]. Waits for the copy.
  Result<TensorView> Upload(std::span<const int32_t> values);
  /// Copies a contiguous view of this arena's memory to the host, and waits for it.
  Status Download(const TensorView& view, void* host) const;
  /// Everything handed out since a mark may be handed out again.
  struct Mark {
    size_t block = 0;
    int64_t used = 0;
    friend auto operator<=>(const Mark&, const Mark&) = default;
  };
  Mark mark() const { return at_; }
  void Return(const Mark& mark) { at_ = mark; }

 private:
  /// Moves on to a block with room for so many bytes, which begin at at_.used. Returns its number.
  Result<size_t> Reserve(int64_t bytes);

  Device device_;
  std::vector<DeviceBuffer> blocks_;
  Mark at_;
};

/// Gives back at the end of a scope what was taken from an arena within.
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

/// The arguments that the operations of a pass share.
struct Pass {
  const Device& device;
  const Decoder& decoder;
  const PagePool& pool;
  ProductOptions products;
  Arena& arena;
  StepValues values = {};

  int64_t rows() const { return values.rows(); }
  const DecoderLayer& layer(int64_t index) const {
    return decoder.layers[static_cast<size_t>(index)];
  }
};

/// Takes the memory of everything that flows between the operations of a pass, but for the logits
/// and the tokens, from its arena. Errors: kOutOfMemory.
Status TakeValues(Pass* pass);

/// One operation of a layer, piece by piece. The pieces read the layers and not the description of
/// the step: while weights stream through the caches, every line of memory besides them costs time.
Status RunProject(const Pass& pass, int64_t layer);
Status RunLatentProject(const Pass& pass, int64_t layer);
Status RunAttention(const Pass& pass, int64_t layer);
Status RunRoute(const Pass& pass, int64_t layer);
Status RunExperts(const Pass& pass, int64_t layer);

/// out = norm(x); out may be x.
Status Normalize(const Pass& pass, const DeviceVector& norm, const TensorView& x,
                 const MutableTensorView& out);
/// out = mlp(x), rows weighted where row_weight (f32 [rows of x]) is there.
Status RunMlp(const Pass& pass, const MlpLayer& mlp, const TensorView& x,
              const MutableTensorView& out, const TensorView& row_weight = {});
/// hidden += norm(block), where there is a norm; writes block.
Status AddBlock(const Pass& pass, const DeviceVector& norm, const MutableTensorView& block);

/// A step, and those runs of its operations that the device takes in its own form.
class StepProgram {
 public:
  StepProgram() = default;
  /// Offers the operations to the device. Errors: those of its Fuse, and kUnsupported naming the
  /// device and an operation that it neither takes nor has the pieces of.
  static Result<StepProgram> Make(const Device& device, StepDescription step);

  Status Run(const Pass& pass) const;

 private:
  /// One operation, or a fused run of some.
  struct Part {
    StepKind kind;
    bool from_inner;  ///< Of ProjectAddStep.
    int64_t layer;
    std::unique_ptr<const FusedOperations> fused;
  };
  static Part PartOf(const StepOperation& operation);
  std::unique_ptr<const StepDescription> step_;  ///< Fused runs point into it.
  std::vector<Part> parts_;
};

}  // namespace marlin
