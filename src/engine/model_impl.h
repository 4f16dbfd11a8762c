// The object behind a Model handle.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/internals.h"
#include "engine/forward.h"
#include "engine/kv_cache.h"
#include "marlin/model.h"
#include "model/layers.h"
#include "model/mixer.h"

namespace marlin {

/// Most rows of logits of one pass, and most tokens of a pass of calibration; bounds their memory.
inline constexpr int64_t kPassTokens = 512;

struct Model::Impl {
  Impl(const Device& on, Decoder loaded) : device(on), decoder(std::move(loaded)) {}

  PassSetting setting() const {
    return {device,
            decoder.config,
            info.kv_cache,
            products.accuracy,
            products.determinism,
            pool->page_tokens()};
  }

  Device device;
  Decoder decoder;
  ModelInfo info;
  ProductOptions products;
  std::shared_ptr<PagePool> pool;
  StepProgram program;
  std::shared_ptr<const Impl> draft;  ///< ModelOptions::draft.
  std::unique_ptr<const Impl> host;   ///< The layers before those here, on the CPU; or null.
  bool writes_host = true;  ///< Device and host share memory: the device writes logits in place.
  mutable std::mutex mutex;
  mutable std::vector<Arena> arenas;  ///< Idle arenas.
};

/// Errors: kInvalidArgument for a moved-from model.
inline Status CheckModel(const char* name, const Model& model) {
  if (model.valid()) return {};
  return Status(Code::kInvalidArgument, std::string(name) + ": was moved from");
}

}  // namespace marlin
