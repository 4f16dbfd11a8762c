// Decode of the next tokens of two to eight texts by one launch: the persistent kernel with rows.
//
//   As with one token (persistent_kernel.cuh), but for what rows make more expensive or possible:
//
//   - The rows are columns of the MMAs, so weights are read once. Attention has a part of the keys
//     of one row and one KV head for each CTA.
//   - A strip of 32 features of the residual has an owner. It adds the partial sums of a block, of
//     which there may be many, and publishes the strip times the norm's weights: every CTA adding
//     all sums of all rows would take more of L2 than it has.
//   - Experts that several rows have selected are multiplied once (persistent_rows_router.cuh). A
//     row that has not selected an expert has zeros in its inputs of the downs; of the gates, its
//     sums are not published.
//   - A warp has adjacent tiles of a CTA, so that a unit's sums are those of few warps.
#pragma once

#include "backends/cuda/persistent/persistent_begin.cuh"
#include "backends/cuda/persistent/persistent_rows_router.cuh"
#include "backends/cuda/persistent/persistent_tiles.cuh"

namespace marlin::cuda {

/// A CTA of the kernel.
class PersistentRows {
 public:
  MARLIN_DEVICE explicit PersistentRows(const PersistentArguments& args)
      : args_(args),
        thread_(static_cast<int>(threadIdx.x)),
        warp_(static_cast<int>(threadIdx.x) >> 5),
        lane_(static_cast<int>(threadIdx.x) & 31),
        tables_{args},
        ring_(args) {}

  MARLIN_DEVICE void Begin() {
    if (thread_ == 0) FindParts();
    SyncFirst<kPersistentThreads>();
    for (int i = thread_; i < kMostPersistentRows * kMostCacheGroups; i += kPersistentThreads) {
      const int row = i % kMostPersistentRows;
      const int group = i / kMostPersistentRows;
      if (row >= args_.rows || !HasKeys(args_, group)) continue;
      Rows().active_splits[group][row] =
          PartOf(args_, group, args_.position[row], kMostTeams).active_splits;
    }
    ForOwned([&](int row, const Place& place) {
      if (place.part != 0) return;
      *place.residual = place.feature < args_.features ? *HiddenAt(row, place.feature)
                                                       : float4{0.0f, 0.0f, 0.0f, 0.0f};
    });
    BeginTables(args_, kMostTeams);
  }

  /// Runs all layers, and stores the residual.
  template <CodeKind kKind>
  MARLIN_DEVICE void Run() {
#pragma unroll 1
    for (int phase = args_.first_phase;; ++phase) {
      const auto which = static_cast<Phase>(phase % kPhases);
      const int index = phase / kPhases;
      const bool normalizes = which == Phase::kQkv || which == Phase::kGates;
      if (normalizes) {
        if (phase < args_.end_phase) {
          AwaitLayer(args_, which == Phase::kQkv ? LayerBarrier::kLayer : LayerBarrier::kMlp,
                     index);
        }
        AddBlock(phase);
        if (phase == args_.end_phase) break;
        GatherInputs(phase);
      } else if (which == Phase::kOut) {
        PrepareOut(phase);
      } else {
        PrepareDown(phase);
      }
      // Copies run a phase ahead, but for experts' tiles, which the router chooses.
      const bool awaits_router =
          LayerOf(phase).experts != nullptr && (which == Phase::kOut || which == Phase::kGates);
      if (phase == args_.first_phase) AllowCopies(args_, Phase::kQkv);
      if (!awaits_router) AllowCopies(args_, static_cast<Phase>((phase + 1) % kPhases));
      SyncFirst<kPersistentThreads>();
      if (which == Phase::kQkv) PublishArrival(index);
      if (which == Phase::kGates) Route(phase);
      const Schedule& schedule = tables_.ScheduleOf(tables_.GemmOf(phase));
      // A norm needs all k.
      MultiplyPhase<kKind, PersistentForm::kRows>(args_, phase, schedule,
                                                  normalizes ? 0 : schedule.first_k_tile, ring_);
      SyncFirst<kPersistentThreads>();
      Publish(phase, schedule);
    }
    Finish();
  }

 private:
  /// Where a lane has a quad of a strip and a row, which a warp has: `part` of four parts of what
  /// is added to it.
  struct Place {
    int part;
    int feature;
    int owned_feature;  ///< Of the CTA's.
    float4* residual;
  };
  static constexpr int kParts = 4;
  static constexpr int kHalf = kPersistentThreads / 2;

  MARLIN_DEVICE const PersistentLayer& LayerOf(int phase) const {
    return tables_.LayerOf(phase / kPhases);
  }
  MARLIN_DEVICE PersistentScratch& Scratch() const { return tables_.Scratch(); }
  MARLIN_DEVICE RowsScratch& Rows() const { return RowsOf(args_); }
  MARLIN_DEVICE uint32_t* Words(int layer) const {
    return args_.words + ((Scratch().clock + layer) & 1) * args_.exchange.words;
  }
  MARLIN_DEVICE uint32_t Tag(int layer) const { return TagOf(Scratch().clock + layer); }
  MARLIN_DEVICE float4* HiddenAt(int row, int feature) const {
    return reinterpret_cast<float4*>(args_.hidden + row * args_.features + feature);
  }

  MARLIN_DEVICE void FindParts() const {
    const auto block = static_cast<int>(blockIdx.x);
    const auto blocks = static_cast<int>(gridDim.x);
    PersistentScratch& scratch = Scratch();
    scratch.router_rows = max(args_.router.rows() - block + blocks - 1, 0) / blocks;
    const int part = block / args_.attention_splits;
    const bool attends = part < args_.rows * args_.kv_heads;
    scratch.row = attends ? part / args_.kv_heads : 0;
    scratch.kv_head = attends ? part - scratch.row * args_.kv_heads : args_.kv_heads;
    scratch.split = block - part * args_.attention_splits;
    scratch.position = args_.position[scratch.row];
    FindKeys(args_, kMostTeams);
  }

  /// call(row, place) by a warp for every strip of the CTA and every row.
  template <typename Call>
  MARLIN_DEVICE void ForOwned(const Call& call) const {
    const OwnedStrips owned(args_);
    auto* const residual = reinterpret_cast<float4*>(Memory() + args_.shared.residual);
    const int quad = lane_ / kParts;
#pragma unroll 1
    for (int i = warp_; i < owned.count * args_.rows; i += kPersistentWarps) {
      const int strip = QuotientOf(i, args_.rows);
      call(i - strip * args_.rows,
           Place{lane_ % kParts, (owned.first + strip) * kStripOutputs + 4 * quad,
                 strip * kStripOutputs + 4 * quad, residual + i * (kStripOutputs / 4) + quad});
    }
  }

  /// Adds the block of the phase before to the CTA's strips of the residual, and publishes them
  /// times the norm's weights, with the sums of their squares; after the last layer it stores the
  /// residual.
  MARLIN_DEVICE void AddBlock(int phase) const {
    const int index = phase / kPhases;
    const int which = phase % kPhases == static_cast<int>(Phase::kQkv) ? 0 : 1;
    const float* const norm = OwnedStrips(args_).Norm(which);
    ForOwned([&](int row, const Place& place) {
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
      if (phase > args_.first_phase) sum = GatherSplits(phase - 1, row, place);
      const float4 x = Advance(place, sum);
      const bool stores = place.part == 0 && place.feature < args_.features;
      if (phase == args_.end_phase) {
        if (stores) *HiddenAt(row, place.feature) = x;
        return;
      }
      uint32_t* const words = Words(index);
      if (stores) {
        const float4 w = *reinterpret_cast<const float4*>(norm + place.owned_feature);
        PublishQuad(words + args_.exchange.inputs[which] + row * args_.features + place.feature,
                    {x.x * w.x, x.y * w.y, x.z * w.z, x.w * w.w}, Tag(index));
      }
      float squares = __fmaf_rn(x.x, x.x, x.y * x.y) + __fmaf_rn(x.z, x.z, x.w * x.w);
#pragma unroll
      for (int step = kParts; step < 32; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
      if (lane_ != 0) return;
      PublishWord(words + args_.exchange.strips_squares[which] + row * OwnedStrips::Strips(args_) +
                      place.feature / kStripOutputs,
                  squares, Tag(index));
    });
  }
  /// residual += the sum over the place's parts; zeros beyond the features. Called by a warp.
  MARLIN_DEVICE float4 Advance(const Place& place, float4 sum) const {
#pragma unroll
    for (int step = 1; step < kParts; step *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, step);
      sum.y += __shfl_xor_sync(~0u, sum.y, step);
      sum.z += __shfl_xor_sync(~0u, sum.z, step);
      sum.w += __shfl_xor_sync(~0u, sum.w, step);
    }
    const float4 before = *place.residual;
    __syncwarp();
    if (place.feature >= args_.features) return {0.0f, 0.0f, 0.0f, 0.0f};
    const float4 x = {before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w};
    if (place.part == 0) *place.residual = x;
    return x;
  }
  /// A part of the splits' sums of a block.
  MARLIN_DEVICE float4 GatherSplits(int phase, int row, const Place& place) const {
    constexpr int kAtOnce = 8;
    static_assert(kAtOnce * kParts == kMostRowSplits);
    const int index = phase / kPhases;
    const PhaseGemm& gemm = tables_.GemmOf(phase);
    const int splits = gemm.splits;
    const int stride = args_.rows * gemm.columns;
    const uint32_t* const words =
        Words(index) + args_.exchange.phases[phase % kPhases] + row * gemm.columns + place.feature;
    const AwaitedQuads<kAtOnce, Polls::kFirst> quads(
        words + place.part * stride, Tag(index), [&](int i) { return i * kParts * stride; },
        [&](int i) { return place.part + i * kParts < splits; });
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (place.part + i * kParts < splits) Add(quads.Value(i), &sum);
    }
    __syncwarp();
    return sum;
  }

  static MARLIN_DEVICE void Add(const float4& v, float4* sum) {
    *sum = {sum->x + v.x, sum->y + v.y, sum->z + v.z, sum->w + v.w};
  }
  /// Four sums of a warp's tiles of a unit.
  MARLIN_DEVICE float4 SumAt(int unit, int warp, int row, int output) const {
    return *reinterpret_cast<const float4*>(
        SumsOf(args_) + ((unit + warp) * args_.rows + row) * kRowSumFloats + output);
  }

  /// Gathers all rows of a phase's inputs as activations, with zeros up to whole tiles, and the
  /// norm's factors, which multiply the finished sums. With a router also stores the warps' parts
  /// of its dot products, without the factor.
  MARLIN_DEVICE void GatherInputs(int phase) const {
    const PersistentLayer& layer = LayerOf(phase);
    const int index = phase / kPhases;
    const bool attends = phase % kPhases == static_cast<int>(Phase::kQkv);
    const int which = attends ? 0 : 1;
    const uint32_t* const words = Words(index) + args_.exchange.inputs[which];
    const int quads = args_.features / 4;
    const int router_rows = layer.router != nullptr && !attends ? Scratch().router_rows : 0;
    const auto* const router = reinterpret_cast<const float4*>(Memory() + args_.shared.router);
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
    // A CTA has one row of most routers; for each further one the words, which are there, are read
    // again.
#pragma unroll 1
    for (int at = 0; at < max(router_rows, 1); ++at) {
      float dots[kMostPersistentRows] = {};
#pragma unroll 1
      for (int i = thread_; i < quads; i += kPersistentThreads) {
        const AwaitedQuads<kMostPersistentRows, Polls::kFirst> rows(
            words + 4 * i, Tag(index), [&](int r) { return r * args_.features; },
            [&](int r) { return r < args_.rows; });
        float4 w = {0.0f, 0.0f, 0.0f, 0.0f};
        if (router_rows > 0) w = router[at * quads + i];
#pragma unroll
        for (int r = 0; r < kMostPersistentRows; ++r) {
          if (r >= args_.rows) break;
          const float4 y = rows.Value(r);
          if (at == 0) StoreActivations(args_, i, y, r);
          dots[r] += __fmaf_rn(y.x, w.x, y.y * w.y) + __fmaf_rn(y.z, w.z, y.w * w.w);
        }
      }
      if (router_rows == 0) break;
#pragma unroll
      for (int r = 0; r < kMostPersistentRows; ++r) {
        if (r >= args_.rows) break;
        const float sum = WarpSum(dots[r]);
        if (lane_ == 0) Rows().dots[at][r][warp_] = sum;
      }
    }
    if (warp_ < args_.rows) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kSquaresAtOnce; ++i) {
        const int strip = lane_ + 32 * i;
        if (strip < OwnedStrips::Strips(args_)) {
          sum += AwaitWord(squares + strip, found[i], Tag(index));
        }
      }
#pragma unroll 1
      for (int strip = lane_ + 32 * kSquaresAtOnce; strip < OwnedStrips::Strips(args_);
           strip += 32) {
        sum += AwaitWord(squares + strip, PollWord(squares + strip), Tag(index));
      }
      sum = WarpSum(sum);
      const float epsilon = attends ? layer.attention_epsilon : layer.mlp_epsilon;
      if (lane_ == 0) {
        Rows().factors[warp_] =
            rsqrtf(__fdividef(sum, static_cast<float>(args_.features)) + epsilon);
      }
    }
    FillTile(quads, tables_.GemmOf(phase).k_tiles * (kTileK / 4));
  }
  static MARLIN_DEVICE float WarpSum(float value) {
    __syncwarp();
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
  }
  /// Zeros in all rows' activations from quad `first` on.
  MARLIN_DEVICE void FillTile(int first, int end) const {
    const int missing = end - first;
    for (int i = thread_; i < missing * args_.rows; i += kPersistentThreads) {
      const int row = QuotientOf(i, missing);
      StoreActivations(args_, first + i - row * missing, {0.0f, 0.0f, 0.0f, 0.0f}, row);
    }
  }

  /// Says that this CTA has read everything of the previous layer.
  MARLIN_DEVICE void PublishArrival(int index) const {
    if (thread_ != 0) return;
    PublishWord(Words(index) + args_.exchange.arrived + blockIdx.x, 0.0f, Tag(index));
  }

  /// Routes the rows, if the layer has experts, whose tiles may then be copied.
  MARLIN_DEVICE void Route(int phase) const {
    const PersistentLayer& layer = LayerOf(phase);
    const int index = phase / kPhases;
    const bool awaits = thread_ < static_cast<int>(gridDim.x);
    const uint32_t* const others = Words(index) + args_.exchange.arrived + thread_;
    const uint32_t arrived = awaits ? PollWord(others) : 0;
    const RowsChoice choice(args_, layer, Words(index) + args_.exchange.logits, Tag(index));
    choice.PublishLogits();
    // Every CTA has read all of the layer before.
    if (awaits) AwaitWord(others, arrived, Tag(index));
    if (layer.router == nullptr) return;
    choice.Route();
    choice.FindTasks();
    // Copies need the headers; the units are filled in while the first tiles are on their way.
    const PhaseGemm& gates = layer.gemms[static_cast<int>(Phase::kGates)];
    const PhaseGemm& down = layer.gemms[static_cast<int>(Phase::kDown)];
    const int tasks = Rows().tasks;
    if (thread_ == 0) *ExpertSchedule(args_, gates) = DealOf(args_, gates, tasks).Header();
    if (thread_ == kHalf) *ExpertSchedule(args_, down) = DealOf(args_, down, tasks).Header();
    SyncFirst<kPersistentThreads>();
    AllowCopies(args_, Phase::kGates);
    AllowCopies(args_, Phase::kDown);
    const bool has_gates = thread_ < kHalf;
    DealUnits(args_, has_gates ? gates : down, tasks, has_gates ? thread_ : thread_ - kHalf, kHalf);
  }

  MARLIN_DEVICE void PrepareOut(int phase) const {
    const PersistentLayer& layer = LayerOf(phase);
    const int index = phase / kPhases;
    // Keys take the memory of activations and sums.
    SyncFirst<kPersistentThreads>();
    if (thread_ == 0) Arrive(AddressOf(args_, LayerBarrier::kKeysAllowed));
    uint32_t* const words = Words(index);
    const uint32_t tag = Tag(index);
    const PhaseGemm& inputs = layer.gemms[static_cast<int>(Phase::kQkv)];
    const int row = Scratch().row;
    uint32_t* const parts = words + args_.exchange.attention;
    uint32_t* const mixed = words + args_.exchange.mixed;
    const int features = args_.heads * args_.value_dim;
    TokenAttention<false> attention(
        args_, layer,
        {inputs, args_.rows,
         words + args_.exchange.phases[static_cast<int>(Phase::kQkv)] + row * inputs.columns, tag});
    const int row_parts = args_.kv_heads * args_.attention_splits * args_.group;
    attention.Run(parts + row * row_parts * (args_.value_dim + 4), mixed + row * features, index,
                  tag);
    // Activations take the memory of attention.
    SyncFirst<kPersistentThreads>();
    attention.CombineRows(parts, Rows().active_splits[layer.cache_group], mixed, tag);
    const Schedule& schedule = tables_.ScheduleOf(layer.gemms[static_cast<int>(Phase::kOut)]);
    GatherMixed(mixed, features, schedule, tag);
  }
  /// All rows of attention's results that the CTA's units need.
  MARLIN_DEVICE void GatherMixed(const uint32_t* mixed, int features, const Schedule& schedule,
                                 uint32_t tag) const {
    const int first_quad = schedule.first_k_tile * (kTileK / 4);
    const int end_quad = schedule.end_k_tile * (kTileK / 4);
    const int quads = min(features / 4, end_quad) - first_quad;
#pragma unroll 1
    for (int quad = thread_; quad < quads; quad += kPersistentThreads) {
      const AwaitedQuads<kMostPersistentRows, Polls::kFirst> rows(
          mixed + 4 * (first_quad + quad), tag, [&](int r) { return r * features; },
          [&](int r) { return r < args_.rows; });
#pragma unroll
      for (int r = 0; r < kMostPersistentRows; ++r) {
        if (r < args_.rows) StoreActivations(args_, quad, rows.Value(r), r);
      }
    }
    FillTile(max(quads, 0), end_quad - first_quad);
  }

  /// The gated activation of the inputs that the CTA's units need; of an expert times its weight,
  /// and zeros for the rows that have not selected it. A warp has a k-tile of a row.
  MARLIN_DEVICE void PrepareDown(int phase) const {
    const PersistentLayer& layer = LayerOf(phase);
    const int index = phase / kPhases;
    const PhaseGemm& gates = layer.gemms[static_cast<int>(Phase::kGates)];
    const PhaseGemm& gemm = layer.gemms[static_cast<int>(Phase::kDown)];
    const Schedule& schedule = tables_.ScheduleOf(gemm);
    const uint32_t* const words =
        Words(index) + args_.exchange.phases[static_cast<int>(Phase::kGates)];
    const bool routes = layer.experts != nullptr;
    const int inner = gemm.weights.k;
    const int of_copy = gates.sides * gates.strips * kStripOutputs;
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
          h = {GateProduct<true>(args_.gate, g.x, u.x) * factors[i],
               GateProduct<true>(args_.gate, g.y, u.y) * factors[i],
               GateProduct<true>(args_.gate, g.z, u.z) * factors[i],
               GateProduct<true>(args_.gate, g.w, u.w) * factors[i]};
        }
        const int local = QuotientOf(pair, args_.rows);
        StoreActivations(args_, local * (kTileK / 4) + lane_, h, pair - local * args_.rows);
      }
    }
  }

  /// Adds the warps' sums of the CTA's units and publishes them, with their biases: a thread has
  /// four outputs of a unit and a row.
  MARLIN_DEVICE void Publish(int phase, const Schedule& schedule) const {
    const PersistentLayer& layer = LayerOf(phase);
    const PhaseGemm& gemm = tables_.GemmOf(phase);
    const int which = phase % kPhases;
    const bool of_experts = layer.experts != nullptr && which >= static_cast<int>(Phase::kGates);
    const bool gates = which == static_cast<int>(Phase::kGates);
    const bool normalized = gates || which == static_cast<int>(Phase::kQkv);
    const uint32_t tag = Tag(phase / kPhases);
    uint32_t* const words = Words(phase / kPhases) + args_.exchange.phases[which];
    constexpr int kQuads = kStripOutputs / 4;
#pragma unroll 1
    for (int i = thread_; i < schedule.units * args_.rows * kQuads; i += kPersistentThreads) {
      const int pair = i / kQuads;
      const int local = QuotientOf(pair, args_.rows);
      const int row = pair - local * args_.rows;
      const ScheduledUnit unit = UnitAt(schedule, local);
      int place = 0;
      float factor = unit.side == 0 ? gemm.weights.multiplier : gemm.up_multiplier;
      if (of_experts && gates) {
        if ((Rows().task_rows[unit.copy] >> row & 1) == 0) continue;
        place = Rows().places[unit.copy][row] * gemm.sides * gemm.strips * kStripOutputs;
        const PersistentExpert& expert = tables_.Chosen(unit.copy);
        factor = unit.side == 0 ? expert.gate_multiplier : expert.up_multiplier;
      } else if (of_experts) {
        factor = 1.0f;  // In the inputs.
      }
      if (normalized) factor *= Rows().factors[row];
      const int output = i % kQuads * 4;
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
      for (int warp = unit.first_warp; warp < unit.end_warp; ++warp) {
        Add(SumAt(local, warp, row, output), &sum);
      }
      const float4 bias = BiasOf(layer, gemm, unit, row, output, of_experts, gates);
      PublishQuad(words + unit.word + row * gemm.columns + place + output,
                  {__fmaf_rn(sum.x, factor, bias.x), __fmaf_rn(sum.y, factor, bias.y),
                   __fmaf_rn(sum.z, factor, bias.z), __fmaf_rn(sum.w, factor, bias.w)},
                  tag);
    }
    // Words that other layers have are written in every layer, so that no tag is one of long ago.
#pragma unroll 1
    for (int i = gemm.splits * args_.rows * gemm.columns +
                 static_cast<int>(blockIdx.x) * kPersistentThreads + thread_;
         i < args_.exchange.phase_words[which];
         i += static_cast<int>(gridDim.x) * kPersistentThreads) {
      PublishWord(words + i, 0.0f, tag);
    }
  }

  /// What is added to four outputs of a unit, from `output` on.
  MARLIN_DEVICE float4 BiasOf(const PersistentLayer& layer, const PhaseGemm& gemm,
                              const ScheduledUnit& unit, int row, int output, bool of_experts,
                              bool gates) const {
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    const int n = static_cast<int>(unit.output) + output;
    if (unit.first_split == 0 || n >= gemm.n) return sum;
    if (!of_experts || gates) {
      const float* bias = of_experts ? tables_.Chosen(unit.copy).gate_bias : gemm.bias;
      if (bias != nullptr) sum = *reinterpret_cast<const float4*>(bias + unit.side * gemm.n + n);
      return sum;
    }
#pragma unroll 1
    for (int place = 0; place < args_.router.top_k; ++place) {
      const int at = row * kMostChosenExperts + place;
      const float* const bias = ExpertAt(Rows().chosen[at]).down_bias;
      if (bias == nullptr) continue;
      const float4 v = *reinterpret_cast<const float4*>(bias + n);
      const float weight = Scratch().weights[at];
      Add({weight * v.x, weight * v.y, weight * v.z, weight * v.w}, &sum);
    }
    return sum;
  }
  MARLIN_DEVICE const PersistentExpert& ExpertAt(int number) const {
    return reinterpret_cast<const PersistentExpert*>(Memory() + args_.shared.experts)[number];
  }

  /// Advances the clock: all CTAs have read it, as this one has had the arrivals of each since.
  MARLIN_DEVICE void Finish() const {
    if (blockIdx.x == 0 && thread_ == 0) args_.clock[0] = Scratch().clock + args_.layer_count;
  }

  static constexpr int kSquaresAtOnce = 4;

  const PersistentArguments& args_;
  int thread_;
  int warp_;
  int lane_;
  Tables tables_;
  TileRing ring_;
};

}  // namespace marlin::cuda
