// The persistent kernel between attentions that run elsewhere: a run begins with the output
// projection of the first one's results, and may end with the projections before the next one.
//
//   Latent attention has two forms of projections. Queries and latents may be one GEMM, kQkv, or
//   kQkv has queries of a low rank, whose norm and second projection follow as the layer's kOut.
//   The last CTAs, one for each row, store the latents, after their norm; the others store the
//   queries.
#pragma once

#include "backends/cuda/common/thread_barrier.cuh"
#include "backends/cuda/persistent/persistent_exchange.cuh"
#include "backends/cuda/persistent/persistent_layout.h"
#include "backends/cuda/persistent/persistent_tiles.cuh"

namespace marlin::cuda {

/// Four results of a mixer, from feature `i` on, in memory.
MARLIN_DEVICE float4 ReadMixed(const PersistentArguments& args, int i) {
  if (!args.mixed_is_bf16) {
    return *reinterpret_cast<const float4*>(static_cast<const float*>(args.mixed) + i);
  }
  const uint2 v = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(args.mixed) + i);
  return {__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
          __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u)};
}

/// Stores the first sums of the projections of `rows`, which CTAs below `blocks` share.
MARLIN_DEVICE void StoreProjected(const PersistentArguments& args, const PhaseGemm& gemm,
                                  const uint32_t* sums, uint32_t tag, int rows, int blocks) {
  const int quads = gemm.n / 4;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x * kPersistentThreads + threadIdx.x); i < rows * quads;
       i += blocks * kPersistentThreads) {
    const int row = rows == 1 ? 0 : QuotientOf(i, quads);
    reinterpret_cast<float4*>(args.projected)[i] = GatherSums(
        sums + row * gemm.columns + 4 * (i - row * quads), gemm.splits, rows * gemm.columns, tag);
  }
}

/// The first layer's results of `rows` that the CTA's units need, as activations.
template <bool kLimbs>
MARLIN_DEVICE void GatherResults(const PersistentArguments& args, const PhaseGemm& gemm, int rows) {
  const Schedule& schedule = Tables{args}.ScheduleOf(gemm);
  const int first = schedule.first_k_tile * (kTileK / 4);
  const int quads = schedule.end_k_tile * (kTileK / 4) - first;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < rows * quads; i += kPersistentThreads) {
    const int row = rows == 1 ? 0 : QuotientOf(i, quads);
    const int quad = i - row * quads;
    const int feature = 4 * (first + quad);
    const bool exists = feature < gemm.weights.k;
    StoreActivations<kLimbs>(
        args, quad, exists ? ReadMixed(args, row * gemm.weights.k + feature) : float4{}, row);
  }
}

/// The projections before latent attention. `words`: the exchange buffer of their layer.
struct LatentProjections {
  const PersistentArguments& args;
  const PersistentLayer& layer;
  const uint32_t* words;
  uint32_t tag;
  int rows = 1;

  /// A single row's queries of a low rank times their norm's weights, as activations of the second
  /// projection, and the warps' sums of their squares. Called by all threads that compute.
  template <bool kLimbs>
  MARLIN_DEVICE void PrepareQueries() const {
    const PhaseGemm& gemm = layer.gemms[static_cast<int>(Phase::kOut)];
    const Schedule& schedule = Tables{args}.ScheduleOf(gemm);
    const auto thread = static_cast<int>(threadIdx.x);
    float squares[1] = {};
    float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
    if (4 * thread < layer.gemms[0].n) {
      const float4 w = reinterpret_cast<const float4*>(layer.query_norm)[thread];
      x = Gather(0, 4 * thread);
      squares[0] = Squares(x);
      x = Times(x, w);
    }
    StoreWarpSums(squares, Tables{args}.Scratch().squares);
    const int quad = thread - schedule.first_k_tile * (kTileK / 4);
    const int quads = (schedule.end_k_tile - schedule.first_k_tile) * (kTileK / 4);
    if (quad >= 0 && quad < quads) StoreActivations<kLimbs>(args, quad, x);
  }

  /// Stores queries and latents. Called by all threads that compute.
  MARLIN_DEVICE void Store() const {
    const int blocks = static_cast<int>(gridDim.x) - rows;
    if (static_cast<int>(blockIdx.x) >= blocks) {
      return StoreLatent(static_cast<int>(blockIdx.x) - blocks);
    }
    const Phase phase = layer.query_norm != nullptr ? Phase::kOut : Phase::kQkv;
    StoreProjected(args, layer.gemms[static_cast<int>(phase)],
                   words + args.exchange.phases[static_cast<int>(phase)], tag, rows, blocks);
  }

 private:
  /// Four sums of a row's first projections.
  MARLIN_DEVICE float4 Gather(int row, int column) const {
    const PhaseGemm& gemm = layer.gemms[static_cast<int>(Phase::kQkv)];
    const uint32_t* const sums = words + args.exchange.phases[static_cast<int>(Phase::kQkv)];
    return GatherSums(sums + row * gemm.columns + column, gemm.splits, rows * gemm.columns, tag);
  }

  MARLIN_DEVICE void StoreLatent(int row) const {
    const PhaseGemm& gemm = layer.gemms[static_cast<int>(Phase::kQkv)];
    PersistentScratch& scratch = Tables{args}.Scratch();
    const int feature = 4 * static_cast<int>(threadIdx.x);
    const bool normalized = feature < layer.latent_features;
    float squares[1] = {};
    float4 w = {0.0f, 0.0f, 0.0f, 0.0f};
    float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
    if (feature < gemm.up_n) {
      if (normalized) w = *reinterpret_cast<const float4*>(layer.key_norm + feature);
      x = Gather(row, gemm.strips * kStripOutputs + feature);
      if (normalized) squares[0] = Squares(x);
    }
    StoreWarpSums(squares, scratch.squares);
    SyncFirst<kPersistentThreads>();
    if (feature >= gemm.up_n) return;
    const float factor = NormFactor(scratch, layer.latent_features, layer.key_epsilon);
    if (normalized) x = Times({x.x * factor, x.y * factor, x.z * factor, x.w * factor}, w);
    *reinterpret_cast<float4*>(args.latent + row * gemm.up_n + feature) = x;
  }
};

}  // namespace marlin::cuda
