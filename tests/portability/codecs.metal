// Uses every codec in a kernel-like function, so that its templates and tables are compiled.
#include "formats/codecs.h"

namespace {

template <typename Codec>
float RoundTrip(float x) {
  return Codec::Value(Codec::Encode(x) & (0xffffffffu >> (32 - Codec::kBits)));
}

}  // namespace

float SumOfRoundTrips(float x);
float SumOfRoundTrips(float x) {
  float sum = 0.0f;
#define MARLIN_FORMAT(enumerator, name, codec) sum += RoundTrip<marlin::formats::codec>(x);
#include "marlin/formats.def"
#undef MARLIN_FORMAT
  return sum;
}
