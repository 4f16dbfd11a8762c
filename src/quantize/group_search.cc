#include "quantize/group_search.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace marlin {
namespace {

/// An integer with the float's ordering, so that min and max vectorize without NaN rules.
int32_t OrderKey(float x) {
  const auto bits = std::bit_cast<int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
float FromOrderKey(int32_t key) { return std::bit_cast<float>(key ^ ((key >> 31) & 0x7fffffff)); }

/// Keeps the best candidate so far.
class Best {
 public:
  Best(const GroupContext& context, const float* w, const float* importance, int64_t count)
      : context_(context), w_(w), importance_(importance), count_(count) {}

  /// Tries round-to-nearest's parameters for a range; true when they become the best.
  bool Try(const GroupRange& range) { return Try(context_.rule.Choose(range, context_.coder)); }
  bool Try(const GroupParameters& candidate) {
    if (candidate.scale.overflow || candidate.scale.value == 0.0f) return false;
    const bool seen = candidate.scale.bits == last_.scale.bits && candidate.zero == last_.zero;
    if (seen && tried_) return false;
    last_ = candidate;
    const double limit = tried_ ? error_ : std::numeric_limits<double>::infinity();
    const double error = context_.encoder.SquaredError(
        w_, importance_, count_, candidate.scale.value, candidate.zero, limit);
    const bool better = !tried_ || error < error_;
    tried_ = true;
    if (!better) return false;
    best_ = candidate;
    error_ = error;
    return true;
  }
  const GroupParameters& parameters() const { return best_; }

 private:
  const GroupContext& context_;
  const float* w_;
  const float* importance_;  ///< Null: all weights are equally important.
  int64_t count_;
  bool tried_ = false;
  double error_ = 0;
  GroupParameters best_;
  GroupParameters last_;
};

/// Tries all E4M3 scales up to `reach` codes from the given one.
void TryNearbyCodes(const GroupContext& context, const GroupParameters& around, int reach,
                    Best& best) {
  constexpr int kLargestCode = 0x7e;  // 448; 0x7f is NaN.
  const auto nominal = static_cast<int>(around.scale.bits);
  const int last = std::min(nominal + reach, kLargestCode);
  for (int code = std::max(nominal - reach, 1); code <= last; ++code) {
    GroupParameters candidate = around;
    candidate.scale = context.coder.Decode(static_cast<uint32_t>(code));
    best.Try(candidate);
  }
}

constexpr float kNearby[] = {0.02f, -0.02f, 0.04f, -0.04f};  ///< Around the best factor.

GroupRange Scaled(const GroupRange& range, float low, float high) {
  return {range.amax * high, range.low * low, range.high * high};
}

/// Tries the range scaled by `center` + each offset; returns the best factor so far.
template <size_t kCount>
float TryFactors(const GroupRange& range, float center, const float (&offsets)[kCount],
                 float best_factor, Best& best) {
  for (const float offset : offsets) {
    const float factor = center + offset;
    if (best.Try(Scaled(range, factor, factor))) best_factor = factor;
  }
  return best_factor;
}

/// Whether negative scales can be better: of most groups the largest weight has one sign only,
/// which the side of the table with the larger value then gets.
bool TriesNegative(const GroupContext& context) {
  return !context.affine && context.encoder.mirrors();
}

/// A range whose scale is negative, and has the largest weight at the table's far end.
GroupRange Mirrored(const GroupContext& context, const GroupRange& range) {
  const Encoder& encoder = context.encoder;
  return Scaled(range, 1.0f,
                -encoder.levels() / std::max(-encoder.min_value(), encoder.max_value()));
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
                          int64_t count) {
  const GroupParameters start = context.rule.Choose(range, context.coder);
  if (start.scale.overflow || start.scale.value == 0.0f) return start;
  Best best(context, w, nullptr, count);
  best.Try(range);
  if (context.coder.type() == ScaleType::kE8M0) {
    TryFactors(range, 0.0f, {0.5f, 2.0f}, 1.0f, best);
    return best.parameters();
  }
  if (context.coder.type() == ScaleType::kE4M3 && !context.affine) {
    TryNearbyCodes(context, start, 8, best);
    return best.parameters();
  }
  float factor = TryFactors(
      range, 1.0f, {0.06f, -0.06f, -0.12f, -0.18f, -0.24f, -0.30f, -0.36f, -0.42f, -0.48f, -0.54f},
      1.0f, best);
  factor = TryFactors(range, factor, kNearby, factor, best);
  if (TriesNegative(context)) {
    const GroupRange mirrored = Mirrored(context, range);
    const float other = TryFactors(
        mirrored, 1.0f, {0.0f, -0.06f, -0.12f, -0.18f, -0.24f, -0.30f, -0.36f, -0.42f, -0.48f},
        0.0f, best);
    if (other != 0.0f) TryFactors(mirrored, other, kNearby, other, best);
  }
  if (!context.affine) return best.parameters();
  const GroupRange shrunk = Scaled(range, factor, factor);
  for (const float side : {1.1f, 0.9f, 0.8f}) {
    best.Try(Scaled(shrunk, side, 1.0f));
    best.Try(Scaled(shrunk, 1.0f, side));
  }
  return best.parameters();
}

GroupParameters SearchWeighted(const GroupContext& context, const GroupRange& range, const float* w,
                               const float* importance, int64_t count) {
  const GroupParameters start = context.rule.Choose(range, context.coder);
  if (start.scale.overflow || start.scale.value == 0.0f) return start;
  Best best(context, w, importance, count);
  best.Try(range);
  if (context.coder.type() == ScaleType::kE8M0) {
    TryFactors(range, 0.0f, {0.25f, 0.5f, 2.0f}, 1.0f, best);
    return best.parameters();
  }
  if (context.coder.type() == ScaleType::kE4M3 && !context.affine) {
    TryNearbyCodes(context, start, 8, best);
    return best.parameters();
  }
  // Clipping most of the range pays only for few levels.
  const bool coarse = context.encoder.values().size() <= 8;
  const float first = coarse ? 0.30f : 0.52f;
  const float step = coarse ? 0.04f : 0.03f;
  constexpr int kFactors = 20;
  for (int i = 0; i <= kFactors; ++i) {
    const float factor = first + step * static_cast<float>(i);
    best.Try(Scaled(range, factor, factor));
    if (TriesNegative(context)) best.Try(Scaled(Mirrored(context, range), factor, factor));
  }
  if (!context.affine) return best.parameters();
  for (int low = 1; low <= kFactors; low += 2) {
    for (int high = 1; high <= kFactors; high += 2) {
      if (low == high) continue;
      best.Try(Scaled(range, first + step * static_cast<float>(low),
                      first + step * static_cast<float>(high)));
    }
  }
  return best.parameters();
}

}  // namespace marlin
