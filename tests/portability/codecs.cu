// Uses every codec in device and in host code.
#include "formats/codecs.h"

namespace {

template <typename Codec>
__host__ __device__ float RoundTrip(float x) {
  return Codec::Value(Codec::Encode(x) & (0xffffffffu >> (32 - Codec::kBits)));
}

__host__ __device__ float SumOfRoundTrips(float x) {
  float sum = 0.0f;
#define MARLIN_FORMAT(enumerator, name, codec) sum += RoundTrip<marlin::formats::codec>(x);
#include "marlin/formats.def"
#undef MARLIN_FORMAT
  return sum;
}

}  // namespace

__global__ void RoundTripKernel(const float* in, float* out, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) out[i] = SumOfRoundTrips(in[i]);
}

float RoundTripOnHost(float x) { return SumOfRoundTrips(x); }
