// Attention of one token in the persistent kernel: split-KV over the CTAs of a KV head, on matrix
// units, over a paged bf16 or e4m3 cache (see decode_attention.cu and matrix_softmax.cuh).
//
//   A CTA has a run of blocks of 16 keys. A team of warps has a block together, each a part of the
//   value features: two warps, two to eight in the general form, or eight in the hybrid kernel,
//   whose heads have up to 256. The CTA merges its teams and publishes the result; AttentionMerge
//   merges the CTAs.
//   Keys and values of earlier positions are requested before the projections are there. Codes of
//   e4m3 are copied to the second half of a row's place, and widened there to bf16, exactly.
//   With several rows of a sequence, other CTAs append the keys of its earlier rows meanwhile: the
//   cache has only the keys before them, and a row's CTA computes those new keys for itself.
#pragma once

#include "backends/cuda/attention/cache_codes.cuh"
#include "backends/cuda/attention/head_math.cuh"
#include "backends/cuda/attention/latent/matrix_softmax.cuh"
#include "backends/cuda/common/thread_barrier.cuh"
#include "backends/cuda/persistent/persistent_attention_merge.cuh"
#include "backends/cuda/persistent/persistent_exchange.cuh"
#include "backends/cuda/persistent/persistent_layout.h"
#include "backends/cuda/persistent/persistent_rows_part.cuh"
#include "backends/cuda/persistent/persistent_tiles.cuh"

namespace marlin::cuda {

inline constexpr int kMergePadding = 8;  ///< In floats, against bank conflicts.

/// The page of a position in a cache group; null, with a record of why, if there is none.
template <PersistentForm kForm>
MARLIN_DEVICE uint8_t* FindPage(const PersistentArguments& args, int group, int position) {
  const CacheGroup& pages = args.groups[group];
  const int block = static_cast<int>(static_cast<uint32_t>(position) / kCachePageTokens);
  if (block >= pages.blocks) return nullptr;
  const int page = pages.block_table[Tables{args}.Scratch().sequence * pages.blocks + block];
  const auto number = static_cast<uint32_t>(page);
  const uint32_t slab = page < 0 ? ~0u : number / pages.slab_pages;
  if (slab >= static_cast<uint32_t>(pages.slab_count) || pages.slabs[slab] == nullptr) {
    const int sequence = IsRows(kForm) ? Tables{args}.Scratch().sequence : 0;
    RecordError(args.errors, ValueError::kPage, page, block, sequence);
    return nullptr;
  }
  const uint32_t of_slab = number - slab * pages.slab_pages;
  return static_cast<uint8_t*>(pages.slabs[slab]) + of_slab * pages.page_stride * args.cache_bytes;
}

/// The CTA's keys in the layers of a cache group: runs of blocks of all teams of warps at least, so
/// that short texts need no merge, or of half of them where readers merge: then a multiprocessor
/// has fewer instructions to issue. A position without a page is recorded as an error elsewhere,
/// and has no keys.
template <PersistentForm kForm>
MARLIN_DEVICE AttentionPart PartOf(const PersistentArguments& args, int group, int position) {
  const CacheGroup& pages = args.groups[group];
  const PersistentScratch& scratch = Tables{args}.Scratch();
  const int end = position >= 0 && position < pages.blocks * kCachePageTokens ? position + 1 : 0;
  AttentionPart part = {};
  part.first_key = pages.window > 0 ? max(end - pages.window, 0) : 0;
  const int first = part.first_key / kWarpKeys;
  const int blocks = (end + kWarpKeys - 1) / kWarpKeys - first;
  const int teams = TeamsOf<kForm>(args);
  const int least = MostMergedByReaders(kForm) > 1 ? max(teams / 2, 1) : teams;
  const int share = max((blocks + args.attention_splits - 1) / args.attention_splits, least);
  part.active_splits = (blocks + share - 1) / share;
  part.first_block = first + scratch.split * share;
  part.end_block = min(part.first_block + share, first + blocks);
  if (scratch.kv_head >= args.kv_heads) part.end_block = part.first_block;
  return part;
}

/// RoPE of a head, of which a lane has four features. Two features that turn together are adjacent,
/// or `pairs` apart: in another lane. `first_turn`: the first rotation of the head's position.
MARLIN_DEVICE void Rotate(const PersistentArguments& args, int first_turn, float4& head) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto* const turns =
      reinterpret_cast<const float2*>(Memory() + args.shared.rotations) + first_turn;
  const int first = 4 * lane;
  if (args.interleaved) {
    if (first >= 2 * args.pairs) return;
    const float4 turn = reinterpret_cast<const float4*>(turns)[lane];
    head = {head.x * turn.x - head.y * turn.y, head.y * turn.x + head.x * turn.y,
            head.z * turn.z - head.w * turn.w, head.w * turn.z + head.z * turn.w};
    return;
  }
  const bool is_second = first >= args.pairs;
  const int distance = args.pairs / 4;
  const int other = is_second ? lane - distance : lane + distance;
  const float4 its = {__shfl_sync(~0u, head.x, other), __shfl_sync(~0u, head.y, other),
                      __shfl_sync(~0u, head.z, other), __shfl_sync(~0u, head.w, other)};
  if (first >= 2 * args.pairs) return;
  const float2* const turn = turns + (is_second ? first - args.pairs : first);
  const float sign = is_second ? 1.0f : -1.0f;
  const auto rotate = [&](float mine, float partner, const float2& angle) {
    return __fmaf_rn(partner, sign * angle.y, mine * angle.x);
  };
  head = {rotate(head.x, its.x, turn[0]), rotate(head.y, its.y, turn[1]),
          rotate(head.z, its.z, turn[2]), rotate(head.w, its.w, turn[3])};
}

/// Copies every fourth 16 bytes of `left`; of the most common size without a loop. `bytes`: 16, or
/// 0 for zeros.
MARLIN_DEVICE void RequestRow(uint32_t to, const uint8_t* from, int left, int bytes) {
  constexpr int kCommon = kMostHeadFeatures * 2 / 64;
  if (left > (kCommon - 1) * 64 && left <= kCommon * 64) {
#pragma unroll
    for (int i = 0; i < kCommon; ++i) CopyAsync16(to + i * 64, from + i * 64, bytes);
    return;
  }
#pragma unroll 1
  for (int at = 0; at < left; at += 64) CopyAsync16(to + at, from + at, bytes);
}

/// Sums of the teams, in place of the keys: [teams][group] maxima, as many sums, then values.
struct TeamSums {
  float* largest;
  float* sums;
  float* values;
  int stride;

  MARLIN_DEVICE TeamSums(const PersistentArguments& args, int teams)
      : largest(reinterpret_cast<float*>(Memory() + args.shared.keys)),
        sums(largest + teams * args.group),
        values(largest + (2 * teams * args.group + 3) / 4 * 4),
        stride(args.value_dim + kMergePadding) {}

  MARLIN_DEVICE float* Values(int at) const { return values + at * stride; }
};

/// The attention of a CTA in a layer.
template <PersistentForm kForm>
class TokenAttention : private PartOfAttention {
 public:
  MARLIN_DEVICE TokenAttention(const PersistentArguments& args, const PersistentLayer& layer,
                               const ProjectedWords& projected)
      : PartOfAttention(args, layer, projected) {}

  /// Requests the first keys of all teams of warps: they are there before the projections. Called
  /// by the copying threads, `thread` of kKeyCopiers.
  MARLIN_DEVICE void RequestFirst(int thread) const {
#pragma unroll 1
    for (int team = 0; team < Teams(); ++team) {
      const int block = Part().first_block + team;
      if (block >= Part().end_block) break;
      Request(block, team, thread, Part().pages[team]);
    }
    ArriveWithCopies(AddressOf(LayerBarrier::kKeys));
  }

  /// Publishes the CTA's part in layer `index`. Called by all threads that compute.
  MARLIN_DEVICE void Run(uint32_t* parts, uint32_t* mixed, int index, uint32_t tag) {
    uint32_t* const mine =
        parts + (KvHead() * args_.attention_splits + Tables{args_}.Scratch().split) * PartWords();
    if (Part().first_block >= Part().end_block) {
      if (KvHead() < args_.kv_heads) PublishNothing(mine, tag);
      // The copying threads must not fall behind, here either.
      AwaitLayer(LayerBarrier::kKeys, index);
      return;
    }
    PrepareHeads();
    SyncFirst<kPersistentThreads>();
    const uint32_t queries = SharedAddress(Memory()) + args_.shared.queries;
    const WarpOperands operands = {queries, 0, KeyRow(), ValueRow()};
    WarpSoftmax<kTiles, 1> softmax(operands, args_.key_dim, WarpFeatures(), args_.scale);
    AddKeys(index, softmax);
    SyncFirst<kPersistentThreads>();
    StoreSums(softmax);
    SyncFirst<kPersistentThreads>();
    PublishMerged(mine, mixed, tag);
    FenceAsyncProxy();
  }

 private:
  static constexpr bool kHybrid = kForm == PersistentForm::kHybrid;
  static constexpr bool kRows = IsRows(kForm);
  static constexpr bool kGeneral = IsGeneral(kForm);
  static constexpr int kLeastLog2 = TeamWarpsLog2(kHybrid);
  static constexpr int kTeams = kPersistentWarps >> kLeastLog2;  ///< At most.
  static constexpr int kMostFeatures = kHybrid ? kMostHybridFeatures : kMostHeadFeatures;
  static constexpr int kTiles = kMostFeatures / 16 >> kLeastLog2;  ///< Value tiles of a warp.
  static constexpr int kQuads = kMostFeatures / 128;  ///< A lane has of a head's features.

  MARLIN_DEVICE int WarpsLog2() const { return TeamWarpsLog2<kForm>(args_); }
  MARLIN_DEVICE int Teams() const { return kPersistentWarps >> WarpsLog2(); }
  MARLIN_DEVICE int Team() const { return warp_ >> WarpsLog2(); }
  /// The warp's part of the value features.
  MARLIN_DEVICE int OfTeam() const { return warp_ & ((1 << WarpsLog2()) - 1); }
  MARLIN_DEVICE int WarpFeatures() const { return args_.value_dim >> WarpsLog2(); }
  /// A row of a team's stage.
  MARLIN_DEVICE uint32_t Row(int team, int row, bool is_value) const {
    const uint32_t stage =
        SharedAddress(Memory()) + args_.shared.keys + team * kWarpKeys * (KeyRow() + ValueRow());
    return is_value ? stage + kWarpKeys * KeyRow() + row * ValueRow() : stage + row * KeyRow();
  }
  /// The heads that the CTA prepares.
  MARLIN_DEVICE int HeadCount() const {
    if constexpr (kRows) return args_.group + 2 * max(New().end - New().first, 0);
    return HasNewKey() ? args_.group + 2 : args_.group;
  }
  /// Whether a key of the CTA's blocks is new to it, so that it is not copied from the cache.
  MARLIN_DEVICE bool IsNew(int key) const {
    if constexpr (kRows) return key >= New().first && key < New().end;
    return key == Position();
  }

  /// Requests a block of earlier keys, and zeros in place of keys that the token does not see; the
  /// rows of new keys are InsertFresh's. Four of 64 threads copy a row. Bulk copies of rows are
  /// slower: a warp issues them one after another.
  MARLIN_DEVICE void Request(int block, int team, int thread, const uint8_t* page) const {
    const int row = thread >> 2;
    const int key = block * kWarpKeys + row;
    if (IsNew(key)) return;
    const bool seen = page != nullptr && key >= Part().first_key && key < Position();
    const int part = (thread & 3) * 16;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int features = side == 1 ? args_.value_dim : args_.key_dim;
      const uint32_t to = Row(team, row, side == 1) + (HasCodes() ? features : 0) + part;
      RequestRow(to, page + PlaceOf(key, side == 1) + part, features * args_.cache_bytes - part,
                 seen ? 16 : 0);
    }
  }
  /// Gathers the projections of the group's heads, and of the new keys and values: a warp has a
  /// head, a lane four of its features, or eight. Queries become operands; the row's own key and
  /// value go to the cache, and all of them to shared memory. Rows of queries that no head has are
  /// not set: a row of an MMA's results depends on its own row only.
  MARLIN_DEVICE void PrepareHeads() const {
    const int heads = HeadCount();
#pragma unroll 1
    for (int number = warp_; number < heads; number += kPersistentWarps) {
      const int of_new = number - args_.group;
      const bool is_value = kRows ? of_new >= 0 && of_new % 2 != 0 : number == args_.group + 1;
      const bool is_key = kRows ? of_new >= 0 && of_new % 2 == 0 : number == args_.group;
      // How many rows before the CTA's the new key is of.
      int back = 0;
      if (kRows && of_new >= 0) back = Position() - (New().first + of_new / 2);
      const int features = is_value ? args_.value_dim : args_.key_dim;
      int from = QueryAt<kHybrid>(KvHead() * args_.group + number);
      if (is_key) from = QueryAt<kHybrid>(args_.heads) + KvHead() * args_.key_dim;
      if (is_value) {
        from = QueryAt<kHybrid>(args_.heads) + args_.kv_heads * args_.key_dim +
               KvHead() * args_.value_dim;
      }
      from -= back * projected_.gemm.columns;
      float4 head[kQuads];
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        head[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        const int feature = 4 * lane_ + 128 * i;
        if (feature < features) head[i] = projected_.Gather(from + feature);
      }
      __syncwarp();
      if (!is_value) {
        const bool norms = (is_key ? layer_.key_norm : layer_.query_norm) != nullptr;
        const bool after = kGeneral && args_.norms_after_rotary;
        // Rotations do not wait for a norm's factor.
        const float factor = norms ? NormFactorOf(is_key, head) : 1.0f;
        if (norms && !after) MultiplyByWeights(is_key, head);
        // Only the first features of a large head rotate.
        Rotate(args_, back * args_.pairs, head[0]);
        if (norms && after) MultiplyByWeights(is_key, head);
#pragma unroll
        for (float4& x : head) x = {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
      }
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const int quad = lane_ + 32 * i;
        if (4 * quad >= features) break;
        if (is_key || is_value) {
          Append(head[i], quad, is_value, back);
        } else {
          StoreQuery(head[i], quad, number);
        }
      }
    }
  }

  MARLIN_DEVICE void StoreQuery(const float4& head, int quad, int number) const {
    uint8_t* const row = Memory() + args_.shared.queries + number * KeyRow();
    reinterpret_cast<uint2*>(row)[quad] = {Bf16x2::Pack(head.x, head.y),
                                           Bf16x2::Pack(head.z, head.w)};
  }

  MARLIN_DEVICE float NormFactorOf(bool is_key, const float4 (&head)[kQuads]) const {
    float squares = 0.0f;
#pragma unroll
    for (const float4& x : head) {
      squares += __fmaf_rn(x.x, x.x, x.y * x.y) + __fmaf_rn(x.z, x.z, x.w * x.w);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    return rsqrtf(__fdividef(squares, static_cast<float>(args_.key_dim)) +
                  (is_key ? layer_.key_epsilon : layer_.query_epsilon));
  }
  MARLIN_DEVICE void MultiplyByWeights(bool is_key, float4 (&head)[kQuads]) const {
    const float* weights = layer_.head_norms[is_key ? 1 : 0];
    if constexpr (kHybrid) weights = is_key ? layer_.key_norm : layer_.query_norm;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int quad = lane_ + 32 * i;
      if (kHybrid && 4 * quad >= args_.key_dim) break;
      const float4 w = reinterpret_cast<const float4*>(weights)[quad];
      head[i] = {head[i].x * w.x, head[i].y * w.y, head[i].z * w.z, head[i].w * w.w};
    }
  }

  /// Whether a new key's stage is free before all others are added.
  MARLIN_DEVICE bool IsInFirstStage(int key) const {
    return key / kWarpKeys < Part().first_block + Teams();
  }

  /// Stores a quad of a new key or value in its row of a stage, or until that is free elsewhere; of
  /// the row `back` rows before the CTA's, whose own CTA appends it.
  MARLIN_DEVICE void Append(const float4& from, int quad, bool is_value, int back) const {
    uint2 rounded = {Bf16x2::Pack(from.x, from.y), Bf16x2::Pack(from.z, from.w)};
    uint32_t codes = 0;
    if (HasCodes()) {
      codes = E4M3x4::FromFloats(from.x, from.y) | E4M3x4::FromFloats(from.z, from.w) << 16;
      rounded = {Bf16OfCodes(codes), Bf16OfCodes(codes >> 16)};
    }
    const int key = Position() - back;
    uint32_t row = SharedAddress(Fresh(back)) + (is_value ? args_.key_dim * 2 : 0);
    if (IsInFirstStage(key)) {
      row = Row(key / kWarpKeys - Part().first_block, key % kWarpKeys, is_value);
    }
    StoreShared8(row + quad * 8, rounded);
    uint8_t* const page = Part().fresh;
    if (page == nullptr || back > 0) return;
    uint8_t* const to = page + PlaceOf(Position(), is_value);
    if (HasCodes()) {
      reinterpret_cast<uint32_t*>(to)[quad] = codes;
    } else {
      reinterpret_cast<uint2*>(to)[quad] = rounded;
    }
  }

  /// A barrier of the warps of a team.
  MARLIN_DEVICE void SyncTeam() const {
    asm volatile("bar.sync %0, %1;" ::"r"(Team() + 1), "r"(32 << WarpsLog2()) : "memory");
  }

  /// Puts the block's new keys and values that are elsewhere in their rows of the stage, each by a
  /// warp of the team.
  MARLIN_DEVICE void InsertNew(int block) const {
    if (block < Part().first_block + Teams()) return;
    if constexpr (kRows) {
      const int end = min(New().end, (block + 1) * kWarpKeys);
#pragma unroll 1
      for (int key = max(New().first, block * kWarpKeys) + OfTeam(); key < end;
           key += 1 << WarpsLog2()) {
        InsertFresh(key);
      }
    } else {
      if (OfTeam() == 0 && block == Position() / kWarpKeys) InsertFresh(Position());
    }
  }
  /// Called by one warp.
  MARLIN_DEVICE void InsertFresh(int key) const {
    const auto* const fresh = reinterpret_cast<const uint32_t*>(Fresh(Position() - key));
    const int row = key % kWarpKeys;
    for (int pair = lane_; pair < (args_.key_dim + args_.value_dim) / 2; pair += 32) {
      const bool is_value = pair >= args_.key_dim / 2;
      const int of_row = is_value ? pair - args_.key_dim / 2 : pair;
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(Row(Team(), row, is_value) + of_row * 4),
                   "r"(fresh[pair])
                   : "memory");
    }
  }

  /// Widens the codes of the team's block in place, but for the rows of new keys: sixteen lanes
  /// have a row, which they read before they write, and a warp of two has two of every four rows.
  /// Called by the first two warps of the team.
  MARLIN_DEVICE void Widen(int block) const {
    const int unit = lane_ & 15;
#pragma unroll 1
    for (int i = 0; i < kWarpKeys / 2; ++i) {
      const int row = (i >> 1) * 4 + (warp_ & 1) * 2 + (lane_ >> 4);
      const bool is_value = (i & 1) != 0;
      const int features = is_value ? args_.value_dim : args_.key_dim;
      const bool mine = 8 * unit < features && !IsNew(block * kWarpKeys + row);
      const uint32_t to = Row(Team(), row, is_value);
      uint2 codes = {0, 0};
      if (mine) codes = LoadShared8(to + features + 8 * unit);
      __syncwarp();
      if (mine) StoreShared16(to + 16 * unit, WidenCodes(codes));
    }
  }

  template <typename Softmax>
  MARLIN_DEVICE void AddKeys(int index, Softmax& softmax) const {
    AwaitLayer(LayerBarrier::kKeys, index);
    const uint32_t part = static_cast<uint32_t>(OfTeam()) * (2 * WarpFeatures());
#pragma unroll 1
    for (int block = Part().first_block + Team(); block < Part().end_block; block += Teams()) {
      WaitForAllCopies();
      if (!kHybrid && HasCodes()) {
        SyncTeam();
        if (!kGeneral || OfTeam() < 2) Widen(block);
      }
      InsertNew(block);
      SyncTeam();
      const int next = block + Teams();
      const bool requests = next < Part().end_block && OfTeam() < 2;
      const auto find = [&] {
        return FindPage<kForm>(args_, layer_.cache_group, next * kWarpKeys);
      };
      // The products cover its latency, but with several rows registers are short.
      const uint8_t* page = !kRows && requests ? find() : nullptr;
      softmax.Add(Row(Team(), 0, false), Row(Team(), 0, true) + part, block * kWarpKeys, [&](int) {
        return KeySpan{Part().first_key, Position() + 1};
      });
      if (next >= Part().end_block) break;
      SyncTeam();
      if (!requests) continue;
      if (kRows) page = find();
      Request(next, Team(), OfTeam() * 32 + lane_, page);
    }
    softmax.SumLanes();
  }

  template <typename Softmax>
  MARLIN_DEVICE void StoreSums(const Softmax& softmax) const {
    const TeamSums of_teams(args_, Teams());
    const int first_feature = OfTeam() * WarpFeatures();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = (lane_ >> 2) + 8 * half;
      if (head >= args_.group) continue;
      const int at = Team() * args_.group + head;
      if ((lane_ & 3) == 0 && OfTeam() == 0) {
        of_teams.largest[at] = softmax.largest(half);
        of_teams.sums[at] = softmax.sum(half);
      }
      softmax.ForPairs(half, [&](int feature, float first, float second) {
        *reinterpret_cast<float2*>(of_teams.Values(at) + first_feature + feature) = {first, second};
      });
    }
  }

  /// Merges the teams' parts of a head, each quad of features in a lane. The only part of a KV head
  /// is the result; it is published as a part too, so that its words never have a tag of long ago.
  MARLIN_DEVICE void PublishMerged(uint32_t* parts, uint32_t* mixed, uint32_t tag) const {
#pragma unroll 1
    for (int number = warp_; number < args_.group * kQuads; number += kPersistentWarps) {
      const int quad = lane_ + number % kQuads * 32;
      if (4 * quad >= args_.value_dim) continue;
      PublishMergedQuad(parts, mixed, number / kQuads, quad, tag);
    }
  }
  MARLIN_DEVICE void PublishMergedQuad(uint32_t* parts, uint32_t* mixed, int head, int quad,
                                       uint32_t tag) const {
    const TeamSums of_teams(args_, Teams());
    const int teams = min(Part().end_block - Part().first_block, Teams());
    float factors[kTeams];
    SoftmaxPart merged;
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      factors[team] = team < teams ? of_teams.largest[team * args_.group + head] : NoScore();
      merged.largest = fmaxf(merged.largest, factors[team]);
    }
    // All are in flight together.
    float sums[kTeams];
    float4 values[kTeams];
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      const int at = min(team, teams - 1) * args_.group + head;
      sums[team] = of_teams.sums[at];
      values[team] = *reinterpret_cast<const float4*>(of_teams.Values(at) + 4 * quad);
    }
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      if (team >= teams) break;
      const float factor = RescaleFactor(factors[team], merged.largest);
      merged.sum = __fmaf_rn(sums[team], factor, merged.sum);
      merged.AddValues(values[team], factor);
    }
    if (Part().active_splits == 1) {
      const int number = KvHead() * args_.group + head;
      PublishQuad(mixed + number * args_.value_dim + 4 * quad,
                  Result<kHybrid>(number, 4 * quad, merged), tag);
    }
    uint32_t* const to = parts + head * (args_.value_dim + 4);
    PublishQuad(to + 4 * quad, merged.values, tag);
    if (quad == 0) {
      PublishQuad(to + args_.value_dim, {merged.largest, merged.sum, 0.0f, 0.0f}, tag);
    }
  }

  /// Every word is written in every layer, so that its tag is never one of long ago.
  MARLIN_DEVICE void PublishNothing(uint32_t* parts, uint32_t tag) const {
    for (int i = static_cast<int>(threadIdx.x); i < PartWords() / 4; i += kPersistentThreads) {
      PublishQuad(parts + 4 * i, {0.0f, 0.0f, 0.0f, 0.0f}, tag);
    }
  }
};

/// The threads that copy the first keys of every layer, `thread` of kKeyCopiers: from when its
/// projections begin, at which time all tiles of the layer before have been multiplied; with
/// several rows when they have been multiplied too.
template <PersistentForm kForm>
MARLIN_DEVICE void CopyKeys(const PersistentArguments& args, int thread) {
  const LayerBarrier allowed = IsRows(kForm) ? LayerBarrier::kKeysAllowed : AllowedOf(Phase::kOut);
#pragma unroll 1
  for (int layer = 0; layer < args.layer_count; ++layer) {
    AwaitLayer(allowed, layer);
    AwaitLayer(LayerBarrier::kLayer, layer);
    const PersistentLayer& of_keys = Tables{args}.LayerOf(layer);
    TokenAttention<kForm>(args, of_keys, {of_keys.gemms[0], 1, nullptr, 0}).RequestFirst(thread);
  }
}

}  // namespace marlin::cuda
