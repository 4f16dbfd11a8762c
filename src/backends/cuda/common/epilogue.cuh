// The epilogue of a GEMM, the same in every kernel, and typed loads and stores.
#pragma once

#include "backends/cuda/common/fragment_math.cuh"
#include "backends/cuda/layout/device_views.h"

namespace marlin::cuda {

MARLIN_DEVICE float LoadFloat(const void* data, Element type, int64_t i) {
  switch (type) {
    case Element::kF32:
      return static_cast<const float*>(data)[i];
    case Element::kBf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    case Element::kF16:
      return __half2float(static_cast<const __half*>(data)[i]);
    case Element::kE8M0: {
      const uint32_t exponent = static_cast<const uint8_t*>(data)[i];
      // 2^-127 is subnormal.
      return exponent == 0 ? __uint_as_float(0x00400000u) : __uint_as_float(exponent << 23);
    }
    case Element::kE4M3: {
      const uint32_t code = static_cast<const uint8_t*>(data)[i];
      const float value = __uint_as_float((code & 127u) << 20) * PowerOfTwo(120);
      return (code & 128u) != 0 ? -value : value;
    }
  }
  return 0.0f;
}

MARLIN_DEVICE void StoreFloat(void* data, Element type, int64_t i, float value) {
  if (type == Element::kBf16) {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value);
  } else if (type == Element::kF16) {
    static_cast<__half*>(data)[i] = __float2half_rn(value);
  } else {
    static_cast<float*>(data)[i] = value;
  }
}

/// x * sigmoid(y), without overflow. kFast: with a relative error of 2^-20, for results that are
/// rounded to 16 bits.
template <bool kFast = false>
MARLIN_DEVICE float TimesSigmoid(float x, float y) {
  const float e = kFast ? __expf(-fabsf(y)) : expf(-fabsf(y));
  const float product = y < 0.0f ? x * e : x;
  return kFast ? __fdividef(product, 1.0f + e) : product / (1.0f + e);
}

/// Activations, as numbered in gemm.h.
inline constexpr int kSilu = 1;
inline constexpr int kGeluTanh = 2;
inline constexpr int kRelu = 3;

/// A tree of branches: a switch would be an indirect branch, which costs more than an activation.
template <bool kFast = false>
MARLIN_DEVICE float Activate(int activation, float x) {
  if (activation < kGeluTanh) {
    if (activation == kSilu) return TimesSigmoid<kFast>(x, x);
    return x;
  }
  if (activation == kGeluTanh) {
    // x (1 + tanh u) / 2 = x sigmoid(2 u)
    return TimesSigmoid<kFast>(x, 1.59576912f * (x + 0.044715f * x * x * x));
  }
  return x < 0.0f ? 0.0f : x;  // kRelu, which propagates NaN.
}

/// The gated activation of a gate and an up that are clamped first.
template <bool kFast>
MARLIN_DEVICE float ClampedProduct(const GateView& gate, float g, float u) {
  // Comparisons that keep NaN.
  g = g > gate.limit ? gate.limit : g;
  u = u > gate.limit ? gate.limit : u < -gate.limit ? -gate.limit : u;
  return TimesSigmoid<kFast>((u + 1.0f) * g, gate.alpha * g);
}
/// The gated activation of a gate and an up; kFast: as in TimesSigmoid.
template <bool kFast = false>
MARLIN_DEVICE float GateProduct(const GateView& gate, float g, float u) {
  if (gate.limit != 0.0f) return ClampedProduct<kFast>(gate, g, u);
  return Activate<kFast>(gate.activation, g) * u;
}

/// g = the gated activation of g and u, of several values: one branch for all.
template <bool kFast, int kCount>
MARLIN_DEVICE void ReplaceByProducts(const GateView& gate, float (&g)[kCount],
                                     const float (&u)[kCount]) {
  const auto replace = [&](const auto& product) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) g[i] = product(g[i], u[i]);
  };
  if (gate.limit != 0.0f) {
    replace([&](float x, float y) { return ClampedProduct<kFast>(gate, x, y); });
  } else if (gate.activation == kSilu) {
    replace([](float x, float y) { return Activate<kFast>(kSilu, x) * y; });
  } else if (gate.activation == kGeluTanh) {
    replace([](float x, float y) { return Activate<kFast>(kGeluTanh, x) * y; });
  } else {
    const bool relu = gate.activation == kRelu;
    replace([&](float x, float y) { return (relu ? Activate(kRelu, x) : x) * y; });
  }
}

/// A sum after the multiplier and the bias.
MARLIN_DEVICE float Biased(const EpilogueView& view, int n, float sum) {
  sum *= view.multiplier;
  return view.bias == nullptr ? sum : sum + LoadFloat(view.bias, view.bias_type, n);
}

/// Applies the epilogue to the sum of row m and column n and stores the result; not for GLU.
MARLIN_DEVICE void Finish(const EpilogueView& view, int m, int n, float sum) {
  float value = Activate(view.activation, Biased(view, n, sum));
  if (view.row_weight != nullptr) value *= view.row_weight[m];
  StoreFloat(view.out, view.type, m * view.stride + n, value);
}

/// Stores two adjacent outputs, with one vectorized store where they are aligned.
MARLIN_DEVICE void StorePair(const EpilogueView& view, int64_t at, float2 value, bool both) {
  const bool small = view.type != Element::kF32;
  auto* to = static_cast<uint8_t*>(view.out) + at * (small ? 2 : 4);
  if (both && small && (reinterpret_cast<uintptr_t>(to) & 3) == 0) {
    *reinterpret_cast<uint32_t*>(to) = view.type == Element::kBf16 ? Bf16x2::Pack(value.x, value.y)
                                                                   : F16x2::Pack(value.x, value.y);
    return;
  }
  StoreFloat(view.out, view.type, at, value.x);
  if (both) StoreFloat(view.out, view.type, at + 1, value.y);
}

/// Finish of two adjacent outputs; without `both` of the first alone.
MARLIN_DEVICE void FinishPair(const EpilogueView& view, int m, int n, float2 sum, bool both) {
  float2 value = {Activate(view.activation, Biased(view, n, sum.x)), 0.0f};
  if (both) value.y = Activate(view.activation, Biased(view, n + 1, sum.y));
  if (view.row_weight != nullptr) {
    value.x *= view.row_weight[m];
    value.y *= view.row_weight[m];
  }
  StorePair(view, m * view.stride + n, value, both);
}

/// The epilogue of GLU: output column n from sums n and n + view.n / 2.
MARLIN_DEVICE void FinishGated(const EpilogueView& view, int m, int n, float gate, float up) {
  float value = Activate(view.activation, Biased(view, n, gate)) * Biased(view, n + view.n / 2, up);
  if (view.row_weight != nullptr) value *= view.row_weight[m];
  StoreFloat(view.out, view.type, m * view.stride + n, value);
}

}  // namespace marlin::cuda
