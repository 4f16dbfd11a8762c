// Columns of several weights side by side -> CPU panels, one block of 16 columns at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backends/cpu/pack_panels.h"
#include "backends/cpu/panels.h"
#include "layout/join_columns.h"

namespace marlin::cpu {

/// Columns of a block that come from one part.
struct ColumnRun {
  const WeightColumns* part = nullptr;
  int64_t first = 0;  ///< The first one's column in the part's weights; they lie part->step apart.
  int64_t count = 0;
  int64_t to = 0;  ///< The first one's row in the block.
};

/// Weights side by side, cut into blocks.
class BlockColumns {
 public:
  /// The parts outlive this.
  explicit BlockColumns(std::span<const WeightColumns> parts);

  int64_t n() const { return starts_.back(); }
  /// The runs of a block, in order, in `runs`: their number. Precondition: block * 16 < n().
  int Runs(int64_t block, ColumnRun (&runs)[kBlockRows]) const;

 private:
  std::span<const WeightColumns> parts_;
  std::vector<int64_t> starts_;  ///< Each part's first column; n at the end.
};

/// Writes the panels of one block of an expert. The columns outlive it.
class BlockPacker {
 public:
  BlockPacker() = default;
  /// Precondition: block * 16 < columns.n().
  BlockPacker(const BlockColumns& columns, int64_t block, int64_t expert);

  /// The codes of one chunk. Codes of unquantized formats may lie transposed.
  void PackChunk(int64_t chunk, uint8_t* out) const;
  /// One of the arrays [experts, groups, n], as [padded groups][16].
  void PackGroups(const TensorView QuantizedWeights::*array, int64_t padded_groups,
                  uint8_t* out) const;

  /// Asks for the memory that PackChunk of these neighbouring blocks will read.
  static void Prefetch(std::span<const BlockPacker> blocks, int64_t chunk);

 private:
  enum class Kind : uint8_t {
    kWhole,       ///< One run, rows of neighbouring columns.
    kTransposed,  ///< Numbers of 16 or 32 bits whose k follow each other.
    kGathered,    ///< Anything else.
  };
  std::span<const ColumnRun> runs() const { return {runs_, static_cast<size_t>(count_)}; }

  ColumnRun runs_[kBlockRows];
  int count_ = 0;
  int64_t expert_ = 0;
  Kind kind_ = Kind::kGathered;
  ChunkSource source_{};  ///< The first run's weights.
};

/// Whether every number of a chunk of an unquantized format is finite.
bool ChunkIsFinite(Format format, const uint8_t* chunk);

}  // namespace marlin::cpu
