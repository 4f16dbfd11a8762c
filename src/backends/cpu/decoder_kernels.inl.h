// The loops of decoder_kernels.h in the vector operations of one simd_*.h. Included after it,
// conversions.inl.h and activation.inl.h inside their namespace.

static float SumOfSquares(const float* x, int64_t count) {
  F sums[2] = {Zero(), Zero()};
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const F a = Load(x + i);
    const F b = Load(x + i + kLanes);
    sums[0] = Fma(a, a, sums[0]);
    sums[1] = Fma(b, b, sums[1]);
  }
  float sum = Sum(Add(sums[0], sums[1]));
  for (; i < count; ++i) sum += x[i] * x[i];
  return sum;
}

static void Scale(const float* x, float factor, const float* weight, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = x[i] * factor * weight[i];
}

static void AddScaled(const float* y, float factor, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] += y[i] * factor;
}

static void Gate(const GateOptions& options, const float* gate, const float* up, int64_t count,
                 float* out) {
  if (options.limit > 0.0f) {
    const float limit = options.limit;
    for (int64_t i = 0; i < count; ++i) {
      // Comparisons with NaN are false: it passes through both clamps.
      const float g = gate[i] > limit ? limit : gate[i];
      const float low = up[i] < -limit ? -limit : up[i];
      const float u = low > limit ? limit : low;
      out[i] = (u + 1.0f) * TimesSigmoid(g, options.alpha * g);
    }
    return;
  }
  constexpr int64_t kRun = 64;
  for (int64_t first = 0; first < count; first += kRun) {
    const int64_t run = count - first < kRun ? count - first : kRun;
    alignas(64) float v[kRun];
    for (int64_t i = 0; i < run; ++i) v[i] = gate[first + i];
    Activate(options.activation, v, run);
    for (int64_t i = 0; i < run; ++i) out[first + i] = v[i] * up[first + i];
  }
}

static void Rotate(const float* cosine, const float* sine, int64_t pairs, float* first,
                   float* second) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = first[i];
    const float b = second[i];
    first[i] = a * cosine[i] - b * sine[i];
    second[i] = b * cosine[i] + a * sine[i];
  }
}

/// The angle is reduced in double, so that far positions keep their digits: at most 2^31 * 1 with
/// an error of 2^-22. Then polynomials for |r| <= pi / 4 (Cephes), exchanged by quadrant.
static void Angles(const float* frequency, int32_t position, float factor, int64_t pairs,
                   float* cosine, float* sine) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  constexpr double kHalfPi = 1.57079632679489661923;
  for (int64_t i = 0; i < pairs; ++i) {
    const double angle = static_cast<double>(frequency[i]) * position;
    const double quarters = __builtin_nearbyint(angle * kTwoOverPi);
    const auto r = static_cast<float>(angle - quarters * kHalfPi);
    const auto quadrant = static_cast<int64_t>(quarters) & 3;
    const float z = r * r;
    const float s = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * r + r;
    const float c =
        ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z -
        0.5f * z + 1.0f;
    const bool exchanged = (quadrant & 1) != 0;
    const float first = exchanged ? s : c;
    const float second = exchanged ? c : s;
    cosine[i] = factor * (quadrant == 1 || quadrant == 2 ? -first : first);
    sine[i] = factor * (quadrant >= 2 ? -second : second);
  }
}

/// kQ x kK dot products; every one of them runs over `depth` in the same order.
template <int kQ, int kK>
static void ScoreTile(const float* queries, int64_t query_stride, const float* keys,
                      int64_t key_stride, int64_t depth, float scale, float* scores) {
  F sums[kQ][kK];
  for (auto& row : sums) {
    for (F& sum : row) sum = Zero();
  }
  int64_t d = 0;
  for (; d + kLanes <= depth; d += kLanes) {
    F key[kK];
    for (int j = 0; j < kK; ++j) key[j] = Load(keys + j * key_stride + d);
    for (int q = 0; q < kQ; ++q) {
      const F query = Load(queries + q * query_stride + d);
      for (int j = 0; j < kK; ++j) sums[q][j] = Fma(query, key[j], sums[q][j]);
    }
  }
  for (int q = 0; q < kQ; ++q) {
    for (int j = 0; j < kK; ++j) {
      float sum = Sum(sums[q][j]);
      for (int64_t i = d; i < depth; ++i) {
        sum += queries[q * query_stride + i] * keys[j * key_stride + i];
      }
      scores[q * kKeyBlock + j] = sum * scale;
    }
  }
}

template <int kQ>
static void ScoreRows(const float* queries, int64_t query_stride, const FloatRows& keys,
                      int64_t depth, float scale, float* scores) {
  int64_t j = 0;
  for (; j + 4 <= keys.rows; j += 4) {
    ScoreTile<kQ, 4>(queries, query_stride, keys.data + j * keys.stride, keys.stride, depth, scale,
                     scores + j);
  }
  for (; j < keys.rows; ++j) {
    ScoreTile<kQ, 1>(queries, query_stride, keys.data + j * keys.stride, keys.stride, depth, scale,
                     scores + j);
  }
}

static void Score(const FloatRows& queries, const FloatRows& keys, int64_t depth, float scale,
                  float* scores) {
  int64_t q = 0;
  for (; q + 4 <= queries.rows; q += 4) {
    ScoreRows<4>(queries.data + q * queries.stride, queries.stride, keys, depth, scale,
                 scores + q * kKeyBlock);
  }
  for (; q < queries.rows; ++q) {
    ScoreRows<1>(queries.data + q * queries.stride, queries.stride, keys, depth, scale,
                 scores + q * kKeyBlock);
  }
}

static float Exponentials(float* x, int64_t count, float largest) {
  for (int64_t i = 0; i < count; ++i) {
    const float difference = x[i] - largest;
    const float e = Exp(difference);
    x[i] = difference != difference ? difference : e;
  }
  // One sum in the order of the keys, whatever the width of vectors.
  float sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int lane = 0; lane < 4; ++lane) sums[lane] += x[i + lane];
  }
  for (; i < count; ++i) sums[0] += x[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/// Columns [d, d + kVectors * kLanes) of kQ rows.
template <int kQ, int kVectors>
static void MixTile(const float* weights, const float* factors, const FloatRows& values, int64_t d,
                    int64_t width, float* out) {
  F sums[kQ][kVectors];
  for (int q = 0; q < kQ; ++q) {
    for (int v = 0; v < kVectors; ++v) {
      sums[q][v] = Mul(Load(out + q * width + d + v * kLanes), Set(factors[q]));
    }
  }
  for (int64_t j = 0; j < values.rows; ++j) {
    F value[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      value[v] = Load(values.data + j * values.stride + d + v * kLanes);
    }
    for (int q = 0; q < kQ; ++q) {
      const F weight = Set(weights[q * kKeyBlock + j]);
      for (int v = 0; v < kVectors; ++v) sums[q][v] = Fma(weight, value[v], sums[q][v]);
    }
  }
  for (int q = 0; q < kQ; ++q) {
    for (int v = 0; v < kVectors; ++v) Store(out + q * width + d + v * kLanes, sums[q][v]);
  }
}

template <int kQ>
static void MixRows(const float* weights, const float* factors, const FloatRows& values,
                    int64_t width, float* out) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= width; d += 4 * kLanes) {
    MixTile<kQ, 4>(weights, factors, values, d, width, out);
  }
  for (; d + kLanes <= width; d += kLanes) {
    MixTile<kQ, 1>(weights, factors, values, d, width, out);
  }
  for (; d < width; ++d) {
    for (int q = 0; q < kQ; ++q) {
      float sum = out[q * width + d] * factors[q];
      for (int64_t j = 0; j < values.rows; ++j) {
        sum += weights[q * kKeyBlock + j] * values.data[j * values.stride + d];
      }
      out[q * width + d] = sum;
    }
  }
}

static void Mix(const float* weights, const float* factors, const FloatRows& values, int64_t width,
                int64_t queries, float* out) {
  int64_t q = 0;
  for (; q + 4 <= queries; q += 4) {
    MixRows<4>(weights + q * kKeyBlock, factors + q, values, width, out + q * width);
  }
  for (; q < queries; ++q) {
    MixRows<1>(weights + q * kKeyBlock, factors + q, values, width, out + q * width);
  }
}

const DecoderKernels kDecoderKernels = {&Widen,     &Narrow,       &SumOfSquares, &Scale,
                                        &AddScaled, &Gate,         &Rotate,       &Angles,
                                        &Score,     &Exponentials, &Mix};
