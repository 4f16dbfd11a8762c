// JSON parts that the documents of all benchmarks share.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "bench/timer.h"
#include "marlin/device.h"

namespace marlin::bench {

/// Today's date in UTC, "2026-11-21".
std::string Today();

/// {"device", "date"} and, unless it is empty, {"commit"}.
nlohmann::ordered_json DocumentHead(const DeviceInfo& info, const std::string& commit);

/// {"seconds", "seconds_p10", "seconds_p90", "repetitions", "undisturbed"}.
nlohmann::ordered_json TimingJson(const Timing& timing);

}  // namespace marlin::bench
