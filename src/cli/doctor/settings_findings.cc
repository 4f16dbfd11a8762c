#include "cli/doctor/settings_findings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/macros.h"
#include "base/printable.h"
#include "base/text_table.h"
#include "cli/arguments/suggestion.h"
#include "marlin/device.h"
#include "ops/device/tuning_file.h"

namespace marlin::cli {
namespace {

using State = Finding::State;

constexpr std::string_view kLong = "METAL_";

/// The variable of a name, or of the name with METAL_ before it.
const KnownVariable* FindVariable(std::string_view name) {
  for (const KnownVariable& variable : KnownVariables()) {
    const std::string_view known = variable.name;
    if (known == name) return &variable;
    const bool product = variable.user == KnownVariable::User::kProduct;
    if (product && known.starts_with(kLong) && known.substr(kLong.size()) == name) return &variable;
  }
  return nullptr;
}

std::string Shown(const EnvironmentVariable& variable) {
  if (variable.name.ends_with("API_KEY")) return "set";
  return variable.value.empty() ? "set to nothing" : Printable(variable.value);
}

Finding VariableFinding(const EnvironmentVariable& variable,
                        std::span<const EnvironmentVariable> all) {
  Finding finding = {kSettingsGroup, Printable(variable.name), State::kOk, Shown(variable)};
  const KnownVariable* const known = FindVariable(variable.name);
  if (known == nullptr) {
    std::vector<std::string> names;
    for (const KnownVariable& each : KnownVariables()) {
      names.emplace_back(each.name);
      if (names.back().starts_with("METAL_MARLIN_"))
        names.push_back(names.back().substr(kLong.size()));
    }
    // The value may be a secret.
    finding.state = State::kWarning;
    finding.found = "nothing reads this variable" + DidYouMean(variable.name, names);
    finding.advice = "rename or unset it; docs/howto/environment.md has the names";
    return finding;
  }
  if (known->user == KnownVariable::User::kBuilds) {
    finding.found += "; only builds, tests and measurements read it";
    return finding;
  }
  const bool hidden = variable.name != known->name &&
                      std::any_of(all.begin(), all.end(), [&](const EnvironmentVariable& other) {
                        return other.name == known->name;
                      });
  if (hidden) {
    finding.state = State::kWarning;
    finding.found += fmt::format("; {} is set, too, and counts", known->name);
    finding.advice = "unset one of them";
  }
  return finding;
}

}  // namespace

Finding DeviceFinding(const std::optional<std::string>& name) {
  Finding finding = {kSettingsGroup, "device", State::kOk, ""};
  const std::string source = name ? "--device" : "METAL_MARLIN_DEVICE";
  const Result<std::string> wanted = name ? Result<std::string>(*name) : DefaultDeviceName();
  const Result<Device> device = wanted.ok() ? Device::Open(*wanted) : wanted.status();
  if (!device.ok()) {
    finding.state = State::kBroken;
    finding.found = device.status().message();
    finding.advice = wanted.ok() && *wanted == "auto"
                         ? "mend what the reason names: no model runs"
                         : fmt::format("see the device above, or choose another by {}", source);
    return finding;
  }
  const DeviceInfo info = device->info();
  const std::string taken = DescribeDevice(info);
  finding.found = *wanted == "auto" ? fmt::format("auto takes {}", taken)
                                    : fmt::format("{} names {}", source, taken);
  if (!info.passed_over.empty()) {
    finding.found += ", since " + info.passed_over;
    finding.state = State::kWarning;
    finding.advice = "see the device that was not taken, above";
  }
  return finding;
}

Finding TuningFinding() {
  Finding finding = {kSettingsGroup, "tuning", State::kOk, ""};
  const std::string file = ChooseTuningFile({});
  const Result<Tuning> tuning = LoadTuning("", {}, "");
  if (!tuning.ok()) {
    finding.state = State::kBroken;
    finding.found = tuning.status().message();
    finding.advice = "remove the file, or make it anew with metal-marlin tune";
    return finding;
  }
  std::vector<std::string> counts;
  for (const DeviceInfo& info : ListDevices()) {
    counts.push_back(fmt::format(
        "{} for {}", FormatCounted(info.measured_products, "measured GEMM"), info.name));
  }
  finding.found = fmt::format("{}; {}", fmt::join(counts, ", "),
                              file.empty() ? "no file of metal-marlin tune" : "also from " + file);
  return finding;
}

std::vector<Finding> VariableFindings(std::span<const EnvironmentVariable> variables) {
  std::vector<Finding> findings;
  for (const EnvironmentVariable& variable : variables) {
    findings.push_back(VariableFinding(variable, variables));
  }
  if (findings.empty()) {
    findings.push_back({kSettingsGroup, "variables", State::kOk,
                        "no METAL_MARLIN_ variable is set, which is as it should be"});
  }
  return findings;
}

}  // namespace marlin::cli
