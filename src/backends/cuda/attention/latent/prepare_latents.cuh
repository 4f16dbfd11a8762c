// Preparation of small batches for latent attention, in one launch instead of four: RoPE of the
// queries' last features, which go after the places of their products, RoPE of the latents' last
// features, and the append of the latents to the paged cache.
//
//   A warp has a query head of a row; the last CTA of a row has its latent.
#pragma once

#include "backends/cuda/attention/cache_codes.cuh"
#include "backends/cuda/attention/head_math.cuh"
#include "backends/cuda/attention/latent/prepare_latents.h"
#include "backends/cuda/attention/pages.cuh"

namespace marlin::cuda {

inline constexpr int kPrepareWarps = kPrepareThreads / 32;

/// store(i, feature i after RoPE) for the part `first` of `step` of a head's features.
template <typename Store>
MARLIN_DEVICE void RotateFeatures(const PrepareLatentsArguments& args, int position,
                                  const float* from, int first, int step, const Store& store) {
  const RotaryView& rotary = args.rotary;
#pragma unroll 1
  for (int pair = first; pair < rotary.pairs; pair += step) {
    const int one = rotary.interleaved ? 2 * pair : pair;
    const int other = rotary.interleaved ? 2 * pair + 1 : pair + rotary.pairs;
    const float a = from[one];
    const float b = from[other];
    float cosine;
    float sine;
    RotationOf(rotary.frequencies[pair], position, rotary.factor, &cosine, &sine);
    store(one, a * cosine - b * sine);
    store(other, b * cosine + a * sine);
  }
#pragma unroll 1
  for (int i = 2 * rotary.pairs + first; i < args.rope; i += step) store(i, from[i]);
}

/// Called by all threads of a CTA.
MARLIN_DEVICE void AppendLatent(const PrepareLatentsArguments& args, int row, int position) {
  __shared__ uint8_t* found;
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    const int sequence = SequenceOf(args.sequences, row);
    found = CheckPosition(args.sequences, sequence, row, args.errors)
                ? FindPage(args.sequences, args.pages, sequence, position, args.errors)
                : nullptr;
  }
  const PagesView& pages = args.pages;
  const float* const from = static_cast<const float*>(args.latents.data) + args.latents.At(row);
  __syncthreads();
  uint8_t* const page = found;
  if (page == nullptr) return;
  const int64_t to = static_cast<int64_t>(position % pages.page_tokens) * pages.key_dim;
  const int still = pages.key_dim - args.rope;
#pragma unroll 4
  for (int i = thread; i < still; i += kPrepareThreads)
    StoreCached(page, pages.type, to + i, from[i]);
  RotateFeatures(args, position, from + still, thread, kPrepareThreads,
                 [&](int i, float value) { StoreCached(page, pages.type, to + still + i, value); });
}

/// CTA `block` of PrepareBlocks.
MARLIN_DEVICE void PrepareLatents(const PrepareLatentsArguments& args, int block) {
  const int of_row = PrepareBlocks(args) / args.sequences.rows;
  const int row = block / of_row;
  const int part = block - row * of_row;
  if (block == 0) CheckFirstRows(args.sequences, args.errors);
  const int position = args.sequences.positions[row];
  if (position < 0) {
    if (threadIdx.x == 0) RecordError(args.errors, ValueError::kPosition, position, row);
    return;
  }
  if (part + 1 == of_row) return AppendLatent(args, row, position);
  const int head = part * kPrepareWarps + static_cast<int>(threadIdx.x) / 32;
  if (head >= args.heads) return;
  float* const to = static_cast<float*>(args.wide.data) + args.wide.At(row, head);
  RotateFeatures(
      args, position, static_cast<const float*>(args.queries.data) + args.queries.At(row, head),
      static_cast<int>(threadIdx.x) % 32, 32, [&](int i, float value) { to[i] = value; });
}

}  // namespace marlin::cuda
