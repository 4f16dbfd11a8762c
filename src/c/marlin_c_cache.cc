// The cache of experts of the C API.
#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include "c/handles.h"
#include "marlin/expert_cache.h"

struct marlin_expert_cache {
  marlin::ExpertCache cache;
};
/// The target of a loader.
struct marlin_loaded_expert {
  marlin::Expert expert;
  bool set = false;
};

/// The leased expert with handles of its own, which `expert` points to.
struct marlin_expert_lease {
  explicit marlin_expert_lease(marlin::ExpertLease given) : lease(std::move(given)) {
    const marlin::Expert& held = lease.expert();
    expert.gate = Describe(held.gate, 0);
    expert.up = Describe(held.up, 1);
    expert.down = Describe(held.down, 2);
  }
  marlin_expert_lease(const marlin_expert_lease&) = delete;
  marlin_expert_lease& operator=(const marlin_expert_lease&) = delete;

  marlin_expert_matrix Describe(const marlin::ExpertMatrix& matrix, int i) {
    if (!matrix.weights.valid()) return {nullptr, 0, nullptr};
    weights[i].weights = matrix.weights;
    if (matrix.bias.empty()) return {&weights[i], matrix.index, nullptr};
    marlin_tensor& bias = biases[i];
    bias = MARLIN_TENSOR_INIT;
    // A view for reading: no function of the API writes a bias.
    bias.data = const_cast<void*>(matrix.bias.data());
    bias.dtype = static_cast<int32_t>(matrix.bias.dtype());
    bias.rank = 1;
    bias.shape[0] = matrix.bias.dim(0);
    return {&weights[i], matrix.index, &bias};
  }

  marlin::ExpertLease lease;
  marlin_prepared weights[3];
  marlin_tensor biases[3];
  marlin_expert expert;
};

namespace marlin {
namespace {

static_assert(static_cast<int>(CachePolicy::kLru) == MARLIN_CACHE_LRU &&
              static_cast<int>(CachePolicy::kFrequency) == MARLIN_CACHE_FREQUENCY);

Result<ExpertCacheOptions> OptionsOf(const marlin_expert_cache_options* given) {
  if (given == nullptr) return ExpertCacheOptions();
  marlin_expert_cache_options read = MARLIN_EXPERT_CACHE_OPTIONS_INIT;
  MARLIN_RETURN_IF_ERROR(Read(given, "options", &read));
  if (read.capacity_bytes < 0) {
    return Invalid("capacity_bytes: expected 0 or more, got " +
                   std::to_string(read.capacity_bytes));
  }
  if (read.half_life < 1) {
    return Invalid("half_life: expected 1 or more, got " + std::to_string(read.half_life));
  }
  if (read.policy != MARLIN_CACHE_LRU && read.policy != MARLIN_CACHE_FREQUENCY) {
    return Invalid("policy: unknown number " + std::to_string(read.policy));
  }
  return ExpertCacheOptions{read.capacity_bytes, static_cast<CachePolicy>(read.policy),
                            read.half_life};
}

/// Calls a caller's loader.
Result<Expert> CallLoader(marlin_expert_loader load, void* context, const ExpertKey& key) {
  // An older message would be taken for the loader's.
  const std::string earlier = std::exchange(LastError(), {});
  marlin_loaded_expert loaded;
  const marlin_code code = load(context, key.layer, key.expert, &loaded);
  const std::string what =
      "load: layer " + std::to_string(key.layer) + ", expert " + std::to_string(key.expert) + ": ";
  if (code == MARLIN_OK) {
    LastError() = earlier;
    if (!loaded.set) return Invalid(what + "MARLIN_OK without marlin_loaded_expert_set");
    return std::move(loaded.expert);
  }
  if (code < MARLIN_OK || code > MARLIN_INTERNAL) {
    return Invalid(what + "unknown code " + std::to_string(static_cast<int>(code)));
  }
  const std::string& message = LastError();
  return Status(
      static_cast<Code>(code),
      what + (message.empty() ? "code " + std::to_string(static_cast<int>(code)) : message));
}

/// The same without an exception, which would leave the cache waiting for the entry.
Result<Expert> Load(marlin_expert_loader load, void* context, const ExpertKey& key) {
  try {
    return CallLoader(load, context, key);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "cannot allocate");
  }
}

}  // namespace
}  // namespace marlin

using namespace marlin;  // NOLINT(google-build-using-namespace): the functions below are C's.

marlin_code marlin_expert_cache_create(const marlin_expert_cache_options* options,
                                       marlin_expert_cache** cache) {
  if (cache != nullptr) *cache = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(cache);
    MARLIN_ASSIGN_OR_RETURN(const ExpertCacheOptions read, OptionsOf(options));
    *cache = new marlin_expert_cache{ExpertCache(read)};
    return {};
  });
}

void marlin_expert_cache_destroy(marlin_expert_cache* cache) { delete cache; }

marlin_code marlin_loaded_expert_set(marlin_loaded_expert* loaded, const marlin_expert* expert) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(loaded);
    MARLIN_NEED(expert);
    Expert read;
    MARLIN_RETURN_IF_ERROR(ReadExpert(*expert, "expert", &read));
    loaded->expert = std::move(read);
    loaded->set = true;
    return {};
  });
}

marlin_code marlin_expert_cache_get(marlin_expert_cache* cache, int64_t layer, int64_t expert,
                                    int64_t bytes, marlin_expert_loader load, void* context,
                                    marlin_expert_lease** lease) {
  if (lease != nullptr) *lease = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(cache);
    if (load == nullptr) return Invalid("load: NULL");
    MARLIN_NEED(lease);
    Result<ExpertLease> held = cache->cache.Get(
        {layer, expert}, bytes, [&](const ExpertKey& key) { return Load(load, context, key); });
    if (!held.ok()) return held.status();
    *lease = new marlin_expert_lease(*std::move(held));
    return {};
  });
}

const marlin_expert* marlin_expert_lease_expert(const marlin_expert_lease* lease) {
  return lease == nullptr ? nullptr : &lease->expert;
}

void marlin_expert_lease_destroy(marlin_expert_lease* lease) { delete lease; }

marlin_code marlin_expert_cache_pin(marlin_expert_cache* cache, int64_t layer, int64_t expert) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(cache);
    return cache->cache.Pin({layer, expert});
  });
}

marlin_code marlin_expert_cache_unpin(marlin_expert_cache* cache, int64_t layer, int64_t expert) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(cache);
    return cache->cache.Unpin({layer, expert});
  });
}

marlin_code marlin_expert_cache_get_statistics(const marlin_expert_cache* cache,
                                               marlin_expert_cache_statistics* statistics) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(cache);
    const ExpertCacheStatistics now = cache->cache.statistics();
    return Write({0, now.hits, now.misses, now.evictions, now.loaded_bytes, now.entries, now.bytes},
                 "statistics", statistics);
  });
}
