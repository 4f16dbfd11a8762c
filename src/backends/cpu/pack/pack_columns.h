// Packs the joined columns of several weights into CPU panels, one block of 16 columns at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backends/cpu/pack/pack_panels.h"
#include "backends/cpu/pack/panels.h"
#include "layout/join_columns.h"

namespace marlin::cpu {

/// The columns of a block that come from one part.
struct ColumnRun {
  const WeightColumns* part = nullptr;
  int64_t first = 0;  ///< First column in the part's weights; the next follow at part->step.
  int64_t count = 0;
  int64_t to = 0;  ///< First row in the block.
};

/// Several weights joined along n, divided into blocks.
class BlockColumns {
 public:
  /// The parts must outlive this.
  explicit BlockColumns(std::span<const WeightColumns> parts);

  int64_t n() const { return starts_.back(); }
  /// Writes the runs of a block to `runs`, in order, and returns their number. Precondition:
  /// block * 16 < n().
  int Runs(int64_t block, ColumnRun (&runs)[kBlockRows]) const;

 private:
  std::span<const WeightColumns> parts_;
  std::vector<int64_t> starts_;  ///< First column of each part, then n.
};

/// Packs one block of an expert into panels. The columns must outlive it.
class BlockPacker {
 public:
  BlockPacker() = default;
  /// Precondition: block * 16 < columns.n().
  BlockPacker(const BlockColumns& columns, int64_t block, int64_t expert);

  /// Packs the codes of one chunk. Unquantized weights may be transposed.
  void PackChunk(int64_t chunk, uint8_t* out) const;
  /// Packs one of the arrays [experts, groups, n] as [padded groups][16].
  void PackGroups(const TensorView QuantizedWeights::*array, int64_t padded_groups,
                  uint8_t* out) const;

  /// Prefetches the memory that PackChunk of these adjacent blocks will read.
  static void Prefetch(std::span<const BlockPacker> blocks, int64_t chunk);

 private:
  enum class Kind : uint8_t {
    kWhole,       ///< One run of contiguous columns.
    kTransposed,  ///< 16- or 32-bit elements with contiguous k.
    kSparse,      ///< 2:4.
    kGathered,    ///< Anything else.
  };
  std::span<const ColumnRun> runs() const { return {runs_, static_cast<size_t>(count_)}; }

  ColumnRun runs_[kBlockRows];
  int count_ = 0;
  int64_t expert_ = 0;
  Kind kind_ = Kind::kGathered;
  ChunkSource source_{};    ///< Weights of the first run.
  uint32_t zero_code_ = 0;  ///< Code of value 0 in 2:4 weights.
};

/// Whether all elements of a chunk of an unquantized format are finite.
bool ChunkIsFinite(Format format, const uint8_t* chunk);

}  // namespace marlin::cpu
