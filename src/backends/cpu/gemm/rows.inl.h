// Row packing (activations widened and deinterleaved) and the epilogue. Included after a simd_*.h,
// conversions.inl.h and activation.inl.h inside their namespace.

static void PackRow(const void* a, DType type, int64_t k, float* x) {
  const int64_t size = type == DType::kF32 ? 4 : 2;
  const int64_t padded = (k + kChunkK - 1) / kChunkK * kChunkK;
  for (int64_t i = 0; i < padded; i += kSliceK) {
    float natural[kSliceK] = {};
    const int64_t left = k - i < kSliceK ? k - i : kSliceK;
    if (left > 0) Widen(static_cast<const uint8_t*>(a) + i * size, type, left, natural);
    StoreDeinterleaved(x + i, natural);
  }
}

static void StoreRow(const EpilogueRow& row, void* c, DType type) {
  const int64_t size = type == DType::kF32 ? 4 : 2;
  for (int64_t first = 0; first < row.count; first += kStoreRun) {
    const int64_t count = row.count - first < kStoreRun ? row.count - first : kStoreRun;
    alignas(64) float v[kStoreRun];
    for (int64_t i = 0; i < count; ++i) {
      v[i] = row.sums[first + i] + (row.bias != nullptr ? row.bias[first + i] : 0.0f);
    }
    Activate(row.activation, v, count);
    if (row.up != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        v[i] *= row.up[first + i] + (row.up_bias != nullptr ? row.up_bias[first + i] : 0.0f);
      }
    }
    if (row.row_weight != nullptr) {
      for (int64_t i = 0; i < count; ++i) v[i] *= *row.row_weight;
    }
    Narrow(v, count, type, static_cast<uint8_t*>(c) + first * size);
  }
}
