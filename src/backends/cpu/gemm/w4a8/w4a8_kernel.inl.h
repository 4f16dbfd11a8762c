// The W4A8 GEMM, in the vector operations of one instruction set. Included after its DecodePair,
// LoadBytesOf, AddDot, StartOf, FillStarts, WithoutOffset and RoundedOnce, kTileRows and
// kTileParts. A column block is decoded to bytes once per KC block of 1024 k (16 KiB of L1) and
// multiplied with all rows. Vector lanes are columns, so the 32 k of an activation block accumulate
// in int32 in registers, without horizontal reductions.

/// Decodes the codes of a chunk to bytes.
template <int kBits>
static void DecodeBytes(const uint8_t* chunk, const ByteCodes& codes, uint8_t* out) {
  constexpr int64_t kPrefetchBytes = 2048;  // Consecutive chunks are consecutive in memory.
  for (int64_t i = 0; i < ChunkBytes(kBits); i += 64) Prefetch(chunk + i + kPrefetchBytes);
  DecodePair<kBits, 0>(chunk, codes, out);
  DecodePair<kBits, 1>(chunk, codes, out);
}

/// A decoded panel, and its group parameters.
struct BytePanel {
  const uint8_t* bytes;
  int64_t slices;
  const GroupParameters& parameters;
  int64_t group[kPassK / kSliceK];  ///< Offset of each slice's parameters.
  const int32_t* starts;            ///< [slice][column], as StartOf takes them.
  float offset;
  bool has_zeros;
};

/// dot[p][i] = row i of x times one slice of part p, kLanes columns, from `starts` on. The parts
/// share the broadcasts of x.
template <int kBits, int kM>
MARLIN_SIMD_INLINE void MultiplySlice(const uint8_t* bytes, const int32_t* starts,
                                      const Int8Block* x, int64_t x_stride,
                                      I (&dot)[kTileParts][kM]) {
  Unroll<kTileParts>([&](auto p) __attribute__((always_inline)) {
    const I start = StartOf(starts, p);
    Unroll<kM>([&](auto i) __attribute__((always_inline)) { dot[p][i] = start; });
  });
  for (int half = 0; half < 2; ++half) {
    Bytes<kBits> weights[kTileParts];
    Unroll<kTileParts>([&](auto p) __attribute__((always_inline)) {
      weights[p] = LoadBytesOf<kBits>(bytes + half * 256 + 4 * kLanes * p);
    });
    Unroll<kM>([&](auto i) __attribute__((always_inline)) {
      const int8_t* q = x[i * x_stride].q + 16 * half;
      Unroll<kTileParts>([&](auto p) __attribute__((always_inline)) {
        dot[p][i] = AddDot(dot[p][i], weights[p], q);
      });
    });
  }
}

/// totals += the dot products of a slice with one row of x, corrected and scaled.
template <bool kZeros>
MARLIN_SIMD_INLINE void AddScaled(const BytePanel& panel, int64_t group, I dot,
                                  const Int8Block& activations, F* total) {
  F value = WithoutOffset(ToFloat(dot), panel.offset, activations.sum);
  if constexpr (kZeros) {
    const F zero = Load(panel.parameters.zero + group);
    value = Sub(value, Mul(zero, Set(activations.sum)));
  }
  const F scale = Mul(Load(panel.parameters.scale + group), Set(activations.scale));
  *total = RoundedOnce(value, scale, *total);
}

/// out[i, 0..15] += row i of x times the panel, for kM rows.
template <int kBits, bool kZeros, int kM>
static void MultiplyTile(const BytePanel& panel, const Int8Block* x, int64_t x_stride, float* out,
                         int64_t out_stride) {
  for (int part = 0; part < kParts; part += kTileParts) {
    const int first_column = part * kLanes;
    F total[kTileParts][kM];
    Unroll<kTileParts>([&](auto p) {
      Unroll<kM>(
          [&](auto i) { total[p][i] = Load(out + i * out_stride + first_column + p * kLanes); });
    });
    for (int64_t slice = 0; slice < panel.slices; ++slice) {
      const uint8_t* bytes = panel.bytes + slice * kBytesPerSlice + 4 * first_column;
      const int64_t group = panel.group[slice] + first_column;
      I dot[kTileParts][kM];
      const int32_t* starts = panel.starts + slice * kBlockRows + first_column;
      MultiplySlice<kBits, kM>(bytes, starts, x + slice, x_stride, dot);
      Unroll<kM * kTileParts>([&](auto at) __attribute__((always_inline)) {
        constexpr int i = at / kTileParts;
        constexpr int p = at % kTileParts;
        AddScaled<kZeros>(panel, group + p * kLanes, dot[p][i], x[i * x_stride + slice],
                          &total[p][i]);
      });
    }
    Unroll<kTileParts>([&](auto p) {
      Unroll<kM>(
          [&](auto i) { Store(out + i * out_stride + first_column + p * kLanes, total[p][i]); });
    });
  }
}

/// All rows of x times the panel.
template <int kBits, bool kZeros>
static void MultiplyPanel(const BytePanel& panel, const Int8Block* x, int64_t x_stride, int64_t m,
                          float* out, int64_t out_stride) {
  int64_t i = 0;
  for (; i + kTileRows <= m; i += kTileRows) {
    MultiplyTile<kBits, kZeros, kTileRows>(panel, x + i * x_stride, x_stride, out + i * out_stride,
                                           out_stride);
  }
  for (; i < m; ++i) {
    MultiplyTile<kBits, kZeros, 1>(panel, x + i * x_stride, x_stride, out + i * out_stride,
                                   out_stride);
  }
}

template <int kBits>
static void MultiplyBytes(const PanelView& w, int64_t block, const void* x, int64_t x_stride,
                          int64_t m, float* out, int64_t out_stride, float* scratch) {
  const auto* rows = static_cast<const Int8Block*>(x);
  const int64_t row_stride = x_stride / static_cast<int64_t>(sizeof(Int8Block));
  auto* bytes = reinterpret_cast<uint8_t*>(scratch);
  for (int64_t i = 0; i < m; ++i) {
    for (int n = 0; n < kBlockRows; ++n) out[i * out_stride + n] = 0.0f;
  }
  const ByteCodes codes = ByteCodesOf(w);
  GroupParameters parameters;
  alignas(kVectorBytes) int32_t starts[kPassK / kSliceK * kBlockRows];
  BytePanel panel{bytes,
                  0,
                  parameters,
                  {},
                  starts,
                  static_cast<float>(kSignedBytes<kBits> ? kWideOffset : codes.offset),
                  w.zeros != nullptr};
  for (int64_t chunk = 0; chunk < w.chunks; chunk += kPassChunks) {
    const int64_t chunks = w.chunks - chunk < kPassChunks ? w.chunks - chunk : kPassChunks;
    parameters.Fill(w, block, chunk, chunks);
    const int64_t groups =
        (chunk + chunks) * kChunkK <= w.group_size
            ? 1
            : ((chunk + chunks) * kChunkK - 1) / w.group_size - parameters.first_group + 1;
    for (int64_t i = 0; i < groups * kBlockRows; ++i) {
      parameters.scale[i] /= codes.factor;  // 1 or 2: exact.
      if (panel.has_zeros) parameters.zero[i] *= codes.factor;
    }
    panel.slices = chunks * (kChunkK / kSliceK);
    for (int64_t slice = 0; slice < panel.slices; ++slice) {
      const int64_t group = (chunk * kChunkK + slice * kSliceK) / w.group_size;
      panel.group[slice] = (group - parameters.first_group) * kBlockRows;
    }
    const uint8_t* source = w.codes + (block * w.chunks + chunk) * ChunkBytes(kBits);
    for (int64_t c = 0; c < chunks; ++c) {
      DecodeBytes<kBits>(source + c * ChunkBytes(kBits), codes, bytes + c * kBytesPerChunk);
    }
    FillStarts(bytes, panel.slices, starts);
    const Int8Block* first = rows + chunk * (kChunkK / kSliceK);
    constexpr int kByteBits = ByteBits(kBits);
    const auto multiply =
        panel.has_zeros ? &MultiplyPanel<kByteBits, true> : &MultiplyPanel<kByteBits, false>;
    multiply(panel, first, row_stride, m, out, out_stride);
  }
}

ExactKernels::MultiplyBlock SelectW4a8(const PanelView& w) {
  switch (w.bits) {
    case 2:
      return &MultiplyBytes<2>;
    case 3:
      return &MultiplyBytes<3>;
    case 4:
      return &MultiplyBytes<4>;
    case 5:
      return &MultiplyBytes<5>;
    case 6:
      return &MultiplyBytes<6>;
    case kSparse4:
      return &MultiplyBytes<kSparse4>;
    default:
      return &MultiplyBytes<8>;
  }
}
