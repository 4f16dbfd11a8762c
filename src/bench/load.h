// Load time of a model: from its files, which the page cache holds after the first time, to weights
// that are prepared for a device.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/timer.h"
#include "marlin/device.h"
#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin::bench {

/// One part of a load. The host does one after another while a device works.
struct LoadStage {
  std::string name;
  double seconds = 0;
};

struct LoadBench {
  std::string path;
  DeviceInfo device;  ///< The device that the model is loaded for.
  ModelInfo model;
  int64_t file_bytes = 0;  ///< Bytes of the stored tensors.
  Timing timing;
  std::vector<LoadStage> stages;  ///< Measured in one more load.

  double BytesPerSecond() const { return static_cast<double>(file_bytes) / timing.median; }
  /// One row of "results".
  nlohmann::ordered_json ToJson() const;
  std::string ToText() const;
};

/// Opens a model repeatedly, as long as `timing` says; each time the previous one has been
/// destroyed. Errors: from Model::Open.
Result<LoadBench> BenchLoad(const std::string& path, const Device& device,
                            const ModelOptions& options, const TimingOptions& timing = {});

}  // namespace marlin::bench
