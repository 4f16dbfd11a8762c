// What a Model handle points at.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "marlin/model.h"
#include "model/forward.h"
#include "model/layers.h"

namespace marlin {

/// Tokens of one pass, at most: bounds the memory of activations.
inline constexpr int64_t kPassTokens = 512;

struct Model::Impl {
  Impl(Device on, Decoder loaded) : device(std::move(on)), decoder(std::move(loaded)) {}

  Device device;
  Decoder decoder;
  ModelInfo info;
  ProductOptions products;
  CacheShape cache;
  mutable std::mutex mutex;
  mutable std::vector<Arena> arenas;  ///< Spare ones.
};

}  // namespace marlin
