// The inputs of a phase in the persistent kernel with rows: what other CTAs have published,
// gathered as activations in shared memory.
#pragma once

#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/persistent/persistent_rows_part.cuh"

namespace marlin::cuda {

/// Gathers activations. Called by all threads that compute.
template <bool kLimbs>
class RowsInputs : private RowsPart {
 public:
  MARLIN_DEVICE explicit RowsInputs(const PersistentArguments& args) : RowsPart(args) {}

  /// The residual times a norm's weights, in all rows, with zeros up to whole tiles, and the norm's
  /// factors, which multiply the finished sums. With a router also stores the warps' parts of its
  /// dot products, without the factor.
  MARLIN_DEVICE void GatherResidual(int phase) const {
    const PersistentLayer& layer = LayerOf(phase);
    const int index = phase / kPhases;
    const bool attends = phase % kPhases == static_cast<int>(Phase::kQkv);
    const int which = attends ? 0 : 1;
    // The warps' rows: requested before the inputs, they are there with them.
    const uint32_t* const squares =
        Words(index) + args_.exchange.strips_squares[which] + warp_ * OwnedStrips::Strips(args_);
    uint32_t found[kSquaresAtOnce];
    if (warp_ < args_.rows) {
#pragma unroll
      for (int i = 0; i < kSquaresAtOnce; ++i) {
        const int strip = lane_ + 32 * i;
        if (strip < OwnedStrips::Strips(args_)) found[i] = PollWord(squares + strip);
      }
    }
    const int router_rows = layer.router != nullptr && !attends ? Scratch().router_rows : 0;
    // A CTA has one row of most routers; for each further one the words, which are there, are read
    // again.
#pragma unroll 1
    for (int at = 0; at < max(router_rows, 1); ++at) {
      const uint32_t* const words = Words(index) + args_.exchange.inputs[which];
      if (args_.rows <= kFewRows) {
        GatherOnce<kFewRows>(words, Tag(index), at, router_rows);
      } else {
        GatherOnce<kMostPersistentRows>(words, Tag(index), at, router_rows);
      }
    }
    if (warp_ < args_.rows) {
      FindFactor(squares, found, Tag(index), attends ? layer.attention_epsilon : layer.mlp_epsilon);
    }
  }

  /// All rows of attention's results that the CTA's units need.
  MARLIN_DEVICE void GatherMixed(const uint32_t* mixed, int features, const Schedule& schedule,
                                 uint32_t tag) const {
    if (args_.rows <= kFewRows) {
      GatherMixedRows<kFewRows>(mixed, features, schedule, tag);
    } else {
      GatherMixedRows<kMostPersistentRows>(mixed, features, schedule, tag);
    }
  }

  /// The gated activation of the inputs that the CTA's units need; of an expert times its weight,
  /// and zeros for the rows that have not selected it. A warp has a k-tile of a row.
  MARLIN_DEVICE void GatherGates(int phase) const {
    const PersistentLayer& layer = LayerOf(phase);
    const int index = phase / kPhases;
    const PhaseGemm& gates = layer.gemms[static_cast<int>(Phase::kGates)];
    const PhaseGemm& gemm = layer.gemms[static_cast<int>(Phase::kDown)];
    const Schedule& schedule = tables_.ScheduleOf(gemm);
    const uint32_t* const words =
        Words(index) + args_.exchange.phases[static_cast<int>(Phase::kGates)];
    const bool routes = layer.experts != nullptr;
    const int inner = gemm.weights.k;
    const int of_copy = gates.copy_strips * kStripOutputs;
    const int to_up = gates.sides == 2 ? gates.strips * kStripOutputs : inner;
    const int pairs = (schedule.end_k_tile - schedule.first_k_tile) * args_.rows;
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int first = warp_; first < pairs; first += kAtOnce * kPersistentWarps) {
      int from[kAtOnce];
      float factors[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int pair = first + i * kPersistentWarps;
        const int local = QuotientOf(pair, args_.rows);
        const int tile = schedule.first_k_tile + local;
        const int row = pair - local * args_.rows;
        const int segment = routes ? tile * gemm.segment_factor >> kSegmentBits : 0;
        const int element = (tile - segment * gemm.weights.tiles_of_strip) * kTileK + 4 * lane_;
        from[i] = -1;
        factors[i] = 1.0f;
        if (pair >= pairs || element >= inner) continue;
        int place = 0;
        if (routes) {
          if ((Rows().task_rows[segment] >> row & 1) == 0) continue;
          place = Rows().places[segment][row];
          factors[i] = Scratch().weights[row * kMostChosenExperts + place] *
                       tables_.Chosen(segment).down_multiplier;
        }
        from[i] = row * gates.columns + place * of_copy + element;
      }
      const AwaitedQuads<2 * kAtOnce, Polls::kFirst> quads(
          words, Tag(index), [&](int i) { return from[i / 2] + i % 2 * to_up; },
          [&](int i) { return from[i / 2] >= 0; });
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int pair = first + i * kPersistentWarps;
        if (pair >= pairs) break;
        float4 h = {0.0f, 0.0f, 0.0f, 0.0f};
        if (from[i] >= 0) {
          const float4 g = quads.Value(2 * i);
          const float4 u = quads.Value(2 * i + 1);
          h = GateProducts(args_.gate, g, u, factors[i]);
        }
        const int local = QuotientOf(pair, args_.rows);
        StoreActivations<kLimbs>(args_, local * (kTileK / 4) + lane_, h, pair - local * args_.rows);
      }
    }
  }

 private:
  static constexpr int kSquaresAtOnce = 4;
  /// Gathers of at most this many rows are compiled separately: polling eight quads takes about a
  /// hundred instructions.
  static constexpr int kFewRows = 2;

  template <int kMost>
  MARLIN_DEVICE void GatherMixedRows(const uint32_t* mixed, int features, const Schedule& schedule,
                                     uint32_t tag) const {
    const int first_quad = schedule.first_k_tile * (kTileK / 4);
    const int padded = schedule.end_k_tile * (kTileK / 4) - first_quad;
    const int quads = features / 4 - first_quad;
#pragma unroll 1
    for (int quad = thread_; quad < padded; quad += kPersistentThreads) {
      const int rows_here = quad < quads ? args_.rows : 0;
      const AwaitedQuads<kMost, Polls::kFirst> rows(
          mixed + 4 * (first_quad + quad), tag, [&](int r) { return r * features; },
          [&](int r) { return r < rows_here; });
#pragma unroll
      for (int r = 0; r < kMost; ++r) {
        if (r >= args_.rows) break;
        StoreActivations<kLimbs>(args_, quad, rows.Value(r), r);
      }
    }
  }

  /// Stores the activations, the first time, with zeros up to whole tiles, and the warp's part of
  /// the dot products of router row `at`, if there is one.
  template <int kMost>
  MARLIN_DEVICE void GatherOnce(const uint32_t* words, uint32_t tag, int at,
                                int router_rows) const {
    const int quads = args_.features / 4;
    const int padded = (quads + kTileK / 4 - 1) & -(kTileK / 4);
    const auto* const router =
        reinterpret_cast<const float4*>(Memory() + args_.shared.router) + at * quads;
    float dots[kMost] = {};
#pragma unroll 1
    for (int i = thread_; i < padded; i += kPersistentThreads) {
      const int rows_here = i < quads ? args_.rows : 0;
      const AwaitedQuads<kMost, Polls::kFirst> rows(
          words + 4 * i, tag, [&](int r) { return r * args_.features; },
          [&](int r) { return r < rows_here; });
      float4 w = {0.0f, 0.0f, 0.0f, 0.0f};
      if (rows_here > 0 && router_rows > 0) w = router[i];
#pragma unroll
      for (int r = 0; r < kMost; ++r) {
        if (r >= args_.rows) break;
        const float4 y = rows.Value(r);
        if (at == 0) StoreActivations<kLimbs>(args_, i, y, r);
        dots[r] += __fmaf_rn(y.x, w.x, y.y * w.y) + __fmaf_rn(y.z, w.z, y.w * w.w);
      }
    }
    if (router_rows == 0) return;
#pragma unroll
    for (int r = 0; r < kMost; ++r) {
      if (r >= args_.rows) break;
      const float sum = WarpSum(dots[r]);
      if (lane_ == 0) Rows().dots[at][r][warp_] = sum;
    }
  }

  /// The norm's factor of the warp's row. `squares`: of its strips; `found`: the lane's first ones.
  MARLIN_DEVICE void FindFactor(const uint32_t* squares, const uint32_t (&found)[kSquaresAtOnce],
                                uint32_t tag, float epsilon) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSquaresAtOnce; ++i) {
      const int strip = lane_ + 32 * i;
      if (strip < OwnedStrips::Strips(args_)) sum += AwaitWord(squares + strip, found[i], tag);
    }
#pragma unroll 1
    for (int strip = lane_ + 32 * kSquaresAtOnce; strip < OwnedStrips::Strips(args_); strip += 32) {
      sum += AwaitWord(squares + strip, PollWord(squares + strip), tag);
    }
    sum = WarpSum(sum);
    if (lane_ != 0) return;
    Rows().factors[warp_] = rsqrtf(__fdividef(sum, static_cast<float>(args_.features)) + epsilon);
  }
};

}  // namespace marlin::cuda
