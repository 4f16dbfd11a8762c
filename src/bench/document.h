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

/// The file of a record: one row, i.e. one object of an array, per line; the other members of an
/// object that holds rows come first, on one line. bench/record_form.py writes the same form.
std::string RecordText(const nlohmann::ordered_json& document);

/// A timing of something else than the row's: {"name", ..., "speedup"}.
nlohmann::ordered_json PeerJson(const std::string& name, const Timing& peer, const Timing& own);

/// {"seconds", "seconds_p10", "seconds_p90", "repetitions", "undisturbed"}.
nlohmann::ordered_json TimingJson(const Timing& timing);

}  // namespace marlin::bench
