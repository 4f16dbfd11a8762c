// How the units and tiles of a phase are dealt to the CTAs of the persistent kernel, and a CTA's
// tiles to its warps. The host deals what it knows; the kernel itself the experts that several rows
// have selected.
#pragma once

#include <cstdint>

#include "backends/cuda/persistent/persistent_layout.h"

namespace marlin::cuda {

/// a / b, of numbers below 2^24 that are not negative: on a GPU in a fraction of a division's time.
MARLIN_HOST_DEVICE int QuotientOf(int a, int b) {
#ifdef __CUDA_ARCH__
  const int quotient = static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  const int rest = a - quotient * b;
  return quotient + (rest >= b ? 1 : 0) - (rest < 0 ? 1 : 0);
#else
  return a / b;
#endif
}

/// The first of a CTA's `tiles` that warp `warp` has: equal parts, of which the first ones may have
/// one more.
MARLIN_HOST_DEVICE int TilesBefore(int warp, int tiles) {
  const int extra = tiles % kPersistentWarps;
  return tiles / kPersistentWarps * warp + (warp < extra ? warp : extra);
}
/// The warp that has tile `tile`, below `tiles`.
MARLIN_HOST_DEVICE int WarpOfTile(int tile, int tiles) {
  const int most = (tiles + kPersistentWarps - 1) / kPersistentWarps;
  const int extra = tiles % kPersistentWarps;
  if (extra == 0 || tile < extra * most) return QuotientOf(tile, most);
  return extra + QuotientOf(tile - extra * most, most - 1);
}

/// Where a tile of part `part` of the shared expert begins in its matrix: parts divide its inner
/// features, which are outputs of gates and inputs of downs. One matrix of both sides has the gates
/// of all parts first.
MARLIN_HOST_DEVICE int64_t SharedTileOffset(const PhaseGemm& gemm, int part, int strip, int tile) {
  if (gemm.segments > 1) {
    return TileOffset(gemm.shared, strip, part * gemm.weights.tiles_of_strip + tile);
  }
  if (gemm.shared_parts == 1) return TileOffset(gemm.shared, strip, tile);
  if (gemm.sides == 2) return TileOffset(gemm.shared, part * gemm.strips + strip, tile);
  const int half = gemm.strips / 2;
  const int before = strip < half ? part * half : (gemm.shared_parts + part - 1) * half;
  return TileOffset(gemm.shared, before + strip, tile);
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
    of_copy_ = gemm.copy_strips;
    of_split_ = copies * of_copy_;
    k_tiles_ = in_segments ? selected * gemm.weights.tiles_of_strip : gemm.k_tiles;
    tiles_of_split_ = QuotientOf(k_tiles_ + gemm.splits - 1, gemm.splits);
    const int units = gemm.splits * of_split_;
    first_ = QuotientOf(units * block, blocks);
    end_ = QuotientOf(units * (block + 1), blocks);
    tiles_before_ = TilesBeforeUnit(first_);
    tiles_ = TilesBeforeUnit(end_) - tiles_before_;
  }

  MARLIN_HOST_DEVICE int units() const { return end_ - first_; }

  /// Without the place of the tiles.
  MARLIN_HOST_DEVICE Schedule Header() const {
    Schedule header;
    header.units = end_ - first_;
    header.tiles = tiles_;
    header.first_unit = first_;
    header.tiles_before = tiles_before_;
    header.tiles_of_split = tiles_of_split_;
    header.k_tiles = k_tiles_;
    if (tiles_ == 0) return header;
    header.first_k_tile = FirstTile(SplitOf(first_));
    header.end_k_tile = FirstTile(SplitOf(end_ - 1) + 1);
    return header;
  }

  /// Unit `local` of the CTA's.
  MARLIN_HOST_DEVICE ScheduledUnit Unit(int local) const {
    const int number = first_ + local;
    const int split = SplitOf(number);
    const int of_split = number - split * of_split_;
    const int copy = QuotientOf(of_split, of_copy_);
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
    const int end = first + FirstTile(split + 1) - FirstTile(split);
    if (rows_ > 1 && first < end) {
      unit.first_warp = static_cast<uint8_t>(WarpOfTile(first, tiles_));
      unit.end_warp = static_cast<uint8_t>(WarpOfTile(end - 1, tiles_) + 1);
    }
    return unit;
  }

 private:
  MARLIN_HOST_DEVICE int SplitOf(int unit) const {
    if (gemm_.splits == 1) return 0;
    return QuotientOf(unit, of_split_);
  }
  /// Where a split begins along k.
  MARLIN_HOST_DEVICE int FirstTile(int split) const {
    const int first = split * tiles_of_split_;
    return first < k_tiles_ ? first : k_tiles_;
  }
  MARLIN_HOST_DEVICE int TilesBeforeUnit(int number) const {
    const int split = SplitOf(number);
    const int first = FirstTile(split);
    return first * of_split_ + (number - split * of_split_) * (FirstTile(split + 1) - first);
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

/// Walks through the tiles of a CTA: unit after unit, and along k in each.
class TileWalk {
 public:
  /// Begins with tile `local` of the CTA's, which it has.
  MARLIN_HOST_DEVICE TileWalk(const PhaseGemm& gemm, const Schedule& schedule, int local)
      : gemm_(gemm), schedule_(schedule) {
    const int of_copy = gemm.copy_strips;
    // Without splits, there may be other copies than the phase says.
    const int units = gemm.copies * of_copy;
    const int before = schedule.tiles_before + local;
    const int split = gemm.splits == 1 ? 0 : QuotientOf(before, units * schedule.tiles_of_split);
    SetSplit(split * schedule.tiles_of_split);
    const int of_split = before - first_ * units;
    const int number = QuotientOf(of_split, end_ - first_);
    k_tile_ = first_ + of_split - number * (end_ - first_);
    unit_ = split * units + number - schedule.first_unit;
    copy_ = QuotientOf(number, of_copy);
    of_copy_ = number - copy_ * of_copy;
  }

  MARLIN_HOST_DEVICE void Advance() {
    if (++k_tile_ < end_) return;
    ++unit_;
    if (++of_copy_ == gemm_.copy_strips) {
      of_copy_ = 0;
      ++copy_;
      if (gemm_.splits > 1 && copy_ == gemm_.copies) {
        copy_ = 0;
        SetSplit(end_);
      }
    }
    k_tile_ = first_;
  }

  MARLIN_HOST_DEVICE int unit() const { return unit_; }
  MARLIN_HOST_DEVICE int k_tile() const { return k_tile_; }
  MARLIN_HOST_DEVICE int selection() const {
    return gemm_.segments > 1 ? k_tile_ * gemm_.segment_factor >> kSegmentBits : copy_;
  }
  MARLIN_HOST_DEVICE ScheduledTile Tile() const {
    return TileAt(TileOffset(gemm_.weights, Strip(), OfSegment()));
  }
  /// The same, where selections from `first_shared` on are parts of the shared expert.
  MARLIN_HOST_DEVICE ScheduledTile Tile(int first_shared) const {
    const int part = selection() - first_shared;
    if (part < 0) return Tile();
    return TileAt(SharedTileOffset(gemm_, part, Strip(), OfSegment()));
  }

 private:
  MARLIN_HOST_DEVICE int Side() const { return of_copy_ >= gemm_.strips ? 1 : 0; }
  MARLIN_HOST_DEVICE int Strip() const { return of_copy_ - Side() * gemm_.strips; }
  MARLIN_HOST_DEVICE int OfSegment() const {
    return k_tile_ - (gemm_.segments > 1 ? selection() : 0) * gemm_.weights.tiles_of_strip;
  }
  MARLIN_HOST_DEVICE ScheduledTile TileAt(int64_t offset) const {
    ScheduledTile tile;
    tile.offset = static_cast<uint32_t>(offset / 16);
    tile.k_tile = static_cast<uint16_t>(k_tile_);
    tile.unit = static_cast<uint8_t>(unit_);
    tile.selection = static_cast<uint8_t>(selection()) & 127;
    tile.side = static_cast<uint8_t>(Side()) & 1;
    return tile;
  }
  MARLIN_HOST_DEVICE void SetSplit(int first) {
    first_ = first;
    const int end = first + schedule_.tiles_of_split;
    end_ = end < schedule_.k_tiles ? end : schedule_.k_tiles;
  }

  const PhaseGemm& gemm_;
  const Schedule& schedule_;
  int first_;  ///< The split's part of k.
  int end_;
  int k_tile_;
  int unit_;
  int copy_;
  int of_copy_;  ///< The unit, of its copy's.
};

}  // namespace marlin::cuda
