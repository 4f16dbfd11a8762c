// A gated delta net's row in the persistent kernel (see recurrent_kernel.cu).
//
//   A CTA has kDeltaColumns value features of a head: a warp two columns of the state, a lane every
//   32nd of their rows. States and convolutions' earlier inputs are in shared memory before the
//   projections are there. A result is published as S^T q * norm * SiLU(gate), with the sum of
//   squares of the CTA's features: readers add a head's, and divide.
//
//   The CTAs of a key head read the same earlier inputs of queries and keys, and the first one
//   replaces them: after a phase whose inputs depend on everything that they have published.
#pragma once

#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/common/thread_barrier.cuh"
#include "backends/cuda/persistent/persistent_attention.cuh"
#include "backends/cuda/persistent/persistent_between.cuh"
#include "backends/cuda/persistent/persistent_exchange.cuh"
#include "backends/cuda/persistent/persistent_layout.h"
#include "backends/cuda/persistent/persistent_tiles.cuh"
#include "backends/cuda/rows/record_error.cuh"

namespace marlin::cuda {

/// The page of a state; null if there is none.
MARLIN_DEVICE float* FindStatePage(const CacheGroup& pages, int page) {
  if (page < 0) return nullptr;
  const auto number = static_cast<uint32_t>(page);
  const uint32_t slab = number / pages.slab_pages;
  if (slab >= static_cast<uint32_t>(pages.slab_count)) return nullptr;
  auto* const data = static_cast<float*>(pages.slabs[slab]);
  if (data == nullptr) return nullptr;
  return data + (number - slab * pages.slab_pages) * pages.page_stride;
}

/// The CTA's part of all gated delta nets. Called by one thread. Records pages that do not exist.
MARLIN_DEVICE DeltaPart DeltaPartOf(const PersistentArguments& args) {
  const PersistentDelta& delta = args.delta;
  const auto block = static_cast<int>(blockIdx.x);
  DeltaPart part;
  // A run may have no gated delta net.
  if (delta.value_heads == 0) return part;
  part.head = block / delta.slices;
  part.slice = block - part.head * delta.slices;
  part.key_head = part.head / delta.group;
  part.leads = part.slice == 0 && part.head == part.key_head * delta.group;
  part.moves = *args.moves >= 0;
  const CacheGroup& pages = args.groups[delta.states];
  if (pages.block_table == nullptr) return part;
  const int before = pages.block_table[0];
  const int after = pages.block_table[1];
  // Without a row that takes part a state is copied, if there is somewhere to.
  if (!part.moves && (before == after || after == -1)) return part;
  part.from = FindStatePage(pages, before);
  part.to = FindStatePage(pages, after);
  const bool lacks_from = part.from == nullptr && before != -1;
  if (part.to != nullptr && !lacks_from) return part;
  if (block == 0) {
    RecordError(args.errors, ValueError::kStatePage, lacks_from ? before : after, 0);
  }
  part.from = nullptr;
  part.to = nullptr;
  return part;
}

/// Where a CTA's part of a gated delta net is: in pages, in the projections, in shared memory.
class DeltaPlaces {
 protected:
  MARLIN_DEVICE DeltaPlaces(const PersistentArguments& args, const PersistentLayer& layer)
      : args_(args), layer_(layer) {}

  MARLIN_DEVICE const PersistentDelta& Delta() const { return args_.delta; }
  MARLIN_DEVICE const DeltaPart& Part() const { return Tables{args_}.Scratch().delta; }
  MARLIN_DEVICE bool HasPart() const { return Part().head < Delta().value_heads; }
  static MARLIN_DEVICE uint32_t Base() { return SharedAddress(Memory()); }
  MARLIN_DEVICE DeltaInputs& Inputs() const {
    return *reinterpret_cast<DeltaInputs*>(Memory() + args_.shared.inputs);
  }
  MARLIN_DEVICE float* StateRow(int row) const {
    return reinterpret_cast<float*>(Memory() + args_.shared.state) + row * kDeltaRowFloats;
  }

  /// Where the CTA's columns of the state begin in a page.
  MARLIN_DEVICE int64_t StateAt() const {
    const int conv = ((kDeltaConvWidth - 1) * Delta().channels() + 31) / 32 * 32;
    return layer_.first_element + conv + Part().head * Delta().key_dim * Delta().value_dim +
           Part().slice * kDeltaColumns;
  }
  /// Where the CTA's results begin among all heads'.
  MARLIN_DEVICE int ResultAt() const {
    return Part().head * Delta().value_dim + Part().slice * kDeltaColumns;
  }

  /// The channel of the convolution that is number `i` of the CTA's: queries, keys, values.
  MARLIN_DEVICE int ChannelOf(int i) const {
    const int keys = Delta().key_dim;
    if (i < keys) return Part().key_head * keys + i;
    if (i < 2 * keys) return (Delta().key_heads + Part().key_head) * keys + i - keys;
    return 2 * Delta().key_heads * keys + ResultAt() + i - 2 * keys;
  }
  /// The column of the projections that has it.
  MARLIN_DEVICE int ColumnOf(int i) const {
    const int keys = Delta().key_dim;
    if (i < keys) return At(Delta().queries) + i;
    if (i < 2 * keys) return At(Delta().keys) + i - keys;
    return At(Delta().values) + OfKeyHead() + i - 2 * keys;
  }
  MARLIN_DEVICE int At(const HeadColumns& columns) const {
    return columns.first + Part().key_head * columns.of_key_head;
  }
  /// The CTA's first value feature among its key head's.
  MARLIN_DEVICE int OfKeyHead() const {
    return ResultAt() - Part().key_head * Delta().group * Delta().value_dim;
  }

  const PersistentArguments& args_;
  const PersistentLayer& layer_;
};

/// A gated delta net's row.
class DeltaRow : DeltaPlaces {
 public:
  MARLIN_DEVICE DeltaRow(const PersistentArguments& args, const PersistentLayer& layer)
      : DeltaPlaces(args, layer),
        lane_(static_cast<int>(threadIdx.x) & 31),
        warp_(static_cast<int>(threadIdx.x) >> 5) {}

  /// Requests the state and all about the convolution but the row's inputs. Called by the copying
  /// threads, `thread` of kKeyCopiers.
  MARLIN_DEVICE void Request(int thread) const {
    if (layer_.delta_rows != nullptr && HasPart()) {
      const float* const from = Part().from;
      const int bytes = from == nullptr ? 0 : 16;
      const float* const state = from + StateAt();
      constexpr int kQuads = kDeltaColumns / 4;
#pragma unroll 4
      for (int i = thread; i < Delta().key_dim * kQuads; i += kKeyCopiers) {
        const int row = i / kQuads;
        const int quad = i % kQuads;
        CopyAsync16(Base() + args_.shared.state + (row * kDeltaRowFloats + quad * 4) * 4,
                    state + row * Delta().value_dim + quad * 4, bytes);
      }
      const int quads = Delta().own_channels() / 4;
#pragma unroll 1
      for (int i = thread; i < quads; i += kKeyCopiers) {
        const int channel = ChannelOf(4 * i);
#pragma unroll
        for (int slot = 0; slot < kDeltaConvWidth - 1; ++slot) {
          CopyAsync16(Base() + args_.shared.window + (slot * quads + i) * 16,
                      from + layer_.first_element + slot * Delta().channels() + channel, bytes);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          CopyAsync16(Base() + args_.shared.conv + (4 * i + j) * 16,
                      layer_.conv + (channel + j) * kDeltaConvWidth, 16);
        }
      }
    }
    ArriveWithCopies(AddressOf(LayerBarrier::kKeys));
  }

  /// Publishes the CTA's part in layer `index`, and stores its state. Called by all threads that
  /// compute.
  MARLIN_DEVICE void Run(const ProjectedWords& projected, uint32_t* mixed, uint32_t* squares,
                         int index, uint32_t tag) const {
    // The copying threads must not fall behind, where there is no part either.
    AwaitLayer(LayerBarrier::kKeys, index);
    if (!HasPart()) return;
    Prepare(projected);
    SyncFirst<kPersistentThreads>();
    Step();
    SyncFirst<kPersistentThreads>();
    Publish(mixed, squares, tag);
    StoreState();
    FenceAsyncProxy();
  }

  /// Replaces the convolution's earlier inputs in the state by what Run has kept.
  MARLIN_DEVICE void StoreWindow() const {
    float* const to = Part().to;
    if (layer_.delta_rows == nullptr || !HasPart() || to == nullptr) return;
    const int quads = Delta().own_channels() / 4;
    const int first = Part().leads ? 0 : Delta().key_dim / 2;
    const auto* const kept = reinterpret_cast<const float4*>(Memory() + args_.shared.kept);
#pragma unroll 1
    for (int i = first + static_cast<int>(threadIdx.x); i < quads; i += kPersistentThreads) {
      float* const at = to + layer_.first_element + ChannelOf(4 * i);
#pragma unroll
      for (int slot = 0; slot < kDeltaConvWidth - 1; ++slot) {
        *reinterpret_cast<float4*>(at + slot * Delta().channels()) = kept[slot * quads + i];
      }
    }
  }

  /// The result's quad that begins at feature `i` of all heads.
  MARLIN_DEVICE float4 ReadResult(const uint32_t* mixed, const uint32_t* squares, int i,
                                  uint32_t tag) const {
    const uint32_t* const from = mixed + i;
    const uint32_t* const of_head = squares + (i >> Delta().value_log2) * kDeltaSquares;
    const uint4 first = PollQuad(from);
    const uint4 second = PollQuad(of_head);
    const float4 v = AwaitQuad(from, first, tag);
    const float4 s = AwaitQuad(of_head, second, tag);
    const float mean = __fdividef(s.x + s.y + s.z + s.w, static_cast<float>(Delta().value_dim));
    const float factor = rsqrtf(mean + layer_.delta_epsilon);
    return {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
  }

 private:
  /// The row's convolutions, factors of its results, decay and write. Four channels have a thread.
  MARLIN_DEVICE void Prepare(const ProjectedWords& projected) const {
    const auto thread = static_cast<int>(threadIdx.x);
    const int quads = Delta().own_channels() / 4;
    if (thread == kPersistentThreads - 1) PrepareScalars();
    if (thread >= quads + kDeltaColumns / 4) return;
    const bool is_gate = thread >= quads;
    const int gate = 4 * (thread - quads);
    const int column = is_gate ? At(Delta().gates) + OfKeyHead() + gate : ColumnOf(4 * thread);
    float4 norm = {1.0f, 1.0f, 1.0f, 1.0f};
    if (is_gate) {
      norm =
          *reinterpret_cast<const float4*>(layer_.delta_norm + Part().slice * kDeltaColumns + gate);
    }
    const float4 x = projected.Gather(column);
    if (is_gate) {
      *reinterpret_cast<float4*>(Inputs().factors + gate) = {
          norm.x * TimesSigmoid(x.x, x.x), norm.y * TimesSigmoid(x.y, x.y),
          norm.z * TimesSigmoid(x.z, x.z), norm.w * TimesSigmoid(x.w, x.w)};
      return;
    }
    Convolve(thread, quads, x);
  }

  MARLIN_DEVICE void Convolve(int quad, int quads, const float4& x) const {
    const auto* const window = reinterpret_cast<const float4*>(Memory() + args_.shared.window);
    const auto* const weights =
        reinterpret_cast<const float4*>(Memory() + args_.shared.conv) + 4 * quad;
    auto* const kept = reinterpret_cast<float4*>(Memory() + args_.shared.kept);
    const float4 first = window[quad];
    const float4 second = window[quads + quad];
    const float4 third = window[2 * quads + quad];
    const auto sum = [](const float4& w, float a, float b, float c, float d) {
      const float y = __fmaf_rn(w.w, d, __fmaf_rn(w.z, c, __fmaf_rn(w.y, b, w.x * a)));
      return TimesSigmoid(y, y);
    };
    const int keys = Delta().key_dim / 4;
    float* const to = quad < keys       ? Inputs().queries + 4 * quad
                      : quad < 2 * keys ? Inputs().keys + 4 * (quad - keys)
                                        : Inputs().values + 4 * (quad - 2 * keys);
    *reinterpret_cast<float4*>(to) = {sum(weights[0], first.x, second.x, third.x, x.x),
                                      sum(weights[1], first.y, second.y, third.y, x.y),
                                      sum(weights[2], first.z, second.z, third.z, x.z),
                                      sum(weights[3], first.w, second.w, third.w, x.w)};
    const bool moves = Part().moves;
    kept[quad] = moves ? second : first;
    kept[quads + quad] = moves ? third : second;
    kept[2 * quads + quad] = moves ? x : third;
  }

  MARLIN_DEVICE void PrepareScalars() const {
    const PersistentScratch& scratch = Tables{args_}.Scratch();
    const float bias = layer_.decay_bias[Part().head];
    const float log_decay = layer_.log_decay[Part().head];
    float write = 0.0f;
    float decay = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kPersistentWarps; ++warp) {
      write += scratch.dots[0][warp];
      decay += scratch.dots[1][warp];
    }
    const float norm = NormFactor(scratch, args_.features, layer_.attention_epsilon);
    write *= norm;
    const float a = __fmaf_rn(decay, norm, bias);
    // The logarithm of 1 + e^a, which above 20 is a in fp32.
    const float soft = a > 20.0f ? a : log1pf(expf(a));
    Inputs().decay = expf(-expf(log_decay) * soft);
    Inputs().write = TimesSigmoid(1.0f, write);
  }

  /// The row's update of the warp's columns, in shared memory, and S^T q.
  MARLIN_DEVICE void Step() const {
    constexpr float kEpsilon = 1e-6f;
    constexpr int kRows = kMostDeltaKeys / 32;  ///< A lane's.
    const DeltaInputs& inputs = Inputs();
    const int keys = Delta().key_dim;
    float q[kRows];
    float k[kRows];
    float2 s[kRows];
    float sums[7] = {};  // q . q, k . k, q . k, then S^T k and S^T q.
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = lane_ + 32 * i;
      const bool exists = 32 * i < keys;
      q[i] = exists ? inputs.queries[row] : 0.0f;
      k[i] = exists ? inputs.keys[row] : 0.0f;
      s[i] =
          exists ? *reinterpret_cast<const float2*>(StateRow(row) + 2 * warp_) : float2{0.0f, 0.0f};
      sums[0] = __fmaf_rn(q[i], q[i], sums[0]);
      sums[1] = __fmaf_rn(k[i], k[i], sums[1]);
      sums[2] = __fmaf_rn(q[i], k[i], sums[2]);
      sums[3] = __fmaf_rn(s[i].x, k[i], sums[3]);
      sums[4] = __fmaf_rn(s[i].y, k[i], sums[4]);
      sums[5] = __fmaf_rn(s[i].x, q[i], sums[5]);
      sums[6] = __fmaf_rn(s[i].y, q[i], sums[6]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
      for (float& sum : sums) sum += __shfl_xor_sync(~0u, sum, step);
    }
    const float query_factor = rsqrtf(sums[0] + kEpsilon) * rsqrtf(static_cast<float>(keys));
    const float key_factor = rsqrtf(sums[1] + kEpsilon);
    const float decay = inputs.decay;
    const float write = inputs.write;
    const float2 value = *reinterpret_cast<const float2*>(inputs.values + 2 * warp_);
    const float2 delta = {write * (value.x - decay * key_factor * sums[3]),
                          write * (value.y - decay * key_factor * sums[4])};
    if (lane_ == 0) {
      const float product = sums[2] * query_factor * key_factor;
      const float2 result = {__fmaf_rn(product, delta.x, decay * query_factor * sums[5]),
                             __fmaf_rn(product, delta.y, decay * query_factor * sums[6])};
      *reinterpret_cast<float2*>(Inputs().results + 2 * warp_) = result;
      Inputs().squares[warp_] = __fmaf_rn(result.x, result.x, result.y * result.y);
    }
    if (!Part().moves) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (32 * i >= keys) break;
      const float key = key_factor * k[i];
      *reinterpret_cast<float2*>(StateRow(lane_ + 32 * i) + 2 * warp_) = {
          __fmaf_rn(key, delta.x, decay * s[i].x), __fmaf_rn(key, delta.y, decay * s[i].y)};
    }
  }

  MARLIN_DEVICE void Publish(uint32_t* mixed, uint32_t* squares, uint32_t tag) const {
    const DeltaInputs& inputs = Inputs();
    if (threadIdx.x < kDeltaColumns / 4) {
      const float4 o = reinterpret_cast<const float4*>(inputs.results)[lane_];
      const float4 f = reinterpret_cast<const float4*>(inputs.factors)[lane_];
      PublishQuad(mixed + ResultAt() + 4 * lane_, {o.x * f.x, o.y * f.y, o.z * f.z, o.w * f.w},
                  tag);
    } else if (threadIdx.x == 32) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kPersistentWarps; ++warp) sum += inputs.squares[warp];
      PublishSquares(squares, sum, tag);
    }
  }
  /// The first CTA of a head also has the places of CTAs that there are not.
  MARLIN_DEVICE void PublishSquares(uint32_t* squares, float sum, uint32_t tag) const {
    uint32_t* const of_head = squares + Part().head * kDeltaSquares;
    PublishWord(of_head + Part().slice, sum, tag);
    if (Part().slice != 0) return;
#pragma unroll 1
    for (int i = Delta().slices; i < kDeltaSquares; ++i) PublishWord(of_head + i, 0.0f, tag);
  }

  MARLIN_DEVICE void StoreState() const {
    float* const to = Part().to;
    if (to == nullptr) return;
    constexpr int kQuads = kDeltaColumns / 4;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < Delta().key_dim * kQuads;
         i += kPersistentThreads) {
      // Unsigned, these are a shift and a mask, which take no registers across the phase.
      const int row = static_cast<int>(static_cast<uint32_t>(i) / kQuads);
      const int quad = static_cast<int>(static_cast<uint32_t>(i) % kQuads);
      *reinterpret_cast<float4*>(to + StateAt() + row * Delta().value_dim + quad * 4) =
          *reinterpret_cast<const float4*>(StateRow(row) + quad * 4);
    }
  }

  int lane_;
  int warp_;
};

/// Where the mixers of a kind exchange values: they have a clock of their own, so that every word
/// is written whenever it advances.
struct MixerWords {
  uint32_t* words;
  uint32_t tag;

  MARLIN_DEVICE MixerWords(const PersistentArguments& args, const PersistentLayer& layer) {
    const PersistentScratch& scratch = Tables{args}.Scratch();
    const uint32_t clock = (layer.attends != 0 ? scratch.attention_clock : scratch.delta_clock) +
                           static_cast<uint32_t>(layer.mixer_index);
    words = args.words + (clock & 1) * args.exchange.words;
    tag = TagOf(clock);
  }
};

/// Prepares the inputs of kOut: attention or a gated delta net's row; where the run begins, results
/// in memory. `words`, `tag`: the layer's. Called by all threads that compute.
template <bool kLimbs>
MARLIN_DEVICE void PrepareMixed(const PersistentArguments& args, int phase, uint32_t* words,
                                uint32_t tag) {
  const int index = phase / kPhases;
  const auto thread = static_cast<int>(threadIdx.x);
  const PersistentLayer& layer = Tables{args}.LayerOf(index);
  const bool begins = phase == args.first_phase;
  if (begins) {
    AwaitLayer(LayerBarrier::kLayer, index);
    AllowCopies(Phase::kQkv);
    AllowCopies(Phase::kOut);
    AwaitLayer(LayerBarrier::kKeys, index);
    if (thread == 0) PublishWord(words + args.exchange.arrived + blockIdx.x, 0.0f, tag);
  } else {
    // The mixer takes the memory of the sums.
    SyncFirst<kPersistentThreads>();
  }
  const MixerWords own(args, layer);
  const bool attends = layer.attends != 0;
  uint32_t* const mixed = own.words + (attends ? args.exchange.mixed : args.exchange.results);
  uint32_t* const squares = own.words + args.exchange.squares;
  const ProjectedWords projected = {layer.gemms[static_cast<int>(Phase::kQkv)], 1,
                                    words + args.exchange.phases[static_cast<int>(Phase::kQkv)],
                                    tag};
  const DeltaRow delta(args, layer);
  if (attends) {
    uint32_t* const parts = own.words + args.exchange.attention;
    constexpr PersistentForm kForm = PersistentForm::kHybrid;
    TokenAttention<kForm>(args, layer, projected).Run(parts, mixed, index, own.tag);
    SyncFirst<kPersistentThreads>();
    AttentionMerge<kForm>(args, layer, projected).Combine(parts, mixed, own.tag);
  } else if (!begins) {
    delta.Run(projected, mixed, squares, index, own.tag);
    SyncFirst<kPersistentThreads>();
  }
  const PhaseGemm& gemm = layer.gemms[static_cast<int>(Phase::kOut)];
  const Schedule& schedule = Tables{args}.ScheduleOf(gemm);
  const int first = schedule.first_k_tile * (kTileK / 4);
#pragma unroll 1
  for (int i = first + thread; i < schedule.end_k_tile * (kTileK / 4); i += kPersistentThreads) {
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (4 * i < gemm.weights.k) {
      if (begins) {
        v = ReadMixed(args, 4 * i);
      } else if (attends) {
        v = AwaitQuad(mixed + 4 * i, PollQuad(mixed + 4 * i), own.tag);
      } else {
        v = delta.ReadResult(mixed, squares, 4 * i, own.tag);
      }
    }
    StoreActivations<kLimbs>(args, i - first, v);
  }
}

/// The threads that copy the first keys or the state of every layer, as CopyKeys.
MARLIN_DEVICE void CopyMixers(const PersistentArguments& args, int thread) {
#pragma unroll 1
  for (int index = 0; index < args.layer_count; ++index) {
    AwaitLayer(AllowedOf(Phase::kOut), index);
    AwaitLayer(LayerBarrier::kLayer, index);
    const PersistentLayer& layer = Tables{args}.LayerOf(index);
    if (layer.attends != 0) {
      TokenAttention<PersistentForm::kHybrid>(args, layer, {layer.gemms[0], 1, nullptr, 0})
          .RequestFirst(thread);
    } else {
      DeltaRow(args, layer).Request(thread);
    }
  }
}

}  // namespace marlin::cuda
