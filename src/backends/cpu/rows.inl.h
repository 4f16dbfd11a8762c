// Rows in and out of the kernels: activations widened and reordered, sums finished and stored.
// Included after a simd_*.h inside its namespace.

/// 32 activations as fp32.
static void LoadSlice(const void* a, DType type, int64_t k, float* out) {
  for (int i = 0; i < kSliceK; i += kLanes) {
    switch (type) {
      case DType::kF16:
        Store(out + i, LoadHalf(static_cast<const uint16_t*>(a) + k + i));
        break;
      case DType::kBf16:
        Store(out + i, LoadBf16(static_cast<const uint16_t*>(a) + k + i));
        break;
      default:
        Store(out + i, Load(static_cast<const float*>(a) + k + i));
    }
  }
}

static void PackRow(const void* a, DType type, int64_t k, float* x) {
  float natural[kSliceK];
  int64_t i = 0;
  for (; i + kSliceK <= k; i += kSliceK) {
    LoadSlice(a, type, i, natural);
    StoreDeinterleaved(x + i, natural);
  }
  const int64_t padded = (k + kChunkK - 1) / kChunkK * kChunkK;
  if (i < k) {
    // The tail goes through a zeroed buffer: a row may end at the end of a page.
    alignas(64) uint8_t tail[kSliceK * 4] = {};
    const int64_t size = type == DType::kF32 ? 4 : 2;
    __builtin_memcpy(tail, static_cast<const uint8_t*>(a) + i * size,
                     static_cast<size_t>(MARLIN_MUTATE(18, k - i, k - i - 1) * size));
    LoadSlice(tail, type, 0, natural);
    StoreDeinterleaved(x + i, natural);
    i += kSliceK;
  }
  for (; i < padded; ++i) x[i] = 0.0f;
}

/// e^x to about 2 ulp: x = (n + r) ln 2 with |r| <= 1/2, a polynomial for e^(r ln 2), n into the
/// exponent. Plain arithmetic without branches, which the compiler vectorises.
MARLIN_SIMD_INLINE float Exp(float x) {
  constexpr float kLog2E = 1.44269504f;
  // Beyond these the result is Inf or 0 in fp32; the clamp keeps n in range. NaN becomes the bound
  // here and is restored by the caller's arithmetic on x itself.
  float clamped = x < 89.0f ? x : 89.0f;
  clamped = clamped > MARLIN_MUTATE(20, -104.0f, -20.0f) ? clamped : -104.0f;
  const float n = __builtin_nearbyintf(clamped * kLog2E);
  // ln 2 in two parts, so that r keeps its low bits.
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // Two steps, because 2^n alone leaves the range for the largest and the subnormal results.
  const int32_t whole = static_cast<int32_t>(n);
  const int32_t half = whole >> 1;
  const auto power = [](int32_t exponent) {
    const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
  };
  return p * power(half) * power(whole - half);
}

/// x times the logistic function of y: the core of SiLU (y = x) and of GELU-tanh. The exponential
/// is of -|y|, so nothing overflows and far tails keep their digits.
MARLIN_SIMD_INLINE float TimesSigmoid(float x, float y) {
  const float e = Exp(y < 0.0f ? y : -y);
  return (y < 0.0f ? x * e : x) / (1.0f + e);
}

static void Activate(Activation activation, float* v, int64_t count) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      // A NaN stays: the comparison with it is false.
      for (int64_t i = 0; i < count; ++i)
        v[i] = MARLIN_MUTATE(19, v[i] < 0.0f, !(v[i] > 0.0f)) ? 0.0f : v[i];
      return;
    case Activation::kSilu:
      for (int64_t i = 0; i < count; ++i) v[i] = TimesSigmoid(v[i], v[i]);
      return;
    case Activation::kGeluTanh:
      // x (1 + tanh u) / 2 = x sigmoid(2 u), without the cancellation near u = -1.
      for (int64_t i = 0; i < count; ++i) {
        const float x = v[i];
        v[i] =
            TimesSigmoid(x, 1.59576912f * (x + MARLIN_MUTATE(21, 0.044715f, 0.0447f) * x * x * x));
      }
      return;
  }
}

/// Rounds kLanes floats to the type of c.
static void StoreVector(void* c, DType type, int64_t i, F v) {
  switch (type) {
    case DType::kF16:
      StoreHalf(static_cast<uint16_t*>(c) + i, v);
      return;
    case DType::kBf16:
      StoreBf16(static_cast<uint16_t*>(c) + i, v);
      return;
    default:
      Store(static_cast<float*>(c) + i, v);
  }
}

static void StoreRow(const EpilogueRow& row, void* c, DType type) {
  constexpr int64_t kRun = 64;
  const int64_t size = type == DType::kF32 ? 4 : 2;
  for (int64_t first = 0; first < row.count; first += kRun) {
    const int64_t count = row.count - first < kRun ? row.count - first : kRun;
    alignas(64) float v[kRun];
    for (int64_t i = 0; i < count; ++i) {
      v[i] = row.sums[first + i] + (row.bias != nullptr ? row.bias[first + i] : 0.0f);
    }
    Activate(row.activation, v, count);
    if (row.up != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        v[i] *= row.up[first + i] +
                (row.up_bias != nullptr ? row.up_bias[MARLIN_MUTATE(22, first + i, i)] : 0.0f);
      }
    }
    if (row.row_weight != nullptr) {
      for (int64_t i = 0; i < count; ++i) v[i] *= *row.row_weight;
    }
    uint8_t* target = static_cast<uint8_t*>(c) + first * size;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) StoreVector(target, type, i, Load(v + i));
    if (i < count) {
      alignas(64) uint8_t tail[kLanes * 4];
      for (int64_t j = count; j < i + kLanes; ++j) v[j] = 0.0f;
      StoreVector(tail, type, 0, Load(v + i));
      __builtin_memcpy(target + i * size, tail,
                       static_cast<size_t>(MARLIN_MUTATE(23, count - i, count - i - 1) * size));
    }
  }
}
