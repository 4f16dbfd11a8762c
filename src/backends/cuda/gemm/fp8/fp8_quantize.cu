// Quantizes activations to e4m3 numbers and a power of two for every row: for the FP8 kernel as
// such, for kernels that multiply bf16 as the products of the two, which bf16 holds exactly.
//
//   p = the largest power of two with p x max|a| <= 448;  out[k'] = e4m3(p x a[k]);  scale = 1 / p
//
//   k' is k with every k16 step in the order of Fp8Source; zeros from k to the next multiple of
//   128. A power of two loses no more than any other scale would, because e4m3 has exponents: the
//   error is 2^-4 of a number, or 2^-10 / p where it is subnormal. A row with a NaN or an Inf gets
//   the scale NaN, and its outputs are NaN.
#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/gemm/fp8/fp8_fragment.cuh"
#include "backends/cuda/gemm/fp8/fp8_quantize.h"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kStepK = 16;

/// Loads 16 consecutive numbers of a row, zeros beyond its end. `wide`: rows are aligned to 16
/// bytes, so that loads can be vectorized.
MARLIN_DEVICE void LoadStep(const ActivationView& a, int64_t row, int k, bool wide,
                            float (&values)[kStepK]) {
  if (!wide || k + kStepK > a.k) {
#pragma unroll
    for (int i = 0; i < kStepK; ++i) {
      values[i] = k + i < a.k ? LoadFloat(a.data, a.type, row * a.stride + k + i) : 0.0f;
    }
    return;
  }
  const int size = a.type == Element::kF32 ? 4 : 2;
  const auto* from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(a.data) +
                                                    (row * a.stride + k) * size);
  if (a.type == Element::kF32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 v = __ldg(from + i);
      values[4 * i] = __uint_as_float(v.x);
      values[4 * i + 1] = __uint_as_float(v.y);
      values[4 * i + 2] = __uint_as_float(v.z);
      values[4 * i + 3] = __uint_as_float(v.w);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 v = __ldg(from + i);
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 pair =
          a.type == Element::kBf16 ? Bf16x2::Unpack(pairs[p]) : F16x2::Unpack(pairs[p]);
      values[8 * i + 2 * p] = pair.x;
      values[8 * i + 2 * p + 1] = pair.y;
    }
  }
}

/// The maximum over all threads of the CTA, returned to each.
MARLIN_DEVICE uint32_t LargestOfBlock(uint32_t value) {
  __shared__ uint32_t of_warps[kThreads / 32];
  value = __reduce_max_sync(~0u, value);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  return __reduce_max_sync(~0u, of_warps[threadIdx.x % (kThreads / 32)]);
}

/// The exponent of p, from the bits of the largest magnitude, which is finite.
MARLIN_DEVICE int ExponentFor(uint32_t largest) {
  constexpr uint32_t kMantissaOf448 = 0x600000u;  // 1.75 x 2^8
  constexpr int kLargest = 120;                   // Its inverse is a normal number.
  const int exponent = static_cast<int>(largest >> 23) - 127;
  const int room = (largest & 0x7fffffu) <= kMantissaOf448 ? 8 : 7;
  return min(room - exponent, kLargest);
}

MARLIN_DEVICE float FloatOfExponent(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

MARLIN_DEVICE uint4 QuantizeStep(const float (&values)[kStepK], float p) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low =
        E4M3x4::FromFloats(values[Fp8Source(4 * i)] * p, values[Fp8Source(4 * i + 1)] * p);
    const uint32_t high =
        E4M3x4::FromFloats(values[Fp8Source(4 * i + 2)] * p, values[Fp8Source(4 * i + 3)] * p);
    words[i] = low | high << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

/// The exponent of p for a row; kNotFinite for one with a NaN or an Inf. Called by all threads.
constexpr int kNotFinite = 1 << 10;
MARLIN_DEVICE int ExponentOfRow(const ActivationView& a, int64_t row, bool wide) {
  float values[kStepK];
  uint32_t largest = 0;
  for (int k = static_cast<int>(threadIdx.x) * kStepK; k < a.k; k += kThreads * kStepK) {
    LoadStep(a, row, k, wide, values);
#pragma unroll
    for (int i = 0; i < kStepK; ++i) {
      largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
    }
  }
  largest = LargestOfBlock(largest);
  constexpr uint32_t kInf = 0x7f800000u;
  return largest < kInf ? ExponentFor(largest) : kNotFinite;
}

/// The scale of a row, 1 / p.
MARLIN_DEVICE float ScaleOf(int exponent) {
  return exponent == kNotFinite ? __uint_as_float(0x7fc00000u) : FloatOfExponent(-exponent);
}
MARLIN_DEVICE float PowerOf(int exponent) {
  return FloatOfExponent(exponent == kNotFinite ? 0 : exponent);
}

/// One CTA per row.
__global__ void __launch_bounds__(kThreads)
    QuantizeRowsKernel(ActivationView a, bool wide, uint8_t* out, int columns, float* scales) {
  TriggerDependentLaunch();
  const int64_t row = blockIdx.x;
  const int exponent = ExponentOfRow(a, row, wide);
  if (threadIdx.x == 0) scales[row] = ScaleOf(exponent);
  const float p = PowerOf(exponent);
  auto* to = reinterpret_cast<uint4*>(out + row * columns);
  for (int k = static_cast<int>(threadIdx.x) * kStepK; k < columns; k += kThreads * kStepK) {
    float values[kStepK];
    LoadStep(a, row, k, wide, values);  // The row is in the cache by now.
    to[k / kStepK] = QuantizeStep(values, p);
  }
}

/// Two numbers rounded to multiples of e4m3's as bf16: e4m3(p x value) / p. Rounded up, the largest
/// numbers of fp32 leave its range: they become the largest of bf16.
MARLIN_DEVICE uint32_t RoundPair(float low, float high, float p, float scale) {
  constexpr float kLargest = 0x1.fep127f;
  const uint32_t codes = E4M3x4::FromFloats(low * p, high * p);
  const float2 numbers = F16x2::Unpack(E4M3x4::ToF16(static_cast<uint16_t>(codes)));
  float rounded[2] = {numbers.x * scale, numbers.y * scale};
#pragma unroll
  for (float& number : rounded) {
    // Comparisons that keep NaN.
    number = number > kLargest ? kLargest : number < -kLargest ? -kLargest : number;
  }
  return Bf16x2::Pack(rounded[0], rounded[1]);
}

/// One CTA per row; `columns` is a multiple of 8.
__global__ void __launch_bounds__(kThreads)
    RoundRowsKernel(ActivationView a, bool wide, uint16_t* out, int columns) {
  EnterChain();
  const int64_t row = blockIdx.x;
  const int exponent = ExponentOfRow(a, row, wide);
  const float scale = ScaleOf(exponent);
  const float p = PowerOf(exponent);
  for (int k = static_cast<int>(threadIdx.x) * kStepK; k < columns; k += kThreads * kStepK) {
    float values[kStepK];
    LoadStep(a, row, k, wide, values);
    auto* const to = reinterpret_cast<uint4*>(out + row * columns + k);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (k + half * 8 >= columns) break;
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = half * 8 + 2 * i;
        pairs[i] = RoundPair(values[at], values[at + 1], p, scale);
      }
      to[half] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }
}

/// Whether rows are aligned to 16 bytes.
bool HasWideRows(const ActivationView& a) {
  const int64_t row_bytes = a.stride * (a.type == Element::kF32 ? 4 : 2);
  return reinterpret_cast<uintptr_t>(a.data) % 16 == 0 && (a.m == 1 || row_bytes % 16 == 0);
}

}  // namespace

cudaError_t LaunchQuantizeRows(const ActivationView& a, void* out, int columns, float* scales,
                               cudaStream_t stream) {
  QuantizeRowsKernel<<<static_cast<unsigned>(a.m), kThreads, 0, stream>>>(
      a, HasWideRows(a), static_cast<uint8_t*>(out), columns, scales);
  return cudaGetLastError();
}

cudaError_t LaunchRoundRows(const ActivationView& a, void* out, int columns, cudaStream_t stream) {
  return LaunchInChain(&RoundRowsKernel, dim3(static_cast<unsigned>(a.m)), kThreads, 0, stream, a,
                       HasWideRows(a), static_cast<uint16_t*>(out), columns);
}

}  // namespace marlin::cuda
