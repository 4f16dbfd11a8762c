// doctor: what works on this machine, why the rest does not, and what to do about it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/environment.h"
#include "base/macros.h"
#include "cli/arguments/device_argument.h"
#include "cli/command.h"
#include "cli/doctor/finding.h"
#include "cli/doctor/machine_findings.h"
#include "cli/doctor/nvidia_findings.h"
#include "cli/doctor/settings_findings.h"
#include "marlin/version.h"

namespace marlin::cli {
namespace {

class DoctorCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Option("--device", &device_, "DEVICE",
                     "A device that must work; default: METAL_MARLIN_DEVICE, otherwise any");
    arguments.Choices(DeviceChoices());
    arguments.Flag("--offline", &offline_, "Do not ask whether the Hugging Face Hub answers");
  }

  Status Run(Console& console) override {
    std::vector<Finding> findings = {Program(console)};
    const auto add = [&findings](std::vector<Finding> more) {
      std::move(more.begin(), more.end(), std::back_inserter(findings));
    };
    add(MachineFindings(FindMachine()));
    add(NvidiaFindings(FindNvidia()));
    add(MetalFindings());
    findings.push_back(DeviceFinding(device_));
    findings.push_back(TuningFinding());
    add(VariableFindings(ListEnvironment()));
    if (console.examination()) {
      MARLIN_ASSIGN_OR_RETURN(const std::string json, console.examination()(offline_));
      MARLIN_ASSIGN_OR_RETURN(std::vector<Finding> more, ParseFindings(json));
      add(std::move(more));
    } else {
      findings.push_back(WithoutPython());
    }
    MARLIN_RETURN_IF_ERROR(console.json() ? console.PrintJson(FindingsDocument(findings))
                                          : console.Print(FindingsText(findings)));
    return Verdict(findings);
  }

 private:
  static Finding Program(const Console& console) {
    return {kMachineGroup, "program", Finding::State::kOk,
            fmt::format("metal-marlin {} ({})", Version(), ProgramName(console))};
  }

  static Finding WithoutPython() {
    return {kPythonGroup, "package", Finding::State::kMissing,
            "this program has no tokenizers, no chat, no server and no downloads",
            fmt::format("use the command of the Python package: {}", kPythonCommand)};
  }

  static Status Verdict(const std::vector<Finding>& findings) {
    std::vector<std::string> broken;
    for (const Finding& finding : findings) {
      if (finding.state == Finding::State::kBroken) broken.push_back(finding.name);
    }
    if (broken.empty()) return {};
    return Status(Code::kUnsupported,
                  fmt::format("doctor: asked for and broken: {}", fmt::join(broken, ", ")));
  }

  std::optional<std::string> device_;
  bool offline_ = false;
};

}  // namespace

std::unique_ptr<Command> Make_doctor() { return std::make_unique<DoctorCommand>(); }

}  // namespace marlin::cli
