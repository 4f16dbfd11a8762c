// The C interface of the cache of experts: loaders, leases, pins, statistics, wrong arguments.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "marlin/marlin_c.h"

namespace {

constexpr int64_t kHidden = 96;
constexpr int64_t kInner = 32;

marlin_prepared* Prepared(const marlin_device* device, int64_t rows, int64_t columns) {
  std::vector<float> values(static_cast<size_t>(rows * columns));
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i));
  marlin_tensor dense = MARLIN_TENSOR_INIT;
  dense.data = values.data();
  dense.rank = 2;
  dense.shape[0] = rows;
  dense.shape[1] = columns;
  marlin_weights* weights = nullptr;
  marlin_prepared* prepared = nullptr;
  EXPECT_EQ(marlin_quantize(&dense, "u4/g32", &weights), MARLIN_OK);
  EXPECT_EQ(marlin_prepare(weights, device, &prepared), MARLIN_OK);
  marlin_weights_destroy(weights);
  return prepared;
}

/// The orders of a loader, and the last request that it got.
struct Source {
  const marlin_device* device = nullptr;
  marlin_code code = MARLIN_OK;
  bool sets = true;
  bool fails_with_message = false;
  std::vector<float> bias = std::vector<float>(kHidden, 0.5F);
  int64_t layer = -1;
  int64_t expert = -1;
  int calls = 0;
};

/// Prepares an expert with a bias and destroys its handles.
marlin_code Load(void* context, int64_t layer, int64_t expert, marlin_loaded_expert* loaded) {
  Source& source = *static_cast<Source*>(context);
  source.layer = layer;
  source.expert = expert;
  ++source.calls;
  if (source.fails_with_message) return marlin_checkpoint_open("/absent/file", nullptr);
  if (!source.sets || source.code != MARLIN_OK) return source.code;
  marlin_tensor bias = MARLIN_TENSOR_INIT;
  bias.data = source.bias.data();
  bias.rank = 1;
  bias.shape[0] = kHidden;
  marlin_prepared* const gate = Prepared(source.device, kHidden, 2 * kInner);
  marlin_prepared* const down = Prepared(source.device, kInner, kHidden);
  marlin_expert made{};
  made.gate.weights = gate;
  made.down.weights = down;
  made.down.bias = &bias;
  const marlin_code code = marlin_loaded_expert_set(loaded, &made);
  marlin_prepared_destroy(gate);
  marlin_prepared_destroy(down);
  return code;
}

class ExpertCacheC : public ::testing::Test {
 protected:
  ExpertCacheC() {
    EXPECT_EQ(marlin_device_open("cpu", 1, &device_), MARLIN_OK);
    source_.device = device_;
    marlin_prepared* const gate = Prepared(device_, kHidden, 2 * kInner);
    marlin_prepared* const down = Prepared(device_, kInner, kHidden);
    bytes_ = marlin_prepared_bytes(gate) + marlin_prepared_bytes(down);
    marlin_prepared_destroy(gate);
    marlin_prepared_destroy(down);
    options_.capacity_bytes = 2 * bytes_;
    Create();
  }
  ~ExpertCacheC() override {
    marlin_expert_cache_destroy(cache_);
    marlin_device_destroy(device_);
  }

  void Create() {
    marlin_expert_cache_destroy(cache_);
    EXPECT_EQ(marlin_expert_cache_create(&options_, &cache_), MARLIN_OK) << marlin_last_error();
  }
  marlin_code Get(int64_t expert, marlin_expert_lease** lease) {
    return marlin_expert_cache_get(cache_, 7, expert, bytes_, &Load, &source_, lease);
  }
  /// Gets an expert and returns it at once.
  void Use(std::initializer_list<int64_t> experts) {
    for (const int64_t expert : experts) {
      marlin_expert_lease* lease = nullptr;
      ASSERT_EQ(Get(expert, &lease), MARLIN_OK) << marlin_last_error();
      marlin_expert_lease_destroy(lease);
    }
  }
  marlin_expert_cache_statistics Statistics() const {
    marlin_expert_cache_statistics now = MARLIN_EXPERT_CACHE_STATISTICS_INIT;
    EXPECT_EQ(marlin_expert_cache_get_statistics(cache_, &now), MARLIN_OK);
    return now;
  }

  marlin_device* device_ = nullptr;
  int64_t bytes_ = 0;
  marlin_expert_cache_options options_ = MARLIN_EXPERT_CACHE_OPTIONS_INIT;
  marlin_expert_cache* cache_ = nullptr;
  Source source_;
};

TEST_F(ExpertCacheC, CountsHitsMissesAndEvictions) {
  Use({1, 2, 1, 3, 1, 2});
  EXPECT_EQ(source_.layer, 7);
  EXPECT_EQ(source_.expert, 2);
  EXPECT_EQ(source_.calls, 4);
  const marlin_expert_cache_statistics now = Statistics();
  EXPECT_EQ(now.hits, 2);
  EXPECT_EQ(now.misses, 4);
  EXPECT_EQ(now.evictions, 2);
  EXPECT_EQ(now.loaded_bytes, 4 * bytes_);
  EXPECT_EQ(now.entries, 2);
  EXPECT_EQ(now.bytes, 2 * bytes_);
}

TEST_F(ExpertCacheC, EvictsByFrequencyIfTold) {
  options_.policy = MARLIN_CACHE_FREQUENCY;
  Create();
  Use({1, 1, 1, 2, 3, 1});
  EXPECT_EQ(Statistics().hits, 3);
  EXPECT_EQ(source_.calls, 3);
}

TEST_F(ExpertCacheC, LeasedExpertsRun) {
  marlin_expert_lease* lease = nullptr;
  ASSERT_EQ(Get(4, &lease), MARLIN_OK) << marlin_last_error();
  // The lease outlives the cache's handle.
  marlin_expert_cache_destroy(cache_);
  cache_ = nullptr;
  const marlin_expert* const expert = marlin_expert_lease_expert(lease);
  ASSERT_NE(expert, nullptr);
  EXPECT_NE(expert->gate.weights, nullptr);
  EXPECT_EQ(expert->up.weights, nullptr);
  EXPECT_EQ(expert->gate.bias, nullptr);
  ASSERT_NE(expert->down.bias, nullptr);
  EXPECT_EQ(expert->down.bias->data, source_.bias.data());
  EXPECT_EQ(expert->down.bias->shape[0], kHidden);
  marlin_experts* set = nullptr;
  ASSERT_EQ(marlin_experts_create(device_, expert, 1, nullptr, nullptr, &set), MARLIN_OK)
      << marlin_last_error();
  marlin_experts_destroy(set);
  marlin_expert_lease_destroy(lease);
}

TEST_F(ExpertCacheC, LeasesAndPinsKeepExperts) {
  marlin_expert_lease* lease = nullptr;
  ASSERT_EQ(Get(1, &lease), MARLIN_OK);
  Use({2});
  ASSERT_EQ(marlin_expert_cache_pin(cache_, 7, 2), MARLIN_OK);
  marlin_expert_lease* none = nullptr;
  EXPECT_EQ(Get(3, &none), MARLIN_OUT_OF_MEMORY);
  EXPECT_EQ(none, nullptr);
  EXPECT_NE(std::string(marlin_last_error()).find("in use or pinned"), std::string::npos);
  EXPECT_EQ(marlin_expert_cache_unpin(cache_, 7, 2), MARLIN_OK);
  Use({3});
  EXPECT_EQ(marlin_expert_cache_unpin(cache_, 7, 2), MARLIN_INVALID_ARGUMENT);
  EXPECT_STREQ(marlin_last_error(), "expert cache: layer 7, expert 2: is not pinned");
  EXPECT_EQ(marlin_expert_cache_pin(cache_, 7, 2), MARLIN_INVALID_ARGUMENT);
  marlin_expert_lease_destroy(lease);
}

TEST_F(ExpertCacheC, FailuresOfLoadersAreTold) {
  // A message of earlier is not the loader's.
  EXPECT_EQ(marlin_expert_cache_pin(cache_, 7, 5), MARLIN_INVALID_ARGUMENT);
  marlin_expert_lease* lease = nullptr;
  source_.code = MARLIN_IO;
  EXPECT_EQ(Get(5, &lease), MARLIN_IO);
  EXPECT_STREQ(marlin_last_error(), "load: layer 7, expert 5: code 6");
  source_.code = static_cast<marlin_code>(9);
  EXPECT_EQ(Get(5, &lease), MARLIN_INVALID_ARGUMENT);
  EXPECT_STREQ(marlin_last_error(), "load: layer 7, expert 5: unknown code 9");
  source_.code = MARLIN_OK;
  source_.sets = false;
  EXPECT_EQ(Get(5, &lease), MARLIN_INVALID_ARGUMENT);
  EXPECT_STREQ(marlin_last_error(),
               "load: layer 7, expert 5: MARLIN_OK without marlin_loaded_expert_set");
  source_.sets = true;
  source_.fails_with_message = true;
  EXPECT_EQ(Get(5, &lease), MARLIN_INVALID_ARGUMENT);
  EXPECT_STREQ(marlin_last_error(), "load: layer 7, expert 5: checkpoint: NULL");
  EXPECT_EQ(lease, nullptr);
  EXPECT_EQ(Statistics().entries, 0);
  source_.fails_with_message = false;
  Use({5});
}

TEST_F(ExpertCacheC, WrongArgumentsAreNamed) {
  const auto message = [](marlin_code code) {
    EXPECT_EQ(code, MARLIN_INVALID_ARGUMENT);
    return std::string(marlin_last_error());
  };
  marlin_expert_lease* lease = nullptr;
  marlin_expert_cache* made = nullptr;
  EXPECT_EQ(message(marlin_expert_cache_create(nullptr, nullptr)), "cache: NULL");
  EXPECT_EQ(message(marlin_expert_cache_get(nullptr, 0, 0, 1, &Load, &source_, &lease)),
            "cache: NULL");
  EXPECT_EQ(message(marlin_expert_cache_get(cache_, 0, 0, 1, nullptr, &source_, &lease)),
            "load: NULL");
  EXPECT_EQ(message(marlin_expert_cache_get(cache_, 0, 0, 1, &Load, &source_, nullptr)),
            "lease: NULL");
  EXPECT_NE(message(marlin_expert_cache_get(cache_, 0, 0, 3 * bytes_, &Load, &source_, &lease))
                .find("the capacity is"),
            std::string::npos);
  EXPECT_NE(message(marlin_expert_cache_get(cache_, 0, 0, bytes_ - 1, &Load, &source_, &lease))
                .find("expected at most"),
            std::string::npos);
  EXPECT_EQ(message(marlin_expert_cache_pin(nullptr, 0, 0)), "cache: NULL");
  EXPECT_EQ(message(marlin_expert_cache_unpin(nullptr, 0, 0)), "cache: NULL");
  EXPECT_EQ(message(marlin_loaded_expert_set(nullptr, nullptr)), "loaded: NULL");
  EXPECT_EQ(message(marlin_expert_cache_get_statistics(cache_, nullptr)), "statistics: NULL");
  options_.half_life = 0;
  EXPECT_EQ(message(marlin_expert_cache_create(&options_, &made)),
            "half_life: expected 1 or more, got 0");
  options_ = MARLIN_EXPERT_CACHE_OPTIONS_INIT;
  options_.capacity_bytes = -1;
  EXPECT_EQ(message(marlin_expert_cache_create(&options_, &made)),
            "capacity_bytes: expected 0 or more, got -1");
  options_ = MARLIN_EXPERT_CACHE_OPTIONS_INIT;
  options_.policy = 2;
  EXPECT_EQ(message(marlin_expert_cache_create(&options_, &made)), "policy: unknown number 2");
  EXPECT_EQ(made, nullptr);
  EXPECT_EQ(marlin_expert_lease_expert(nullptr), nullptr);
  marlin_expert_lease_destroy(nullptr);
  marlin_expert_cache_destroy(nullptr);
}

TEST_F(ExpertCacheC, StructsOfOtherVersionsAreReadAndWrittenByTheirSize) {
  // An options struct that ends before the policy, whose value would be wrong.
  options_.size = offsetof(marlin_expert_cache_options, policy);
  options_.policy = 99;
  Create();
  Use({1});
  marlin_expert_cache_statistics now = MARLIN_EXPERT_CACHE_STATISTICS_INIT;
  now.size = offsetof(marlin_expert_cache_statistics, evictions);
  now.evictions = -5;
  ASSERT_EQ(marlin_expert_cache_get_statistics(cache_, &now), MARLIN_OK);
  EXPECT_EQ(now.misses, 1);
  EXPECT_EQ(now.evictions, -5);
  EXPECT_EQ(now.size, offsetof(marlin_expert_cache_statistics, evictions));
  now.size = 0;
  EXPECT_EQ(marlin_expert_cache_get_statistics(cache_, &now), MARLIN_INVALID_ARGUMENT);
  // Without options there is half a gibibyte.
  marlin_expert_cache* plain = nullptr;
  ASSERT_EQ(marlin_expert_cache_create(nullptr, &plain), MARLIN_OK);
  marlin_expert_cache_destroy(plain);
}

}  // namespace
