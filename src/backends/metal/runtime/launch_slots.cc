#include "backends/metal/runtime/launch_slots.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fstream>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/metal/plan/kernel_text.h"
#include "backends/metal/runtime/simulator.h"
#include "base/macros.h"
#include "metal_sim/temporary_folder.h"

namespace marlin::metal {
namespace {

/// The text without the instances of templates that have other names, which cost time to compile.
/// Instances are lines `MACRO("host_name", arguments)`.
std::string OnlyInstance(std::string_view text, std::string_view function) {
  std::string kept;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1) + 1;
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end);
    const size_t quote = line.find("(\"");
    const bool instance = quote != std::string_view::npos &&
                          line.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ_") == quote;
    if (!instance || line.substr(quote + 2).starts_with(fmt::format("{}\"", function))) {
      kept += line;
    }
  }
  return kept;
}

Status Write(const std::string& path, std::string_view text) {
  std::ofstream file(path, std::ios::binary);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  return file ? Status() : Status(Code::kIo, path + ": cannot be written");
}

}  // namespace

Result<metal_sim::MetalProgram*> LaunchSlots::ProgramOf(const KernelLaunch& launch) {
  const std::string key = fmt::format("{} {}", launch.function, fmt::join(launch.constants, ","));
  auto& program = programs_[key];
  if (program != nullptr) return program.get();
  MARLIN_ASSIGN_OR_RETURN(const std::string text, KernelText(launch.source, launch.constants));
  MARLIN_ASSIGN_OR_RETURN(const metal_sim::TemporaryFolder folder,
                          FromSimulator(metal_sim::TemporaryFolder::Make("marlin-slots-")));
  const std::string path = (folder.path() / launch.source).string();
  MARLIN_RETURN_IF_ERROR(Write(path, OnlyInstance(text, launch.function)));
  metal_sim::CompileOptions options;
  options.clang = SimulatorCompiler();
  options.count_slots = true;
  MARLIN_ASSIGN_OR_RETURN(program, FromSimulator(metal_sim::MetalProgram::Compile(path, options)));
  return program.get();
}

Result<int64_t> LaunchSlots::Count(const KernelLaunch& launch, metal_sim::Launch described) {
  MARLIN_ASSIGN_OR_RETURN(metal_sim::MetalProgram* const program, ProgramOf(launch));
  MARLIN_ASSIGN_OR_RETURN(const metal_sim::Kernel* const kernel,
                          FromSimulator(program->Find(std::string(launch.function))));
  std::vector<std::vector<std::byte>> copies;
  for (auto& [index, binding] : described.buffers) {
    const auto* const data = static_cast<const std::byte*>(binding.data);
    copies.emplace_back(data, data + binding.bytes);
    binding.data = copies.back().data();
  }
  described.program_ranges = program->ranges();
  metal_sim::SimulationOptions unchecked;
  unchecked.check = false;
  program->TakeSlots();
  MARLIN_ASSIGN_OR_RETURN(const metal_sim::Report report,
                          FromSimulator(metal_sim::Simulate(*kernel, described, unchecked)));
  if (!report.clean()) return Status(Code::kInternal, report.findings.front().text);
  return program->TakeSlots();
}

}  // namespace marlin::metal
