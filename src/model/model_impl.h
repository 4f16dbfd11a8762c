// What a Model handle points at.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "marlin/model.h"
#include "model/forward.h"
#include "model/kv_cache.h"
#include "model/layers.h"

namespace marlin {

/// Tokens of one pass, at most: bounds the memory of activations.
inline constexpr int64_t kPassTokens = 512;

struct Model::Impl {
  Impl(const Device& on, Decoder loaded) : device(on), decoder(std::move(loaded)) {}

  Device device;
  Decoder decoder;
  ModelInfo info;
  ProductOptions products;
  std::shared_ptr<PagePool> pool;
  StepProgram program;
  bool writes_host = true;  ///< The device's memory is the host's: it writes logits in place.
  mutable std::mutex mutex;
  mutable std::vector<Arena> arenas;  ///< Spare ones.
};

/// Errors: kInvalidArgument naming a model that was moved from.
inline Status CheckModel(const char* name, const Model& model) {
  if (model.valid()) return {};
  return Status(Code::kInvalidArgument, std::string(name) + ": was moved from");
}

}  // namespace marlin
