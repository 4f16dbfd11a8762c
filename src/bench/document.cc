#include "bench/document.h"

#include <ctime>
#include <nlohmann/json.hpp>

namespace marlin::bench {

std::string Today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::strftime(text, sizeof(text), "%Y-%m-%d", std::gmtime(&now));
  return text;
}

nlohmann::ordered_json DocumentHead(const DeviceInfo& info, const std::string& commit) {
  nlohmann::ordered_json document = {
      {"device", {{"name", info.name}, {"model", info.model}, {"threads", info.threads}}},
      {"date", Today()}};
  if (!commit.empty()) document["commit"] = commit;
  return document;
}

nlohmann::ordered_json TimingJson(const Timing& timing) {
  return {{"seconds", timing.median},
          {"seconds_p10", timing.p10},
          {"seconds_p90", timing.p90},
          {"repetitions", timing.repetitions},
          {"undisturbed", timing.undisturbed}};
}

}  // namespace marlin::bench
