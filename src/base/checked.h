// Integer arithmetic on untrusted sizes: overflow sticks and only Take() yields a number.
#pragma once

#include <cstdint>
#include <optional>

namespace marlin {

/// A non-negative int64 that remembers overflow. There is no implicit conversion to a number, so a
/// size from a file cannot be used before it has been checked.
class Checked {
 public:
  explicit constexpr Checked(int64_t value) : value_(value), valid_(value >= 0) {}
  static constexpr Checked FromUnsigned(uint64_t value) {
    return value > static_cast<uint64_t>(INT64_MAX) ? Invalid()
                                                    : Checked(static_cast<int64_t>(value));
  }
  static constexpr Checked Invalid() { return Checked(-1); }

  friend constexpr Checked operator+(Checked a, Checked b) {
    int64_t sum = 0;
    if (!a.valid_ || !b.valid_ || __builtin_add_overflow(a.value_, b.value_, &sum)) {
      return Invalid();
    }
    return Checked(sum);
  }
  friend constexpr Checked operator-(Checked a, Checked b) {
    if (!a.valid_ || !b.valid_) return Invalid();
    return Checked(a.value_ - b.value_);  // Negative becomes invalid.
  }
  friend constexpr Checked operator*(Checked a, Checked b) {
    int64_t product = 0;
    if (!a.valid_ || !b.valid_ || __builtin_mul_overflow(a.value_, b.value_, &product)) {
      return Invalid();
    }
    return Checked(product);
  }
  /// ceil(a / b); invalid when b is 0.
  friend constexpr Checked CeilDiv(Checked a, Checked b) {
    if (!a.valid_ || !b.valid_ || b.value_ == 0) return Invalid();
    return Checked(a.value_ / b.value_ + (a.value_ % b.value_ != 0 ? 1 : 0));
  }

  constexpr bool valid() const { return valid_; }
  /// The number, or nothing when any step overflowed or went below zero.
  constexpr std::optional<int64_t> Take() const {
    if (!valid_) return std::nullopt;
    return value_;
  }

 private:
  int64_t value_;
  bool valid_;
};

/// ceil(a / b) of trusted numbers. Precondition: a >= 0, b > 0.
constexpr int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }
/// a rounded up to a multiple of b. Precondition: a >= 0, b > 0, no overflow.
constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDivide(a, b) * b; }

}  // namespace marlin
