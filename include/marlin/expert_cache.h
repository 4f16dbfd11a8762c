// A bounded cache of the weights of experts, for models whose experts do not fit in a device's
// memory, or whose decoded weights do not.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "marlin/moe.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// An expert of a model.
struct ExpertKey {
  int64_t layer = 0;
  int64_t expert = 0;

  friend auto operator<=>(const ExpertKey&, const ExpertKey&) = default;
};

/// Which expert makes room for another.
enum class CachePolicy : uint8_t {
  kLru,        ///< The least recently used one.
  kFrequency,  ///< The one used least often, evicted experts' uses included; old uses count less.
};

struct ExpertCacheOptions {
  int64_t capacity_bytes = int64_t{512} << 20;  ///< Bound on the memory of all entries.
  CachePolicy policy = CachePolicy::kLru;
  /// kFrequency: the number of uses, of any expert, after which a use counts half; 1 or more.
  int64_t half_life = int64_t{1} << 18;
};

/// Counts since the cache was made, and its present contents.
struct ExpertCacheStatistics {
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t evictions = 0;
  int64_t loaded_bytes = 0;  ///< By all misses.
  int64_t entries = 0;
  int64_t bytes = 0;  ///< The entries' sum.
};

/// An entry of an ExpertCache in use: it stays there as long as the lease lives, which may be
/// longer than the cache's handle. Movable, not copyable.
class ExpertLease {
 public:
  ExpertLease() = default;
  ExpertLease(ExpertLease&& other) noexcept : release_(std::move(other.release_)) {}
  ExpertLease& operator=(ExpertLease&& other) noexcept {
    release_ = std::move(other.release_);
    return *this;
  }

  /// The cached expert. Precondition: a lease that Get returned and that was not moved from.
  const Expert& expert() const { return *release_; }

 private:
  friend struct Internals;
  explicit ExpertLease(std::shared_ptr<const Expert> release) : release_(std::move(release)) {}
  std::shared_ptr<const Expert> release_;  ///< Its deleter returns the entry.
};

/// Keeps the experts that were used lately or often in memory of bounded size. Nothing in the
/// library uses one unless a caller makes it. All functions are thread-safe.
class ExpertCache {
 public:
  /// Prepares an expert, in any form that its user can run: quantized or decoded weights. Called
  /// without a lock; must not throw, nor use the cache.
  using Loader = std::function<Result<Expert>(const ExpertKey&)>;

  explicit ExpertCache(const ExpertCacheOptions& options = {});

  /// The expert, from memory or loaded. A miss first makes room for `bytes`, the size of the
  /// expert's prepared weights, so that entries never exceed the capacity; threads that miss the
  /// same expert load it once. Entries with leases or pins stay. Errors: kInvalidArgument for an
  /// expert larger than the capacity (naming both), or larger than `bytes`; kOutOfMemory if too
  /// many entries are leased or pinned; `load`'s own, after which the expert is not there.
  Result<ExpertLease> Get(const ExpertKey& key, int64_t bytes, const Loader& load);

  /// Keeps an expert that is there until it is unpinned as often. Errors: kInvalidArgument if it is
  /// not there.
  Status Pin(const ExpertKey& key);
  /// Errors: kInvalidArgument if the expert is not pinned.
  Status Unpin(const ExpertKey& key);

  ExpertCacheStatistics statistics() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  ///< Leases keep it.
};

}  // namespace marlin
#pragma GCC visibility pop
