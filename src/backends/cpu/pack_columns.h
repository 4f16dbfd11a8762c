// Columns of several weights side by side -> CPU panels: what the blocks of 16 columns are made of.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

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
  std::vector<int64_t> starts_;  ///< Of each part its first column; last n.
};

/// Writes the codes of one chunk of a block. Codes of unquantized formats may lie transposed.
void PackBlockChunk(std::span<const ColumnRun> runs, int64_t expert, int64_t chunk, uint8_t* out);

/// Asks for the memory that PackBlockChunk will read next.
void PrefetchBlockChunk(std::span<const ColumnRun> runs, int64_t expert, int64_t chunk);

/// Writes one of the arrays [experts, groups, n], as [padded groups][16] of a block.
void PackBlockGroups(std::span<const ColumnRun> runs, const TensorView QuantizedWeights::*array,
                     int64_t expert, int64_t padded_groups, uint8_t* out);

/// Whether every number of a chunk of an unquantized format is finite.
bool ChunkIsFinite(Format format, const uint8_t* chunk);

}  // namespace marlin::cpu
