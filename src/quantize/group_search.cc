#include "quantize/group_search.h"

#include <algorithm>
#include <bit>

namespace marlin {
namespace {

/// An integer that orders as the float does, so that extremes vectorise without NaN rules.
int32_t OrderKey(float x) {
  const auto bits = std::bit_cast<int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
float FromOrderKey(int32_t key) { return std::bit_cast<float>(key ^ ((key >> 31) & 0x7fffffff)); }

/// Squared error of a group under given parameters, in double and in a fixed order.
double SquaredError(const GroupContext& context, const GroupParameters& parameters, const float* w,
                    int64_t count, uint8_t* codes) {
  const float scale = parameters.scale.value;
  context.encoder.Encode(w, count, scale, parameters.zero, codes);
  const float* values = context.encoder.values().data();
  constexpr int64_t kLanes = 8;
  double sums[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) {
    const float error = w[i] - scale * (values[codes[i]] - parameters.zero);
    sums[i % kLanes] += static_cast<double>(error) * static_cast<double>(error);
  }
  double sum = 0;
  for (double lane : sums) sum += lane;
  return sum;
}

/// Keeps the best candidate so far.
class Best {
 public:
  Best(const GroupContext& context, const float* w, int64_t count, uint8_t* codes)
      : context_(context), w_(w), count_(count), codes_(codes) {}

  void Try(const GroupParameters& candidate) {
    if (candidate.scale.overflow || candidate.scale.value == 0.0f) return;
    const bool seen = candidate.scale.bits == last_.scale.bits && candidate.zero == last_.zero;
    if (seen && tried_) return;
    last_ = candidate;
    const double error = SquaredError(context_, candidate, w_, count_, codes_);
    if (!tried_ || error < error_) {
      best_ = candidate;
      error_ = error;
    }
    tried_ = true;
  }
  const GroupParameters& best() const { return best_; }

 private:
  const GroupContext& context_;
  const float* w_;
  int64_t count_;
  uint8_t* codes_;
  bool tried_ = false;
  double error_ = 0;
  GroupParameters best_;
  GroupParameters last_;
};

constexpr int kShrinkSteps = 28;
constexpr float kShrinkStep = 0.02f;

GroupRange Scaled(const GroupRange& range, float low, float high) {
  return {range.amax * high, range.low * low, range.high * high};
}

}  // namespace

uint32_t MaxMagnitudeBits(const float* w, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = std::bit_cast<int32_t>(w[i]) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<uint32_t>(largest);
}

GroupRange RangeOf(const float* w, int64_t count, bool affine) {
  GroupRange range;
  range.amax = std::bit_cast<float>(MaxMagnitudeBits(w, count));
  if (!affine) return range;
  int32_t low = 0;
  int32_t high = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t key = OrderKey(w[i]);
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  range.low = FromOrderKey(low) + 0.0f;  // + 0 turns -0 into 0.
  range.high = FromOrderKey(high);
  return range;
}

GroupParameters SearchMse(const GroupContext& context, const GroupRange& range, const float* w,
                          int64_t count, uint8_t* codes) {
  const GroupParameters start = context.rule.Choose(range, context.coder);
  if (start.scale.overflow || start.scale.value == 0.0f) return start;
  Best best(context, w, count, codes);
  best.Try(start);
  if (context.coder.type() == ScaleType::kE8M0) {
    for (const float factor : {0.5f, 2.0f}) {
      best.Try(context.rule.Choose(Scaled(range, factor, factor), context.coder));
    }
    return best.best();
  }
  for (const float factor : {1.08f, 1.04f}) {
    best.Try(context.rule.Choose(Scaled(range, factor, factor), context.coder));
  }
  for (int i = 1; i <= kShrinkSteps; ++i) {
    const float factor = 1.0f - kShrinkStep * static_cast<float>(i);
    best.Try(context.rule.Choose(Scaled(range, factor, factor), context.coder));
    if (!context.affine) continue;
    best.Try(context.rule.Choose(Scaled(range, factor, 1.0f), context.coder));
    best.Try(context.rule.Choose(Scaled(range, 1.0f, factor), context.coder));
  }
  return best.best();
}

}  // namespace marlin
