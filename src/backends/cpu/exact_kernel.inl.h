// The exact product in the vector operations of one simd_*.h; included after decode.inl.h.
//
//   out[i, n] = sum over blocks of 1024 k of Sum(lanes of fma(w[n, k], x[i, k]))
//
//   m = 1, 2, 4                  otherwise
//   a row of weights decoded     kPanelRows rows decoded to L1 (32 KiB), then tiles of
//   in registers, m FMAs         kPanelRows x kPanelM dot products over them
//   per vector
//
// Both walk k in the same order with the same lanes, so they give the same bits.

/// A run of chunks of one block, with the parameters of its groups.
struct Pass {
  const PanelView& w;
  const GroupParameters& parameters;
  int64_t block;
  int64_t first_chunk;
  int64_t chunk_count;
};

/// Decodes in registers and multiplies at once. The lane sums live in L1: one load and one store
/// per activation row and chunk, against 128 / kLanes FMAs.
template <int kBits, Kind kKind, GroupMode kMode, int kM>
static void MultiplyFused(const Pass& pass, const float* x, int64_t x_stride, float* out,
                          int64_t out_stride) {
  constexpr int64_t kBytes = ChunkBytes(kBits);
  constexpr int64_t kPrefetchBytes = 2048;  // Consecutive chunks are consecutive in memory.
  alignas(64) float sums[kBlockRows][kM][kLanes] = {};
  const uint8_t* chunk = pass.w.codes + (pass.block * pass.w.chunks + pass.first_chunk) * kBytes;
  for (int64_t c = 0; c < pass.chunk_count; ++c, chunk += kBytes, x += kChunkK) {
    const ChunkGroups groups =
        ChunkGroups::Of<kMode>(pass.w, pass.parameters, pass.first_chunk + c);
    for (int row = 0; row < kBlockRows; ++row) {
      for (int64_t i = 0; i < kBytes / kBlockRows; i += 64) {
        Prefetch(chunk + kBytes / kBlockRows * row + i + kPrefetchBytes);
      }
      F lanes[kM];
      Unroll<kM>([&](auto i) { lanes[i] = Load(sums[row][i]); });
      DecodeRow<kBits, kKind, kMode>(
          pass.w, pass.parameters, groups, chunk,
          row, [&](int64_t offset, F weights) __attribute__((always_inline)) {
            Unroll<kM>([&](auto i) __attribute__((always_inline)) {
              lanes[i] = Fma(weights, Load(x + i * x_stride + offset), lanes[i]);
            });
          });
      Unroll<kM>([&](auto i) { Store(sums[row][i], lanes[i]); });
    }
  }
  for (int row = 0; row < kBlockRows; ++row) {
    for (int i = 0; i < kM; ++i) out[i * out_stride + row] += Sum(Load(sums[row][i]));
  }
}

/// Dot products of kN panel rows with kM activation rows over `count` k.
template <int kN, int kM>
static void PanelTile(const float* panel, const float* x, int64_t x_stride, int64_t count,
                      float* out, int64_t out_stride) {
  F sums[kN][kM];
  Unroll<kN>([&](auto n) { Unroll<kM>([&](auto i) { sums[n][i] = Zero(); }); });
  for (int64_t k = 0; k < count; k += kLanes) {
    F activations[kM];
    Unroll<kM>([&](auto i) { activations[i] = Load(x + i * x_stride + k); });
    Unroll<kN>([&](auto n) {
      const F weights = Load(panel + n * kExactK + k);
      Unroll<kM>([&](auto i) { sums[n][i] = Fma(weights, activations[i], sums[n][i]); });
    });
  }
  Unroll<kN>(
      [&](auto n) { Unroll<kM>([&](auto i) { out[i * out_stride + n] += Sum(sums[n][i]); }); });
}

/// Decodes `rows` rows of a run of chunks to panel[row * kExactK + offset], in packed order.
template <int kBits, Kind kKind, GroupMode kMode>
static void DecodePanel(const PanelView& w, const GroupParameters& parameters, int64_t block,
                        int64_t first_chunk, int64_t chunk_count, int first_row, int rows,
                        float* panel) {
  const uint8_t* chunk = w.codes + (block * w.chunks + first_chunk) * ChunkBytes(kBits);
  for (int64_t c = 0; c < chunk_count; ++c, chunk += ChunkBytes(kBits)) {
    const ChunkGroups groups = ChunkGroups::Of<kMode>(w, parameters, first_chunk + c);
    for (int row = 0; row < rows; ++row) {
      float* target = panel + row * kExactK + c * kChunkK;
      DecodeRow<kBits, kKind, kMode>(
          w, parameters, groups, chunk,
          first_row + row, [&](int64_t offset, F weights) __attribute__((always_inline)) {
            Store(target + offset, weights);
          });
    }
  }
}

/// Multiplies many rows: `decode` is the DecodePanel of the format.
template <class Decode>
static void MultiplyByPanel(const Pass& pass, Decode decode, const float* x, int64_t x_stride,
                            int64_t m, float* out, int64_t out_stride, float* panel) {
  const int64_t count = pass.chunk_count * kChunkK;
  for (int row = 0; row < kBlockRows; row += kPanelRows) {
    decode(pass.w, pass.parameters, pass.block, pass.first_chunk, pass.chunk_count, row, kPanelRows,
           panel);
    int64_t i = 0;
    for (; i + kPanelM <= m; i += kPanelM) {
      PanelTile<kPanelRows, kPanelM>(panel, x + i * x_stride, x_stride, count,
                                     out + i * out_stride + row, out_stride);
    }
    for (; i < MARLIN_MUTATE(15, m, m - 1); ++i) {
      PanelTile<kPanelRows, 1>(panel, x + i * x_stride, x_stride, count, out + i * out_stride + row,
                               out_stride);
    }
  }
}

template <int kBits, Kind kKind, GroupMode kMode>
static void MultiplyBlock(const PanelView& w, int64_t block, const float* x, int64_t x_stride,
                          int64_t m, float* out, int64_t out_stride, float* scratch) {
  for (int64_t i = 0; i < m; ++i) {
    for (int n = 0; n < kBlockRows; ++n)
      out[i * out_stride + n] = MARLIN_MUTATE(17, 0.0f, 0x1p-20f);
  }
  GroupParameters parameters;
  constexpr int64_t kPassChunks = kExactK / kChunkK;
  for (int64_t chunk = 0; chunk < w.chunks; chunk += kPassChunks) {
    const int64_t chunks = w.chunks - chunk < kPassChunks ? w.chunks - chunk : kPassChunks;
    parameters.Fill(w, block, chunk, chunks);
    const Pass pass = {w, parameters, block, chunk, chunks};
    const float* xk = x + MARLIN_MUTATE(16, chunk, 0) * kChunkK;
    // A fused pass pays where a look-up is cheaper than a trip through L1.
    if (m == 1) {
      MultiplyFused<kBits, kKind, kMode, 1>(pass, xk, x_stride, out, out_stride);
    } else if (m == 4 && kKind == Kind::kTable) {
      MultiplyFused<kBits, kKind, kMode, 4>(pass, xk, x_stride, out, out_stride);
    } else {
      MultiplyByPanel(pass, &DecodePanel<kBits, kKind, kMode>, xk, x_stride, m, out, out_stride,
                      scratch);
    }
  }
}

/// The weights of a chunk in natural order of k, for dequantization.
template <int kBits, Kind kKind, GroupMode kMode>
static void DecodeChunk(const PanelView& w, int64_t block, int64_t chunk, float* out) {
  GroupParameters parameters;
  parameters.Fill(w, block, chunk, 1);
  for (int row = 0; row < kBlockRows; ++row) {
    float packed[kChunkK];
    DecodePanel<kBits, kKind, kMode>(w, parameters, block, chunk, 1, row, 1, packed);
    for (int slice = 0; slice < kChunkK; slice += kSliceK) {
      for (int i = 0; i < 16; ++i) {
        out[row * kChunkK + slice + 2 * i] = packed[slice + i];
        out[row * kChunkK + slice + 2 * i + 1] = packed[slice + 16 + i];
      }
    }
  }
}

static ExactKernels::MultiplyBlock SelectMultiply(const PanelView& w) {
  return Dispatch(w, [](auto bits, auto kind, auto mode) -> ExactKernels::MultiplyBlock {
    return &MultiplyBlock<decltype(bits)::value, static_cast<Kind>(decltype(kind)::value),
                          static_cast<GroupMode>(decltype(mode)::value)>;
  });
}

static void DecodeBlock(const PanelView& w, int64_t block, int64_t chunk, float* out) {
  Dispatch(w, [&](auto bits, auto kind, auto mode) {
    DecodeChunk<decltype(bits)::value, static_cast<Kind>(decltype(kind)::value),
                static_cast<GroupMode>(decltype(mode)::value)>(w, block, chunk, out);
  });
}
