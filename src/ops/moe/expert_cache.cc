#include "marlin/expert_cache.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <tuple>
#include <utility>

#include "base/internals.h"
#include "base/macros.h"

namespace marlin {
namespace {

std::string NameOf(const ExpertKey& key) {
  return fmt::format("layer {}, expert {}", key.layer, key.expert);
}

int64_t WeightBytes(const Expert& expert) {
  int64_t bytes = 0;
  for (const ExpertMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
    if (matrix->weights.valid()) bytes += matrix->weights.bytes();
  }
  return bytes;
}

/// The entries that can be evicted, the first one first: priority, last use, key.
using Order = std::set<std::tuple<double, int64_t, ExpertKey>>;

struct Entry {
  int64_t bytes = 0;
  bool loaded = false;
  Expert expert;
  int64_t leases = 0;  ///< A load counts as one.
  int64_t pins = 0;
  double priority = 0;
  int64_t last_use = 0;
  Order::node_type place;  ///< While it cannot be evicted.

  bool evictable() const { return leases == 0 && pins == 0; }
};

}  // namespace

struct ExpertCache::State {
  explicit State(ExpertCacheOptions given) : options(given) {
    options.half_life = std::max<int64_t>(options.half_life, 1);
  }

  using Entries = std::map<ExpertKey, Entry>;

  /// Waits for a load by another thread. Returns the entry, or the end for a miss.
  Entries::iterator Find(const ExpertKey& key, std::unique_lock<std::mutex>& lock) {
    auto found = entries.find(key);
    while (found != entries.end() && !found->second.loaded) {
      load_done.wait(lock);
      found = entries.find(key);
    }
    return found;
  }

  /// Evicts entries until `wanted` bytes are free.
  Status MakeRoom(const ExpertKey& key, int64_t wanted) {
    if (wanted < 0 || wanted > options.capacity_bytes) {
      return Status(Code::kInvalidArgument,
                    fmt::format("expert cache: {}: {} bytes, the capacity is {}", NameOf(key),
                                wanted, options.capacity_bytes));
    }
    int64_t kept = 0;
    for (const auto& [_, entry] : entries) kept += entry.evictable() ? 0 : entry.bytes;
    if (wanted > options.capacity_bytes - kept) {
      return Status(Code::kOutOfMemory,
                    fmt::format("expert cache: {}: {} bytes, {} of {} are in use or pinned",
                                NameOf(key), wanted, kept, options.capacity_bytes));
    }
    while (wanted > options.capacity_bytes - statistics.bytes) {
      const auto victim = entries.find(std::get<2>(*order.begin()));
      order.erase(order.begin());
      Erase(victim);
      ++statistics.evictions;
    }
    return {};
  }

  void Erase(Entries::iterator entry) {
    statistics.bytes -= entry->second.bytes;
    --statistics.entries;
    entries.erase(entry);
  }

  /// Counts a use of an entry, which is leased and so not in the order. The frequency of an expert
  /// is the sum of 2^(time / half-life) over its uses, in units of uses: relative to the present,
  /// old uses count less. It is kept as its logarithm, which never overflows.
  void Use(Entry& entry, double& frequency) {
    entry.last_use = ++clock;
    if (options.policy == CachePolicy::kLru) return;
    const double now = static_cast<double>(clock) / static_cast<double>(options.half_life);
    const double more = std::max(frequency, now);
    frequency = more + std::log2(1 + std::exp2(std::min(frequency, now) - more));
    entry.priority = frequency;
  }

  /// Takes an entry out of the order while it is in use, or puts it back, without allocating.
  void Hold(const ExpertKey& key, Entry& entry, int64_t Entry::*count) {
    if (entry.evictable()) entry.place = order.extract({entry.priority, entry.last_use, key});
    ++(entry.*count);
  }
  void Release(const ExpertKey& key, Entry& entry, int64_t Entry::*count) {
    --(entry.*count);
    if (!entry.evictable()) return;
    entry.place.value() = {entry.priority, entry.last_use, key};
    order.insert(std::move(entry.place));
  }

  /// Adds an entry that is to be loaded, with a lease.
  Entries::iterator Reserve(const ExpertKey& key, int64_t bytes) {
    Order one = {{0, 0, key}};
    const auto entry = entries.try_emplace(key).first;
    entry->second.place = one.extract(one.begin());
    entry->second.bytes = bytes;
    entry->second.leases = 1;
    statistics.bytes += bytes;
    ++statistics.entries;
    return entry;
  }

  /// Loads the expert of a reserved entry, or removes the entry.
  Status Load(Entries::iterator entry, const Loader& load, std::unique_lock<std::mutex>& lock) {
    const ExpertKey key = entry->first;
    const int64_t bytes = entry->second.bytes;
    lock.unlock();
    Result<Expert> loaded = load(key);
    lock.lock();
    Status status = loaded.status();
    if (status.ok() && WeightBytes(*loaded) > bytes) {
      status = Status(Code::kInvalidArgument,
                      fmt::format("expert cache: {}: {} bytes of weights, expected at most {}",
                                  NameOf(key), WeightBytes(*loaded), bytes));
    }
    if (status.ok()) {
      entry->second.expert = *std::move(loaded);
      entry->second.loaded = true;
      statistics.loaded_bytes += bytes;
    } else {
      Erase(entry);
    }
    load_done.notify_all();
    return status;
  }

  void ReturnLease(const ExpertKey& key) {
    const std::lock_guard lock(mutex);
    Release(key, entries.find(key)->second, &Entry::leases);
  }

  ExpertCacheOptions options;
  mutable std::mutex mutex;
  std::condition_variable load_done;
  Entries entries;
  Order order;
  ExpertCacheStatistics statistics;
  int64_t clock = 0;
  std::map<ExpertKey, double> frequencies;  ///< By any expert ever used.
};

ExpertCache::ExpertCache(const ExpertCacheOptions& options)
    : state_(std::make_shared<State>(options)) {}

Result<ExpertLease> ExpertCache::Get(const ExpertKey& key, int64_t bytes, const Loader& load) {
  State& state = *state_;
  try {
    std::unique_lock lock(state.mutex);
    constexpr double kNever = -std::numeric_limits<double>::infinity();
    double& frequency = state.frequencies.try_emplace(key, kNever).first->second;
    auto found = state.Find(key, lock);
    if (found != state.entries.end()) {
      ++state.statistics.hits;
      state.Hold(key, found->second, &Entry::leases);
    } else {
      ++state.statistics.misses;
      MARLIN_RETURN_IF_ERROR(state.MakeRoom(key, bytes));
      found = state.Reserve(key, bytes);
      MARLIN_RETURN_IF_ERROR(state.Load(found, load, lock));
    }
    state.Use(found->second, frequency);
    const auto release = [owner = state_, key](const Expert*) { owner->ReturnLease(key); };
    lock.unlock();
    return Internals::Make<ExpertLease>(
        std::shared_ptr<const Expert>(&found->second.expert, release));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "expert cache: cannot allocate");
  }
}

Status ExpertCache::Pin(const ExpertKey& key) {
  std::unique_lock lock(state_->mutex);
  const auto found = state_->Find(key, lock);
  if (found == state_->entries.end()) {
    return Status(Code::kInvalidArgument,
                  fmt::format("expert cache: {}: is not there to be pinned", NameOf(key)));
  }
  state_->Hold(key, found->second, &Entry::pins);
  return {};
}

Status ExpertCache::Unpin(const ExpertKey& key) {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->entries.find(key);
  if (found == state_->entries.end() || found->second.pins == 0) {
    return Status(Code::kInvalidArgument,
                  fmt::format("expert cache: {}: is not pinned", NameOf(key)));
  }
  state_->Release(key, found->second, &Entry::pins);
  return {};
}

ExpertCacheStatistics ExpertCache::statistics() const {
  const std::lock_guard lock(state_->mutex);
  return state_->statistics;
}

}  // namespace marlin
