// devices: lists the devices of this machine, and why others are unavailable.
#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/text_table.h"
#include "cli/command.h"
#include "marlin/device.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

Json DeviceJson(const DeviceInfo& device) {
  Json json = {{"name", device.name},
               {"backend", device.backend},
               {"model", device.model},
               {"threads", device.threads},
               {"features", device.features},
               {"measured_products", device.measured_products},
               {"tuning_file", device.tuning_file},
               {"kernels", Json::array()}};
  for (const KernelInfo& kernel : device.kernels) {
    json["kernels"].push_back({{"name", kernel.name},
                               {"op", kernel.op},
                               {"available", kernel.available},
                               {"reason", kernel.reason},
                               {"only_by_name", kernel.only_by_name}});
  }
  return json;
}

std::string DeviceText(const DeviceInfo& device) {
  std::string features;
  for (const std::string& feature : device.features) features += " " + feature;
  Table table({"kernel", "op", "runs here", "why not"}, 4);
  for (const KernelInfo& kernel : device.kernels) {
    const char* runs = !kernel.available ? "no" : kernel.only_by_name ? "by name" : "yes";
    table.AddRow({kernel.name, kernel.op, runs, kernel.reason});
  }
  const std::string file = device.tuning_file.empty() ? "" : ", also from " + device.tuning_file;
  const std::string backend =
      device.name == device.backend ? "" : fmt::format(" ({})", device.backend);
  return fmt::format("{}{}: {}, {} threads\nfeatures:{}\ntuning table: {}{}\n\n{}", device.name,
                     backend, device.model, device.threads, features,
                     FormatCounted(device.measured_products, "GEMM"), file, table.ToString());
}

class DevicesCommand final : public Command {
 public:
  void Declare(ArgumentList&) override {}

  Status Run(Console& console) override {
    Json document = {{"devices", Json::array()}, {"unavailable", Json::array()}};
    std::string text;
    std::set<std::string> found;
    std::vector<Status> refused;
    for (const DeviceInfo& device : ListDevices(&refused)) {
      found.insert(device.backend);
      document["devices"].push_back(DeviceJson(device));
      text += fmt::format("{}{}", text.empty() ? "" : "\n", DeviceText(device));
    }
    const auto add_unavailable = [&](const std::string& name, const std::string& reason) {
      document["unavailable"].push_back({{"name", name}, {"reason", reason}});
      text += fmt::format("{}{}\n", text.empty() ? "" : "\n", reason);
    };
    for (const Status& status : refused) {
      const std::string& reason = status.message();
      add_unavailable(reason.substr(0, reason.find(": ")), reason);
      found.insert("cuda");
    }
    for (const char* name : {"cpu", "cuda", "metal"}) {
      if (found.contains(name)) continue;
      const Result<Device> device = Device::Open(name);
      if (!device.ok()) add_unavailable(name, device.status().message());
    }
    return console.json() ? console.PrintJson(document) : console.Print(text);
  }
};

}  // namespace

std::unique_ptr<Command> Make_devices() { return std::make_unique<DevicesCommand>(); }

}  // namespace marlin::cli
