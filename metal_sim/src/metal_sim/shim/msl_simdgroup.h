// Metal's functions of simdgroups and quadgroups: reductions, scans, shuffles and votes over the
// lanes that are active.
//
// Every function publishes the lane's operand and lets the simulator call one function that
// computes the results of all lanes. Reductions and scans go through the lanes in ascending order
// and round every step to the type; Metal leaves the order open. A shuffle from a lane that is not
// active or does not exist is undefined in Metal; here it is a finding, and yields the lane's own
// value. From beyond the end in the direction of a shift it is that value in Metal, too.
#pragma once

#include "metal_sim/shim/msl_kernel.h"
#include "metal_sim/shim/msl_math.h"

namespace metal_sim {

inline constexpr int kSimdgroupLanes = 32;
inline constexpr int kQuadgroupLanes = 4;

/// The data that a lane publishes: its operand, and room for its result.
template <typename In, typename Out>
struct Published {
  In operand;
  Out result;
};

/// The published data of the lanes that meet.
template <typename In, typename Out>
class Lanes {
 public:
  METAL_SIM_INLINE Lanes(void* const* data, uint active) : data_(data), active_(active) {}

  METAL_SIM_INLINE bool IsActive(int lane) const { return (active_ >> lane & 1) != 0; }
  METAL_SIM_INLINE const In& operand(int lane) const { return At(lane)->operand; }
  METAL_SIM_INLINE Out& result(int lane) const { return At(lane)->result; }

 private:
  METAL_SIM_INLINE Published<In, Out>* At(int lane) const {
    return static_cast<Published<In, Out>*>(data_[lane]);
  }

  void* const* data_;
  uint active_;
};

/// A function and no lambda: the conversion of a lambda to a pointer would be instrumented.
template <typename Function, typename Out, typename In>
METAL_SIM_UNINSTRUMENTED void RunForLanes(void* const* data, uint32_t active, void*) {
  Function::Run(Lanes<In, Out>(data, active));
}

/// The result for this lane of Function::Run(lanes), which sees all active ones.
template <typename Function, typename Out, typename In>
METAL_SIM_INLINE Out Meet(const In& operand, const char* name, const void* site) {
  Published<In, Out> published{operand, Out()};
  attached_runtime->collective(&published, RunForLanes<Function, Out, In>, nullptr, name,
                               /*whole=*/false, site);
  return published.result;
}

template <typename T>
concept SimdOperand = Operand<T> &&
    (!std::is_same_v<Element<T>, bool>)&&(__METAL_VERSION__ >= 310 ||
                                          !std::is_same_v<Element<T>, bfloat>);

struct Sum {
  static constexpr int kIdentity = 0;
  template <typename T>
  METAL_SIM_INLINE static T Apply(const T& a, const T& b) {
    return static_cast<T>(a + b);
  }
};
struct Multiplication {
  static constexpr int kIdentity = 1;
  template <typename T>
  METAL_SIM_INLINE static T Apply(const T& a, const T& b) {
    return static_cast<T>(a * b);
  }
};
struct Smallest {
  template <typename T>
  METAL_SIM_INLINE static T Apply(const T& a, const T& b) {
    return metal::min(a, b);
  }
};
struct Largest {
  template <typename T>
  METAL_SIM_INLINE static T Apply(const T& a, const T& b) {
    return metal::max(a, b);
  }
};
struct And {
  template <typename T>
  METAL_SIM_INLINE static T Apply(const T& a, const T& b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <typename T>
  METAL_SIM_INLINE static T Apply(const T& a, const T& b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <typename T>
  METAL_SIM_INLINE static T Apply(const T& a, const T& b) {
    return static_cast<T>(a ^ b);
  }
};

/// All active lanes of each group of kWidth get the reduction of their operands.
template <typename Operation, int kWidth>
struct Reduction {
  template <typename T>
  METAL_SIM_INLINE static void Run(const Lanes<T, T>& lanes) {
    for (int base = 0; base < kSimdgroupLanes; base += kWidth) {
      T total{};
      bool first = true;
      for (int lane = base; lane < base + kWidth; ++lane) {
        if (!lanes.IsActive(lane)) continue;
        total = first ? lanes.operand(lane) : Operation::Apply(total, lanes.operand(lane));
        first = false;
      }
      for (int lane = base; lane < base + kWidth; ++lane) {
        if (lanes.IsActive(lane)) lanes.result(lane) = total;
      }
    }
  }
};

/// Every active lane gets the reduction of those before it, and its own if inclusive.
template <typename Operation, bool kInclusive, int kWidth>
struct Scan {
  template <typename T>
  METAL_SIM_INLINE static void Run(const Lanes<T, T>& lanes) {
    T total{};
    for (int lane = 0; lane < kSimdgroupLanes; ++lane) {
      if (lane % kWidth == 0) total = T(static_cast<Element<T>>(Operation::kIdentity));
      if (!lanes.IsActive(lane)) continue;
      const T before = total;
      total = Operation::Apply(total, lanes.operand(lane));
      lanes.result(lane) = kInclusive ? total : before;
    }
  }
};

template <typename T>
struct ShuffleOperand {
  T data;
  int argument;
};

// Where a lane's result comes from, within its group of kWidth.
struct FromLane {
  static constexpr bool kKeepsBeyond = false;
  METAL_SIM_INLINE static int Source(int, int argument, int) { return argument; }
};
struct FromXor {
  static constexpr bool kKeepsBeyond = false;
  METAL_SIM_INLINE static int Source(int lane, int argument, int) { return lane ^ argument; }
};
struct FromAbove {
  static constexpr bool kKeepsBeyond = true;
  METAL_SIM_INLINE static int Source(int lane, int argument, int) { return lane + argument; }
};
struct FromBelow {
  static constexpr bool kKeepsBeyond = true;
  METAL_SIM_INLINE static int Source(int lane, int argument, int) { return lane - argument; }
};
struct FromAboveRound {
  static constexpr bool kKeepsBeyond = false;
  METAL_SIM_INLINE static int Source(int lane, int argument, int width) {
    return (lane + argument) & (width - 1);
  }
};
struct FromBelowRound {
  static constexpr bool kKeepsBeyond = false;
  METAL_SIM_INLINE static int Source(int lane, int argument, int width) {
    return (lane - argument) & (width - 1);
  }
};

template <typename Rule, int kWidth>
struct Shuffle {
  template <typename T>
  METAL_SIM_INLINE static void Run(const Lanes<ShuffleOperand<T>, T>& lanes) {
    for (int lane = 0; lane < kSimdgroupLanes; ++lane) {
      if (!lanes.IsActive(lane)) continue;
      const ShuffleOperand<T>& own = lanes.operand(lane);
      const int source = Rule::Source(lane % kWidth, own.argument, kWidth);
      const int absolute = lane - lane % kWidth + source;
      const bool inside = source >= 0 && source < kWidth;
      const bool exists = inside && lanes.IsActive(absolute);
      lanes.result(lane) = exists ? lanes.operand(absolute).data : own.data;
      if (!exists && (inside || !Rule::kKeepsBeyond)) {
        attached_runtime->undefined(inside ? "a lane takes from one that is not active"
                                           : "a lane takes from one that does not exist");
      }
    }
  }
};

template <typename T>
struct FillOperand {
  T data;
  T filling;
  int delta;
  int modulo;
};

/// Shuffles within groups of `modulo` lanes; lanes from beyond a group take the filling data at
/// the other end of it.
template <typename Rule, int kWidth>
struct ShuffleAndFill {
  template <typename T>
  METAL_SIM_INLINE static void Run(const Lanes<FillOperand<T>, T>& lanes) {
    for (int lane = 0; lane < kSimdgroupLanes; ++lane) {
      if (!lanes.IsActive(lane)) continue;
      const FillOperand<T>& own = lanes.operand(lane);
      const int within = lane & (own.modulo - 1);
      const int source = Rule::Source(within, own.delta, own.modulo);
      const int absolute = lane - within + (source & (own.modulo - 1));
      if (!lanes.IsActive(absolute)) {
        attached_runtime->undefined("a lane takes from one that is not active");
      }
      const FillOperand<T>& from = lanes.operand(lanes.IsActive(absolute) ? absolute : lane);
      lanes.result(lane) = source >= 0 && source < own.modulo ? from.data : from.filling;
    }
  }
};

/// The operand of the first active lane of each group of kWidth.
template <int kWidth>
struct BroadcastFirst {
  template <typename T>
  METAL_SIM_INLINE static void Run(const Lanes<T, T>& lanes) {
    int first = 0;
    for (int lane = 0; lane < kSimdgroupLanes; ++lane) {
      if (lane % kWidth == 0) first = -1;
      if (!lanes.IsActive(lane)) continue;
      if (first < 0) first = lane;
      lanes.result(lane) = lanes.operand(first);
    }
  }
};

struct Ballot {
  /// The result for every lane: the active lanes, and which of them vote for.
  struct Votes {
    uint active;
    uint votes;
  };
  METAL_SIM_INLINE static void Run(const Lanes<bool, Votes>& lanes) {
    Votes all{0, 0};
    for (int lane = 0; lane < kSimdgroupLanes; ++lane) {
      if (!lanes.IsActive(lane)) continue;
      all.active |= 1u << lane;
      if (lanes.operand(lane)) all.votes |= 1u << lane;
    }
    for (int lane = 0; lane < kSimdgroupLanes; ++lane) {
      if (lanes.IsActive(lane)) lanes.result(lane) = all;
    }
  }
};

METAL_SIM_UNINSTRUMENTED inline uint CurrentLane() { return attached_runtime->lane(); }

/// The four bits of a mask of lanes that belong to the quadgroup of the current lane.
METAL_SIM_INLINE uint OwnQuad(uint lanes) { return lanes >> (CurrentLane() & ~3u) & 0xfu; }

METAL_SIM_INLINE Ballot::Votes Vote(bool own, const char* name, const void* site) {
  return Meet<Ballot, Ballot::Votes>(own, name, site);
}

/// A bit for every lane of a group, all of which are set in `kAll`.
template <typename Votes, Votes kAll>
class LaneVotes {
 public:
  using vote_t = Votes;
  METAL_SIM_INLINE explicit constexpr LaneVotes(Votes votes = 0) : votes_(votes) {}
  METAL_SIM_INLINE explicit constexpr operator Votes() const { return votes_; }
  METAL_SIM_INLINE constexpr bool all() const { return votes_ == kAll; }
  METAL_SIM_INLINE constexpr bool any() const { return votes_ != 0; }

 private:
  Votes votes_;
};

}  // namespace metal_sim

namespace metal_sim_program::metal {

using simd_vote = metal_sim::LaneVotes<ulong, 0xffffffffu>;
using quad_vote = metal_sim::LaneVotes<uint, 0xfu>;

// Operands are taken by value: they are read where the kernel calls, under the kernel's checks.
#define METAL_SIM_COLLECTIVE(NAME, ...)                                                  \
  template <metal_sim::SimdOperand A>                                                    \
  METAL_SIM_CONVERGENT metal_sim::CommonType<A> NAME(A data) {                           \
    using T = metal_sim::CommonType<A>;                                                  \
    return metal_sim::Meet<__VA_ARGS__, T>(static_cast<T>(data), #NAME, METAL_SIM_SITE); \
  }
#define METAL_SIM_SHUFFLE(NAME, RULE, WIDTH)                                    \
  template <metal_sim::SimdOperand A>                                           \
  METAL_SIM_CONVERGENT metal_sim::CommonType<A> NAME(A data, ushort argument) { \
    using T = metal_sim::CommonType<A>;                                         \
    const metal_sim::ShuffleOperand<T> operand{static_cast<T>(data), argument}; \
    using Function = metal_sim::Shuffle<metal_sim::RULE, WIDTH>;                \
    return metal_sim::Meet<Function, T>(operand, #NAME, METAL_SIM_SITE);        \
  }
#define METAL_SIM_SHUFFLE_AND_FILL(NAME, RULE, WIDTH)                                             \
  template <metal_sim::SimdOperand A>                                                             \
  METAL_SIM_CONVERGENT metal_sim::CommonType<A> NAME(A data, std::type_identity_t<A> filling,     \
                                                     ushort delta, ushort modulo = WIDTH) {       \
    using T = metal_sim::CommonType<A>;                                                           \
    const metal_sim::FillOperand<T> operand{static_cast<T>(data), static_cast<T>(filling), delta, \
                                            modulo};                                              \
    using Function = metal_sim::ShuffleAndFill<metal_sim::RULE, WIDTH>;                           \
    return metal_sim::Meet<Function, T>(operand, #NAME, METAL_SIM_SITE);                          \
  }
#define METAL_SIM_GROUP(PREFIX, WIDTH)                                                           \
  METAL_SIM_COLLECTIVE(PREFIX##_sum, metal_sim::Reduction<metal_sim::Sum, WIDTH>)                \
  METAL_SIM_COLLECTIVE(PREFIX##_product, metal_sim::Reduction<metal_sim::Multiplication, WIDTH>) \
  METAL_SIM_COLLECTIVE(PREFIX##_min, metal_sim::Reduction<metal_sim::Smallest, WIDTH>)           \
  METAL_SIM_COLLECTIVE(PREFIX##_max, metal_sim::Reduction<metal_sim::Largest, WIDTH>)            \
  METAL_SIM_COLLECTIVE(PREFIX##_and, metal_sim::Reduction<metal_sim::And, WIDTH>)                \
  METAL_SIM_COLLECTIVE(PREFIX##_or, metal_sim::Reduction<metal_sim::Or, WIDTH>)                  \
  METAL_SIM_COLLECTIVE(PREFIX##_xor, metal_sim::Reduction<metal_sim::Xor, WIDTH>)                \
  METAL_SIM_COLLECTIVE(PREFIX##_prefix_inclusive_sum,                                            \
                       metal_sim::Scan<metal_sim::Sum, true, WIDTH>)                             \
  METAL_SIM_COLLECTIVE(PREFIX##_prefix_exclusive_sum,                                            \
                       metal_sim::Scan<metal_sim::Sum, false, WIDTH>)                            \
  METAL_SIM_COLLECTIVE(PREFIX##_prefix_inclusive_product,                                        \
                       metal_sim::Scan<metal_sim::Multiplication, true, WIDTH>)                  \
  METAL_SIM_COLLECTIVE(PREFIX##_prefix_exclusive_product,                                        \
                       metal_sim::Scan<metal_sim::Multiplication, false, WIDTH>)                 \
  METAL_SIM_COLLECTIVE(PREFIX##_broadcast_first, metal_sim::BroadcastFirst<WIDTH>)               \
  METAL_SIM_SHUFFLE(PREFIX##_broadcast, FromLane, WIDTH)                                         \
  METAL_SIM_SHUFFLE(PREFIX##_shuffle, FromLane, WIDTH)                                           \
  METAL_SIM_SHUFFLE(PREFIX##_shuffle_xor, FromXor, WIDTH)                                        \
  METAL_SIM_SHUFFLE(PREFIX##_shuffle_down, FromAbove, WIDTH)                                     \
  METAL_SIM_SHUFFLE(PREFIX##_shuffle_up, FromBelow, WIDTH)                                       \
  METAL_SIM_SHUFFLE(PREFIX##_shuffle_rotate_down, FromAboveRound, WIDTH)                         \
  METAL_SIM_SHUFFLE(PREFIX##_shuffle_rotate_up, FromBelowRound, WIDTH)                           \
  METAL_SIM_SHUFFLE_AND_FILL(PREFIX##_shuffle_and_fill_down, FromAbove, WIDTH)                   \
  METAL_SIM_SHUFFLE_AND_FILL(PREFIX##_shuffle_and_fill_up, FromBelow, WIDTH)

METAL_SIM_GROUP(simd, metal_sim::kSimdgroupLanes)
METAL_SIM_GROUP(quad, metal_sim::kQuadgroupLanes)

#undef METAL_SIM_GROUP
#undef METAL_SIM_SHUFFLE_AND_FILL
#undef METAL_SIM_SHUFFLE
#undef METAL_SIM_COLLECTIVE

METAL_SIM_CONVERGENT inline simd_vote simd_ballot(bool expression) {
  return simd_vote(metal_sim::Vote(expression, "simd_ballot", METAL_SIM_SITE).votes);
}
METAL_SIM_CONVERGENT inline simd_vote simd_active_threads_mask() {
  return simd_vote(metal_sim::Vote(true, "simd_active_threads_mask", METAL_SIM_SITE).active);
}
METAL_SIM_CONVERGENT inline bool simd_all(bool expression) {
  const auto votes = metal_sim::Vote(expression, "simd_all", METAL_SIM_SITE);
  return votes.votes == votes.active;
}
METAL_SIM_CONVERGENT inline bool simd_any(bool expression) {
  return metal_sim::Vote(expression, "simd_any", METAL_SIM_SITE).votes != 0;
}
METAL_SIM_CONVERGENT inline bool simd_is_first() {
  const uint active = metal_sim::Vote(true, "simd_is_first", METAL_SIM_SITE).active;
  return metal_sim::CurrentLane() == static_cast<uint>(__builtin_ctz(active));
}

METAL_SIM_CONVERGENT inline quad_vote quad_ballot(bool expression) {
  const auto votes = metal_sim::Vote(expression, "quad_ballot", METAL_SIM_SITE);
  return quad_vote(metal_sim::OwnQuad(votes.votes));
}
METAL_SIM_CONVERGENT inline quad_vote quad_active_threads_mask() {
  const auto votes = metal_sim::Vote(true, "quad_active_threads_mask", METAL_SIM_SITE);
  return quad_vote(metal_sim::OwnQuad(votes.active));
}
METAL_SIM_CONVERGENT inline bool quad_all(bool expression) {
  const auto votes = metal_sim::Vote(expression, "quad_all", METAL_SIM_SITE);
  return metal_sim::OwnQuad(votes.votes) == metal_sim::OwnQuad(votes.active);
}
METAL_SIM_CONVERGENT inline bool quad_any(bool expression) {
  const auto votes = metal_sim::Vote(expression, "quad_any", METAL_SIM_SITE);
  return metal_sim::OwnQuad(votes.votes) != 0;
}
METAL_SIM_CONVERGENT inline bool quad_is_first() {
  const uint active =
      metal_sim::OwnQuad(metal_sim::Vote(true, "quad_is_first", METAL_SIM_SITE).active);
  return (metal_sim::CurrentLane() & 3) == static_cast<uint>(__builtin_ctz(active));
}

}  // namespace metal_sim_program::metal
