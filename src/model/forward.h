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
  /// Copies a contiguous view of this arena's memory to the host, and waits for it.
  Status Download(const TensorView& view, void* host) const;
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

/// The pages of all sequences of a pass, as the device reads them; one for each group of layers.
struct PassPages {
  std::vector<void*> slabs;
  TensorView block_tables;
};

/// What the blocks of a pass share.
struct Pass {
  const Device& device;
  const Decoder& decoder;
  const PagePool& pool;
  ProductOptions products;
  Arena& arena;
  TensorView positions;   ///< As in SequenceRows, in the device's memory.
  TensorView first_rows;  ///< As in SequenceRows.
  std::vector<PassPages> pages;

  int64_t rows() const { return positions.dim(0); }
};

/// out = attention of x, both [rows, hidden] f32; appends to the cache.
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
