// How the units and tiles of a phase are dealt to the CTAs of the persistent kernel, and a CTA's
// tiles to its warps where there are several rows. The host deals what it knows; the kernel itself
// the experts that the rows have selected.
#pragma once

#include <cstdint>

#include "backends/cuda/persistent/persistent_layout.h"

namespace marlin::cuda {

/// The first of a CTA's `tiles` that warp `warp` has: equal parts, of a tile at least.
MARLIN_HOST_DEVICE int TilesBefore(int warp, int tiles) {
  if (tiles < kPersistentWarps) return warp < tiles ? warp : tiles;
  return tiles * warp / kPersistentWarps;
}
/// The warp that has tile `tile`, below `tiles`.
MARLIN_HOST_DEVICE int WarpOfTile(int tile, int tiles) {
  if (tiles < kPersistentWarps) return tile;
  return (kPersistentWarps * (tile + 1) - 1) / tiles;
}

/// The part of CTA `block` of `blocks` in a phase.
class PhaseDeal {
 public:
  /// `rows`: with several, words of a split are [rows][columns], and experts' units have words of
  /// their matrix alone, because each row has its own place for them. `selected`: the copies or
  /// segments, if there are other ones than the phase says; 0: as it says.
  MARLIN_HOST_DEVICE PhaseDeal(const PhaseGemm& gemm, int rows, int selected, int block, int blocks)
      : gemm_(gemm), rows_(rows), own_words_(selected > 0 && gemm.segments == 1) {
    const bool in_segments = selected > 0 && gemm.segments > 1;
    const int copies = selected > 0 && !in_segments ? selected : gemm.copies;
    of_copy_ = gemm.sides * gemm.strips;
    of_split_ = copies * of_copy_;
    k_tiles_ = in_segments ? selected * gemm.weights.tiles_of_strip : gemm.k_tiles;
    tiles_of_split_ = (k_tiles_ + gemm.splits - 1) / gemm.splits;
    const int units = gemm.splits * of_split_;
    first_ = units * block / blocks;
    end_ = units * (block + 1) / blocks;
    tiles_before_ = TilesBeforeUnit(first_);
    tiles_ = TilesBeforeUnit(end_) - tiles_before_;
  }

  MARLIN_HOST_DEVICE Schedule Header() const {
    Schedule header;
    header.units = end_ - first_;
    header.tiles = tiles_;
    if (tiles_ == 0) return header;
    header.first_k_tile = first_ / of_split_ * tiles_of_split_;
    header.end_k_tile = FirstTile((end_ - 1) / of_split_ + 1);
    return header;
  }

  /// Unit `local` of the CTA's; without the warps that have its tiles.
  MARLIN_HOST_DEVICE ScheduledUnit Unit(int local) const {
    const int number = first_ + local;
    const int split = number / of_split_;
    const int of_split = number - split * of_split_;
    const int copy = of_split / of_copy_;
    const int of_copy = of_split - copy * of_copy_;
    const int side = of_copy >= gemm_.strips ? 1 : 0;
    const int strip = of_copy - side * gemm_.strips;
    ScheduledUnit unit;
    const int strips = (own_words_ ? 0 : copy * of_copy_) + of_copy;
    unit.word = static_cast<uint32_t>(split * rows_ * gemm_.columns + strips * kStripOutputs);
    unit.output = static_cast<uint32_t>(strip * kStripOutputs);
    unit.copy = static_cast<uint8_t>(copy);
    unit.side = static_cast<uint8_t>(side);
    unit.first_split = split == 0 ? 1 : 0;
    const int first = TilesBeforeUnit(number) - tiles_before_;
    const int end = TilesBeforeUnit(number + 1) - tiles_before_;
    if (rows_ > 1 && first < end) {
      unit.first_warp = static_cast<uint8_t>(WarpOfTile(first, tiles_));
      unit.end_warp = static_cast<uint8_t>(WarpOfTile(end - 1, tiles_) + 1);
    }
    return unit;
  }

  /// Tile `local` of the CTA's: unit after unit, and along k in each.
  MARLIN_HOST_DEVICE ScheduledTile Tile(int local) const {
    const int before = tiles_before_ + local;
    // All splits before the tile's are full.
    const int split = before / (of_split_ * tiles_of_split_);
    const int first = FirstTile(split);
    const int length = FirstTile(split + 1) - first;
    const int of_split = before - first * of_split_;
    const int unit = of_split / length;
    const int k_tile = first + of_split - unit * length;
    const int copy = unit / of_copy_;
    const int of_copy = unit - copy * of_copy_;
    const int side = of_copy >= gemm_.strips ? 1 : 0;
    const int strip = of_copy - side * gemm_.strips;
    const int segment = k_tile / gemm_.weights.tiles_of_strip;
    const int selection = gemm_.segments > 1 ? segment : copy;
    const TileView& layout = selection == gemm_.shared_selection ? gemm_.shared : gemm_.weights;
    ScheduledTile tile;
    tile.offset = static_cast<uint32_t>(
        TileOffset(layout, strip, k_tile - segment * gemm_.weights.tiles_of_strip) / 16);
    tile.k_tile = static_cast<uint16_t>(k_tile);
    tile.unit = static_cast<uint8_t>(split * of_split_ + unit - first_);
    tile.selection = static_cast<uint8_t>(selection) & 127;
    tile.side = static_cast<uint8_t>(side) & 1;
    return tile;
  }

 private:
  /// Where a split begins along k.
  MARLIN_HOST_DEVICE int FirstTile(int split) const {
    const int first = split * tiles_of_split_;
    return first < k_tiles_ ? first : k_tiles_;
  }
  MARLIN_HOST_DEVICE int TilesBeforeUnit(int number) const {
    const int split = number / of_split_;
    const int first = FirstTile(split);
    return first * of_split_ +
           (number - split * of_split_) * (FirstTile(split + 1) - first);
  }

  const PhaseGemm& gemm_;
  int rows_;
  bool own_words_;
  int of_copy_;
  int of_split_;
  int k_tiles_;
  int tiles_of_split_;
  int first_;
  int end_;
  int tiles_before_;
  int tiles_;
};

}  // namespace marlin::cuda
