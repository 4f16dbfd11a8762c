// What the documents of all benchmarks begin with and share.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "bench/timer.h"
#include "marlin/device.h"

namespace marlin::bench {

/// The date of now, "2026-11-21", in UTC.
std::string Today();

/// {"device", "date"} and, unless it is empty, {"commit"}.
nlohmann::ordered_json DocumentHead(const DeviceInfo& info, const std::string& commit);

/// {"seconds", "seconds_p10", "seconds_p90", "repetitions", "undisturbed"}.
nlohmann::ordered_json TimingJson(const Timing& timing);

}  // namespace marlin::bench
