// ExpandLatents: keys and values of heads are products of latents with the two halves of kv_b.
//
//   On asynchronous products (wgmma; where there are none, on mma.sync) a CTA takes 128 latents, 64
//   for each of two warpgroups, and 64 or 128 outputs of a head, and adds up 64 features of the
//   latents at a time, which all threads copy through a ring of three stages (cp.async), in the
//   swizzle of the products. The weights of values have the features of a latent in their rows, as
//   the latents themselves; the weights of keys, which queries are multiplied by as well
//   (HeadProduct), have the outputs in their rows, so that the latents come from registers. Codes
//   of e4m3 widen to bf16 on the way, exactly.
//
//   In fp32, for all other types: tiles of 64 latents and 64 outputs, 4 x 4 for a thread.
#include <algorithm>

#include "backends/cuda/attention/cache_codes.cuh"
#include "backends/cuda/attention/latent/expand_latents_launch.h"
#include "backends/cuda/attention/pages.cuh"
#include "backends/cuda/attention/prefill/warpgroup_attention.cuh"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/warp_matrix.cuh"
#include "backends/cuda/rows/typed.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPieceTokens = kCachePageTokens;  ///< Latents of a warpgroup: a part of a page.
constexpr int kTileTokens = 2 * kPieceTokens;
constexpr int kStages = 3;

MARLIN_HOST_DEVICE int CeilDivide(int value, int divisor) {
  return (value + divisor - 1) / divisor;
}

/// The pieces of all pages, of 64 latents each.
MARLIN_HOST_DEVICE int PiecesOf(const ExpandLatentsArguments& args) {
  return args.sequences.blocks * (args.latents.page_tokens / kPieceTokens);
}

/// 64 latents of a page, and the place of what becomes of them.
struct Piece {
  const uint8_t* latents = nullptr;
  int tokens = 0;  ///< 0: nothing to do.
  int first = 0;   ///< The first token's place in its page.
  uint8_t* out = nullptr;

  /// Piece `index`; records a page that does not exist.
  MARLIN_DEVICE Piece(const ExpandLatentsArguments& args, int index) {
    const int of_page = args.latents.page_tokens / kPieceTokens;
    const int page = index / of_page;
    if (page >= args.sequences.blocks) return;
    const int count = args.tokens[page];
    if (count < 0 || count > args.latents.page_tokens) {
      RecordError(args.errors, ValueError::kPageTokens, count, page, args.latents.page_tokens);
      return;
    }
    const uint8_t* const data = PageOf(args.sequences, args.latents, 0, page);
    if (data == nullptr) {
      RecordError(args.errors, ValueError::kLatentPage, args.sequences.block_tables[page], page);
      return;
    }
    first = (index - page * of_page) * kPieceTokens;
    tokens = min(max(count - first, 0), kPieceTokens);
    const int64_t row_bytes = args.latents.key_dim * CacheElementBytes(args.latents.type);
    latents = data + first * row_bytes;
    out = args.out + page * args.page_stride * CacheElementBytes(args.out_type);
  }

  /// The element of the first feature of a token's key or value, in `out`.
  MARLIN_DEVICE int64_t KeyAt(const ExpandLatentsArguments& args, int head, int token) const {
    const int64_t place = static_cast<int64_t>(head) * args.latents.page_tokens + first + token;
    return place * args.key_dim;
  }
  MARLIN_DEVICE int64_t ValueAt(const ExpandLatentsArguments& args, int head, int token) const {
    const int64_t keys = static_cast<int64_t>(args.heads) * args.latents.page_tokens * args.key_dim;
    const int64_t place = static_cast<int64_t>(head) * args.latents.page_tokens + first + token;
    return keys + place * args.value_dim;
  }
};

/// The part of a CTA: numbered by pieces, then heads, then outputs, keys first. What reads
/// the same latents runs at the same time.
struct Part {
  int piece;
  int head;
  bool of_keys;
  int first;  ///< Its first output.

  MARLIN_DEVICE Part(const ExpandLatentsArguments& args, int pieces, int outputs) {
    // Without key features there is still the RoPE part.
    const int key_tiles = max(CeilDivide(args.nope, outputs), 1);
    const int tiles = key_tiles + CeilDivide(args.value_dim, outputs);
    const int of_head = static_cast<int>(blockIdx.x) / tiles;
    const int tile = static_cast<int>(blockIdx.x) - of_head * tiles;
    piece = of_head / args.heads * pieces;
    head = of_head % args.heads;
    of_keys = tile < key_tiles;
    first = (of_keys ? tile : tile - key_tiles) * outputs;
  }
};

dim3 GridOf(const ExpandLatentsArguments& args, int pieces, int outputs) {
  const int key_tiles = std::max(CeilDivide(args.nope, outputs), 1);
  const int tiles = key_tiles + CeilDivide(args.value_dim, outputs);
  const int64_t groups = CeilDivide(PiecesOf(args), pieces);
  return {static_cast<unsigned>(groups * args.heads * tiles)};
}

constexpr int kTile = 64;
constexpr int kDepth = 16;
constexpr int kThreadTile = 4;

/// blockIdx.x: Part of one piece.
__global__ void __launch_bounds__(kThreads)
    ExpandLatentsKernel(const __grid_constant__ ExpandLatentsArguments args) {
  __shared__ float latents[kDepth][kTile + 4];
  __shared__ float weights[kDepth][kTile + 4];
  EnterChain();
  const Part part(args, 1, kTile);
  const Piece piece(args, part.piece);
  if (piece.tokens == 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int inputs = args.latents.value_dim;
  const int outputs = part.of_keys ? args.nope : args.value_dim;
  float sums[kThreadTile][kThreadTile] = {};
  const int row = thread / 16 * kThreadTile;
  const int column = thread % 16 * kThreadTile;
  for (int first = 0; first < inputs; first += kDepth) {
    WithCacheType(args.latents.type, [&](auto zero) {
      using T = decltype(zero);
      const auto* const from = reinterpret_cast<const T*>(piece.latents);
      for (int i = thread; i < kTile * kDepth; i += kThreads) {
        const int token = i / kDepth;
        const int input = first + i % kDepth;
        const bool exists = token < piece.tokens && input < inputs;
        latents[i % kDepth][token] =
            exists ? ToFloat(from[static_cast<int64_t>(token) * args.latents.key_dim + input])
                   : 0.0f;
      }
    });
    for (int i = thread; i < kTile * kDepth; i += kThreads) {
      // Neighbors read neighbors: rows of outputs for keys, of inputs for values.
      const int depth = part.of_keys ? i / kTile : i % kDepth;
      const int output = part.of_keys ? i % kTile : i / kDepth;
      const int input = first + depth;
      float weight = 0.0f;
      if (input < inputs && part.first + output < outputs) {
        const RowsView& of = part.of_keys ? args.key_weights : args.value_weights;
        const int64_t at = part.of_keys ? of.At(part.head, input) + part.first + output
                                        : of.At(part.head, part.first + output) + input;
        weight = LoadFloat(of.data, of.type, at);
      }
      weights[depth][output] = weight;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const auto x = *reinterpret_cast<const float4*>(&latents[i][row]);
      const auto w = *reinterpret_cast<const float4*>(&weights[i][column]);
      const float a[kThreadTile] = {x.x, x.y, x.z, x.w};
      const float b[kThreadTile] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int r = 0; r < kThreadTile; ++r) {
#pragma unroll
        for (int c = 0; c < kThreadTile; ++c) sums[r][c] = __fmaf_rn(a[r], b[c], sums[r][c]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < kThreadTile; ++r) {
    if (row + r >= piece.tokens) break;
    const int64_t at = part.of_keys ? piece.KeyAt(args, part.head, row + r)
                                    : piece.ValueAt(args, part.head, row + r);
#pragma unroll
    for (int c = 0; c < kThreadTile; ++c) {
      const int output = part.first + column + c;
      if (output < outputs) StoreFloat(piece.out, args.out_type, at + output, sums[r][c]);
    }
  }
  if (!part.of_keys || part.first > 0) return;
  const int rope = args.latents.key_dim - inputs;
  WithCacheType(args.latents.type, [&](auto zero) {
    using T = decltype(zero);
    const auto* const from = reinterpret_cast<const T*>(piece.latents) + inputs;
    for (int i = thread; i < piece.tokens * rope; i += kThreads) {
      const int token = i / rope;
      const int feature = i - token * rope;
      const int64_t to = piece.KeyAt(args, part.head, token) + args.nope + feature;
      StoreFloat(piece.out, args.out_type, to,
                 ToFloat(from[static_cast<int64_t>(token) * args.latents.key_dim + feature]));
    }
  });
}

/// Shared memory of a stage: latents of both warpgroups, then weights.
template <int kOutputs>
struct Stage {
  static constexpr int kLatentBytes = kTileTokens * kPanelRowBytes;
  static constexpr int kBytes = kLatentBytes + kOutputs * kPanelRowBytes;

  uint32_t latents;
  uint32_t weights;

  MARLIN_DEVICE Stage(uint32_t shared, int step)
      : latents(shared + step % kStages * kBytes), weights(latents + kLatentBytes) {}
};

/// The copies of a thread.
template <int kOutputs, bool kFp8>
class Loader {
 public:
  MARLIN_DEVICE Loader(const ExpandLatentsArguments& args, const Part& part,
                       const Piece (&pieces)[2], uint32_t shared)
      : args_(args), part_(part), pieces_(pieces), shared_(shared) {}

  /// Requests step `step`, if there is one, as one group of copies.
  MARLIN_DEVICE void Load(int step) const {
    if (step * kExpandedFeatures < args_.latents.value_dim) {
      const Stage<kOutputs> stage(shared_, step);
      LoadLatents(stage, step * kExpandedFeatures);
      if (part_.of_keys) {
        LoadKeyWeights(stage, step * kExpandedFeatures);
      } else {
        LoadValueWeights(stage, step * kExpandedFeatures);
      }
    }
    CommitCopies();
  }

 private:
  static constexpr int kUnits = kExpandedFeatures / 8;

  MARLIN_DEVICE void LoadLatents(const Stage<kOutputs>& stage, int feature) const {
    constexpr int kElement = kFp8 ? 1 : 2;
    const uint8_t* const anywhere = AnyAlignedAddress(args_);
    const int unit = static_cast<int>(threadIdx.x) % kUnits;
#pragma unroll
    for (int i = 0; i < kTileTokens * kUnits / kThreads; ++i) {
      const int row = static_cast<int>(threadIdx.x) / kUnits + i * (kThreads / kUnits);
      const Piece& piece = pieces_[row / kPieceTokens];
      const int token = row % kPieceTokens;
      const bool exists = token < piece.tokens;
      const uint8_t* const from =
          piece.latents +
          (static_cast<int64_t>(token) * args_.latents.key_dim + feature + unit * 8) * kElement;
      const uint32_t to = stage.latents + PlaceInPanels(kTileTokens, row, unit);
      if constexpr (kFp8) {
        const uint2 codes = exists ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
        StoreShared16(to, WidenCodes(codes));
      } else {
        CopyAsync16(to, exists ? from : anywhere, exists ? 16 : 0);
      }
    }
  }

  /// Rows of features, panels of 64 outputs.
  MARLIN_DEVICE void LoadKeyWeights(const Stage<kOutputs>& stage, int feature) const {
    constexpr int kRowUnits = kOutputs / 8;
    const auto* const weights = static_cast<const __nv_bfloat16*>(args_.key_weights.data);
    const int unit = static_cast<int>(threadIdx.x) % kRowUnits;
#pragma unroll
    for (int i = 0; i < kExpandedFeatures * kRowUnits / kThreads; ++i) {
      const int row = static_cast<int>(threadIdx.x) / kRowUnits + i * (kThreads / kRowUnits);
      const int64_t at = args_.key_weights.At(part_.head, feature + row) + part_.first + unit * 8;
      CopyAsync16(stage.weights + PlaceInPanels(kExpandedFeatures, row, unit), weights + at, 16);
    }
  }

  /// Rows of outputs, one panel of 64 features.
  MARLIN_DEVICE void LoadValueWeights(const Stage<kOutputs>& stage, int feature) const {
    const auto* const weights = static_cast<const __nv_bfloat16*>(args_.value_weights.data);
    const int unit = static_cast<int>(threadIdx.x) % kUnits;
#pragma unroll
    for (int i = 0; i < kOutputs * kUnits / kThreads; ++i) {
      const int row = static_cast<int>(threadIdx.x) / kUnits + i * (kThreads / kUnits);
      const int64_t at = args_.value_weights.At(part_.head, part_.first + row) + feature + unit * 8;
      CopyAsync16(stage.weights + PlaceInPanels(kOutputs, row, unit), weights + at, 16);
    }
  }

  /// A valid address, aligned to 16 bytes, for copies that read nothing.
  static MARLIN_DEVICE const uint8_t* AnyAlignedAddress(const ExpandLatentsArguments& args) {
    return static_cast<const uint8_t*>(args.key_weights.data);
  }

  const ExpandLatentsArguments& args_;
  const Part& part_;
  const Piece (&pieces_)[2];
  uint32_t shared_;
};

/// Loads 16 features of a warp's 16 latents as an A operand.
MARLIN_DEVICE void LoadLatents(uint32_t latents, int warp, int step, uint32_t (&operand)[4]) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int row = warp * 16 + (lane & 15);
  LoadMatrices(operand, latents + PlaceInPanels(kTileTokens, row, 2 * step + (lane >> 4)));
}

/// Adds the products of a step for a warpgroup's 64 latents. Precondition: kHasWgmma.
template <int kOutputs>
MARLIN_DEVICE void MultiplyKeys(const Stage<kOutputs>& stage, int warp,
                                float (&sums)[kOutputs / 2]) {
  constexpr uint32_t kPanelBytes = kExpandedFeatures * kPanelRowBytes;
  constexpr uint32_t kPanelStep = (kPanelBytes >> 4) << 16;
  uint32_t latents[kExpandedFeatures / 16][4];
#pragma unroll
  for (int step = 0; step < kExpandedFeatures / 16; ++step) {
    LoadLatents(stage.latents, warp, step, latents[step]);
  }
  PinSums(sums);
  FenceProducts();
#pragma unroll
  for (int step = 0; step < kExpandedFeatures / 16; ++step) {
    const uint64_t of_step =
        Descriptor(((stage.weights + step * 16 * kPanelRowBytes) >> 4) | kPanelStep);
    ValueProduct<kOutputs>::Run(sums, latents[step], of_step, 1);
  }
  CommitProducts();
  WaitForProducts<0>();
  PinSums(sums);
}

template <int kOutputs>
MARLIN_DEVICE void MultiplyValues(const Stage<kOutputs>& stage, int warp,
                                  float (&sums)[kOutputs / 2]) {
  const uint32_t latents = stage.latents + warp / 4 * kPieceTokens * kPanelRowBytes;
  PinSums(sums);
  FenceProducts();
#pragma unroll
  for (int step = 0; step < kExpandedFeatures / 16; ++step) {
    ScoreProduct<kOutputs>::Run(sums, Descriptor((latents >> 4) + 2 * step),
                                Descriptor((stage.weights >> 4) + 2 * step), 1);
  }
  CommitProducts();
  WaitForProducts<0>();
  PinSums(sums);
}

/// The same for a warp's 16 latents on mma.sync. kOfKeys: the rows of weights are features.
template <bool kOfKeys, int kOutputs>
MARLIN_DEVICE void MultiplyByWarp(const Stage<kOutputs>& stage, int warp,
                                  float (&sums)[kOutputs / 2]) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int step = 0; step < kExpandedFeatures / 16; ++step) {
    uint32_t latents[4];
    LoadLatents(stage.latents, warp, step, latents);
#pragma unroll
    for (int n = 0; n < kOutputs / 16; ++n) {
      uint32_t w[4];
      if constexpr (kOfKeys) {
        const int row = step * 16 + (lane & 15);
        LoadMatricesTransposed(
            w, stage.weights + PlaceInPanels(kExpandedFeatures, row, 2 * n + (lane >> 4)));
      } else {
        const int row = n * 16 + (lane & 7) + (lane >> 4) * 8;
        LoadMatrices(w, stage.weights + PlaceInPanels(kOutputs, row, 2 * step + (lane >> 3 & 1)));
      }
      float(&low)[4] = reinterpret_cast<float(&)[4]>(sums[8 * n]);
      float(&high)[4] = reinterpret_cast<float(&)[4]>(sums[8 * n + 4]);
      MultiplyAdd<Bf16x2>(low, latents, w[0], w[1]);
      MultiplyAdd<Bf16x2>(high, latents, w[2], w[3]);
    }
  }
}

template <int kOutputs>
MARLIN_DEVICE void Multiply(bool of_keys, const Stage<kOutputs>& stage, int warp,
                            float (&sums)[kOutputs / 2]) {
  if constexpr (kHasWgmma) {
    if (of_keys) {
      MultiplyKeys(stage, warp, sums);
    } else {
      MultiplyValues(stage, warp, sums);
    }
  } else {
    if (of_keys) {
      MultiplyByWarp<true>(stage, warp, sums);
    } else {
      MultiplyByWarp<false>(stage, warp, sums);
    }
  }
}

/// Copies the RoPE part of a piece to a head's keys; a warpgroup's threads share it.
template <bool kFp8>
MARLIN_DEVICE void CopyRope(const ExpandLatentsArguments& args, const Piece& piece, int head) {
  const int rope = args.latents.key_dim - args.latents.value_dim;
  const int units = rope / 8;
  for (int i = static_cast<int>(threadIdx.x) & 127; i < piece.tokens * units; i += 128) {
    const int token = i / units;
    const int feature = (i - token * units) * 8;
    const int64_t from =
        static_cast<int64_t>(token) * args.latents.key_dim + args.latents.value_dim + feature;
    uint4 values;
    if constexpr (kFp8) {
      values = WidenCodes(*reinterpret_cast<const uint2*>(piece.latents + from));
    } else {
      values = *reinterpret_cast<const uint4*>(piece.latents + 2 * from);
    }
    const int64_t to = piece.KeyAt(args, head, token) + args.nope + feature;
    *reinterpret_cast<uint4*>(piece.out + 2 * to) = values;
  }
}

/// blockIdx.x: Part of two pieces. Shared memory of other GPUs than Hopper has one CTA of 128
/// outputs.
template <int kOutputs, bool kFp8>
__global__ void __launch_bounds__(kThreads, kHasWgmma || kOutputs == 64 ? 2 : 1)
    MatrixExpandLatentsKernel(const __grid_constant__ ExpandLatentsArguments args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  EnterChain();
  const Part part(args, 2, kOutputs);
  const Piece pieces[2] = {Piece(args, part.piece), Piece(args, part.piece + 1)};
  if (pieces[0].tokens + pieces[1].tokens == 0) return;
  const uint32_t shared = SharedAddress(memory);
  const int warp = WarpOfBlock();
  const int warpgroup = warp / 4;
  const Loader<kOutputs, kFp8> loader(args, part, pieces, shared);
  const int steps = args.latents.value_dim / kExpandedFeatures;
  float sums[kOutputs / 2] = {};
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) loader.Load(step);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    WaitForCopies<kStages - 2>();
    FenceAsyncProxy();
    __syncthreads();
    // All products of the step before are done: its stage is free.
    loader.Load(step + kStages - 1);
    const Stage<kOutputs> stage(shared, step);
    Multiply(part.of_keys, stage, warp, sums);
  }
  const Piece& piece = pieces[warpgroup];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  auto* const out = reinterpret_cast<__nv_bfloat16*>(piece.out);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = (warp & 3) * 16 + (lane >> 2) + 8 * half;
    if (token >= piece.tokens) continue;
    const int64_t at =
        part.of_keys ? piece.KeyAt(args, part.head, token) : piece.ValueAt(args, part.head, token);
    __nv_bfloat16* const to = out + at + part.first + (lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < kOutputs / 8; ++n) {
      StorePair(to + n * 8, sums[n * 4 + 2 * half], sums[n * 4 + 2 * half + 1]);
    }
  }
  if (part.of_keys && part.first == 0) CopyRope<kFp8>(args, piece, part.head);
}

using MatrixKernel = void (*)(ExpandLatentsArguments);

MatrixKernel KernelFor(int outputs, bool fp8) {
  if (outputs == 128) {
    return fp8 ? &MatrixExpandLatentsKernel<128, true> : &MatrixExpandLatentsKernel<128, false>;
  }
  return fp8 ? &MatrixExpandLatentsKernel<64, true> : &MatrixExpandLatentsKernel<64, false>;
}

}  // namespace

cudaError_t LoadExpandLatents() {
  return PrepareSharedKernels(KernelFor(64, false), KernelFor(64, true), KernelFor(128, false),
                              KernelFor(128, true));
}

cudaError_t LaunchExpandLatents(const ExpandLatentsArguments& args, cudaStream_t stream) {
  return LaunchInChain(&ExpandLatentsKernel, GridOf(args, 1, kTile), kThreads, 0, stream, args);
}

cudaError_t LaunchMatrixExpandLatents(const ExpandLatentsArguments& args, cudaStream_t stream) {
  const int outputs = args.nope % 128 == 0 && args.value_dim % 128 == 0 ? 128 : 64;
  const int bytes = kStages * (outputs == 128 ? Stage<128>::kBytes : Stage<64>::kBytes);
  const bool fp8 = args.latents.type == Element::kE4M3;
  return LaunchInChain(KernelFor(outputs, fp8), GridOf(args, 2, outputs), kThreads, bytes, stream,
                       args);
}

}  // namespace marlin::cuda
