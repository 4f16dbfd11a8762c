// Quantizes activations for the FP8 kernel: a power of two and e4m3 numbers for every row.
//
//   p = the largest power of two with p x max|a| <= 448;  out[k'] = e4m3(p x a[k]);  scale = 1 / p
//
//   k' is k with every k16 step in the order of Fp8Source; zeros from k to the next multiple of
//   128. A power of two loses no more than any other scale would, because e4m3 has exponents: the
//   error is 2^-4 of a number, or 2^-10 / p where it is subnormal. A row with a NaN or an Inf gets
//   the scale NaN, and its outputs are NaN.
#include "backends/cuda/common/async_copy.cuh"
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

/// One CTA per row.
__global__ void __launch_bounds__(kThreads)
    QuantizeRowsKernel(ActivationView a, bool wide, uint8_t* out, int columns, float* scales) {
  TriggerDependentLaunch();
  const int64_t row = blockIdx.x;
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
  const int exponent = largest < kInf ? ExponentFor(largest) : 0;
  if (threadIdx.x == 0) {
    scales[row] = largest < kInf ? FloatOfExponent(-exponent) : __uint_as_float(0x7fc00000u);
  }
  const float p = FloatOfExponent(exponent);
  auto* to = reinterpret_cast<uint4*>(out + row * columns);
  for (int k = static_cast<int>(threadIdx.x) * kStepK; k < columns; k += kThreads * kStepK) {
    LoadStep(a, row, k, wide, values);  // The row is in the cache by now.
    to[k / kStepK] = QuantizeStep(values, p);
  }
}

}  // namespace

cudaError_t LaunchQuantizeRows(const ActivationView& a, void* out, int columns, float* scales,
                               cudaStream_t stream) {
  const int64_t row_bytes = a.stride * (a.type == Element::kF32 ? 4 : 2);
  const bool wide =
      reinterpret_cast<uintptr_t>(a.data) % 16 == 0 && (a.m == 1 || row_bytes % 16 == 0);
  QuantizeRowsKernel<<<static_cast<unsigned>(a.m), kThreads, 0, stream>>>(
      a, wide, static_cast<uint8_t*>(out), columns, scales);
  return cudaGetLastError();
}

}  // namespace marlin::cuda
