#include "backends/cuda/persistent/persistent_gemms.h"

#include <cmath>

#include "backends/cuda/common/tile_gemm.h"
#include "backends/cuda/weights/prepared_tiles.h"

namespace marlin::cuda {

bool SameTiles(const TileView& a, const TileView& b) { return a.n == b.n && SameTileLayout(a, b); }

bool PersistentGemms::IsOnDevice(const PreparedWeights& part) const {
  return Internals::Storage(part)->backend == backend_;
}

Support PersistentGemms::TakeTiles(const PreparedWeights& part, TileView* tiles) {
  if (backend_ == nullptr) backend_ = Internals::Storage(part)->backend;
  if (!IsOnDevice(part)) return {"experts on the host"};
  const auto& prepared = static_cast<const PreparedTiles&>(*Internals::Storage(part));
  if (!prepared.traits.tiled || prepared.traits.marlin_w4) return {"weights that are not in tiles"};
  if (prepared.traits.sparse) return {"sparse weights"};
  if (TransformsInput(prepared.spec)) return {"weights with an input transform"};
  if (!kind_.has_value()) kind_ = prepared.kind();
  if (*kind_ != prepared.kind()) return {"weights with several kinds of codes"};
  *tiles = prepared.Tiles(0);
  tiles->multiplier *= std::ldexp(1.0F, ExponentsOf(*kind_, true).shift + tiles->table_exponent);
  return {};
}

Support PersistentGemms::Add(const StepLinear& linear, size_t most_parts, PhaseGemm* gemm) {
  const size_t parts = linear.parts.size();
  if (parts == 0 || parts > most_parts) {
    return {"a projection of {0} parts", static_cast<int64_t>(parts)};
  }
  TileView tiles;
  if (const Support support = TakeTiles(linear.parts[0], &tiles); !support.ok()) return support;
  if (tiles.k == 0 || tiles.n % 4 != 0) {
    return {"a projection to {0} features; supported: multiples of 4", tiles.n};
  }
  gemm->weights = tiles;
  gemm->use = UseOf(tiles, *kind_);
  gemm->sides = static_cast<int>(parts);
  if (parts == 2) {
    TileView up;
    if (const Support support = TakeTiles(linear.parts[1], &up); !support.ok()) return support;
    if (!SameTiles(tiles, up)) return {"gate and up in different tiles"};
    gemm->up_tiles = up.tiles;
    gemm->up_multiplier = up.multiplier;
  }
  gemm->bias = linear.bias.As<float>();
  gemm->n = tiles.n;
  gemm->strips = (tiles.n + kStripOutputs - 1) / kStripOutputs;
  gemm->k_tiles = tiles.tiles_of_strip;
  return {};
}

Support PersistentGemms::AddPair(const StepLinear& first, const StepLinear& second,
                                 PhaseGemm* gemm) {
  if (const Support support = Add(first, 1, gemm); !support.ok()) return support;
  PhaseGemm other;
  if (const Support support = Add(second, 1, &other); !support.ok()) return support;
  if (!SameTileLayout(gemm->weights, other.weights) || gemm->use != other.use) {
    return {"queries and latents in different tiles"};
  }
  if (gemm->bias != nullptr || other.bias != nullptr) return {"biases of queries or latents"};
  gemm->sides = 2;
  gemm->up_tiles = other.weights.tiles;
  gemm->up_multiplier = other.weights.multiplier;
  gemm->up_n = other.n;
  return {};
}

Support PersistentGemms::AddGated(const StepMlp& mlp, PhaseGemm* gates, PhaseGemm* down) {
  if (const Support support = Add(mlp.gate_up, 2, gates); !support.ok()) return support;
  if (const Support support = Add(mlp.down, 1, down); !support.ok()) return support;
  const int inner = down->weights.k;
  if (gates->n * gates->sides == 2 * inner && inner % 4 == 0) return {};
  return {"{0} inner features; supported: multiples of 4, half of gate and up", inner};
}

}  // namespace marlin::cuda
