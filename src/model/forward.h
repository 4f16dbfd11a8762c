// One pass of some tokens through the layers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "marlin/device.h"
#include "marlin/model.h"
#include "model/kv_cache.h"
#include "model/layers.h"

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
  /// Everything handed out since a mark may be handed out again.
  struct Mark {
    size_t block = 0;
    int64_t used = 0;
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

/// New tokens of one sequence within a pass.
struct PassSlice {
  KvCache* cache;
  int64_t first_row;  ///< Their rows in the pass.
  int64_t tokens;
  int64_t position;  ///< Of the first one.
};

/// What the blocks of a pass share.
struct Pass {
  const Device& device;
  const Decoder& decoder;
  ProductOptions products;
  Arena& arena;
  std::vector<PassSlice> slices;
  TensorView positions;  ///< i32 [rows] in the device's memory.

  int64_t rows() const { return positions.dim(0); }
};

/// out = attention of x, both [rows, hidden] f32; appends to the caches.
Status RunAttention(const Pass& pass, int64_t layer, const TensorView& x,
                    const MutableTensorView& out);
Status RunLatentAttention(const Pass& pass, int64_t layer, const TensorView& x,
                          const MutableTensorView& out);
/// out = mlp(x), rows weighted where row_weight (f32 [rows of x]) is there.
Status RunMlp(const Pass& pass, const MlpLayer& mlp, const TensorView& x,
              const MutableTensorView& out, const TensorView& row_weight = {});
Status RunExperts(const Pass& pass, const ExpertsLayer& experts, const TensorView& x,
                  const MutableTensorView& out);

/// Runs all layers: hidden [rows, hidden] f32 holds the embeddings before and the last hidden
/// states, not yet normed, after.
Status RunLayers(const Pass& pass, const MutableTensorView& hidden);

}  // namespace marlin
