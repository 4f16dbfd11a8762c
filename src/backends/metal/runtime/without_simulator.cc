// Builds without the simulator: everything says so.
#include <optional>
#include <string>
#include <vector>

#include "metal_sim/launch.h"
#include "metal_sim/launch_order.h"
#include "metal_sim/metal_program.h"
#include "metal_sim/type_check.h"

namespace metal_sim {
namespace {

Status NotBuilt() {
  return Status(Code::kUnsupported,
                "metal-sim: this build has no simulator of Metal kernels (MARLIN_METAL_SIM)");
}

}  // namespace

Status MetalCompiler::Check(const std::string& /*named*/) { return NotBuilt(); }

Result<std::vector<std::string>> TypeCheck(const std::filesystem::path&, const CompileOptions&) {
  return NotBuilt();
}

Result<std::unique_ptr<MetalProgram>> MetalProgram::Compile(const std::filesystem::path&,
                                                            const CompileOptions&) {
  return NotBuilt();
}
Result<std::vector<KernelEntry>> MetalProgram::List(const std::filesystem::path&,
                                                    const CompileOptions&) {
  return NotBuilt();
}
MetalProgram::~MetalProgram() = default;
Result<const Kernel*> MetalProgram::Find(const std::string&) const { return NotBuilt(); }
Status MetalProgram::SetConstants(const ConstantValues&) { return NotBuilt(); }
std::vector<std::string> MetalProgram::Locate(const std::vector<const void*>& sites) const {
  return std::vector<std::string>(sites.size());
}

int64_t SlotVariables::Take() const { return 0; }

// NOLINTNEXTLINE(performance-unnecessary-value-param): the simulator moves from them.
std::optional<std::string> LaunchOrder::Add(std::string, std::vector<ObservedAccess>) {
  return std::nullopt;
}

const char* FindingKindName(FindingKind) { return ""; }
Result<Report> Simulate(const Kernel&, const Launch&, const SimulationOptions&) {
  return NotBuilt();
}

}  // namespace metal_sim
