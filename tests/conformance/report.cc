#include "report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

namespace marlin::conformance {
namespace {

Result<std::string> ReadText(const std::string& path) {
  std::ifstream file(path);
  if (!file) return Status(Code::kIo, path + ": cannot be opened");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string PowerOfTwo(double value) {
  if (value == 0) return "0";
  return fmt::format("2^{:.3g}", std::log2(value));
}

std::string DepthText(const ErrorModel& model) {
  const std::string text = fmt::format("ceil(k / {}) + {}", model.lanes, model.extra_depth);
  if (model.block_depth == 0) return text;
  return fmt::format("{}; {} at {} in a block", text, model.block_depth,
                     PowerOfTwo(model.block_unit));
}

std::string ActivationText(const ErrorModel& model) {
  const std::string text = PowerOfTwo(model.activation_unit);
  if (model.activation_floor == 0) return text;
  return fmt::format("{}, {} of the row's largest", text, PowerOfTwo(model.activation_floor));
}

// The columns of a table line that come from the kernel table; the measured column follows.
std::string DeclaredLine(const KernelDesc& kernel) {
  return fmt::format(
      "| `{}` | {} | {} | {} | {} | {} | {} | {} |", kernel.name, IsaName(kernel.level),
      GradeName(kernel.grade), PowerOfTwo(kernel.error.weight_unit), ActivationText(kernel.error),
      PowerOfTwo(kernel.error.accumulate_unit), DepthText(kernel.error), kernel.error.int8_block);
}

constexpr const char* kBackends[] = {"cpu", "cuda", "metal"};

std::string SectionTitle(std::string_view backend) {
  const char* title = backend == "cpu" ? "CPU" : (backend == "cuda" ? "CUDA" : "Metal");
  return fmt::format("\n## {}\n", title);
}

// Returns a backend's section of the file including its title; empty if there is none.
std::string SectionOf(const std::string& text, std::string_view backend) {
  const size_t begin = text.find(SectionTitle(backend));
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find("\n## ", begin + 1) - begin);
}

// Returns the text after the declared columns of a line in the file: " 0.50 |\n".
std::string MeasuredBefore(const std::string& text, const std::string& declared) {
  const size_t begin = text.find(declared);
  if (begin == std::string::npos) return " not run |\n";
  const size_t measured = begin + declared.size();
  return text.substr(measured, text.find('\n', measured) + 1 - measured);
}

std::string MakeSection(const Machine& machine, const Counts& counts, std::string_view backend,
                        const std::string& before) {
  std::string text = SectionTitle(backend) +
                     "\n| kernel | level | grade | u_w | u_a | u_acc | depth | int8 block | worst "
                     "ratio |\n|---|---|---|---|---|---|---|---|---|\n";
  for (const KernelDesc& kernel : KernelTable(backend)) {
    const Row* row = machine.Find(backend, kernel.name);
    const bool measured = row != nullptr && counts[machine.IndexOf(*row)].passed > 0;
    const std::string declared = DeclaredLine(kernel);
    text += declared;
    text += measured ? fmt::format(" {:.2f} |\n", counts[machine.IndexOf(*row)].worst_ratio)
                     : MeasuredBefore(before, declared);
  }
  return text;
}

}  // namespace

std::string CountsPath(const std::string& path, const std::optional<DeviceProperties>& cuda) {
  if (!cuda || cuda->has_wgmma) return path;
  const int code = cuda->cuda_code >= 90 ? 90 : (cuda->cuda_code >= 89 ? 89 : 80);
  const size_t dot = path.rfind('.');
  return fmt::format("{}_{}{}", path.substr(0, dot), code,
                     dot == std::string::npos ? "" : path.substr(dot));
}

std::vector<std::string> CompareCounts(const Machine& machine, const Counts& counts,
                                       const std::string& hopper_path) {
  const bool any_ran = std::any_of(machine.rows().begin(), machine.rows().end(),
                                   [](const Row& row) { return row.unavailable.empty(); });
  if (!any_ran) return {};
  std::optional<DeviceProperties> cuda = machine.CudaProperties();
  std::string path = CountsPath(hopper_path, cuda);
  Result<std::string> text = ReadText(path);
  if (!text.ok() && cuda) {
    cuda->cuda_code = 80;
    path = CountsPath(hopper_path, cuda);
    text = ReadText(path);
  }
  if (!text.ok()) return {text.status().message()};
  const auto pinned = nlohmann::json::parse(*text, nullptr, false);
  if (!pinned.is_object()) return {path + ": not a JSON object"};
  std::vector<std::string> violations;
  for (size_t i = 0; i < counts.size(); ++i) {
    const Row& row = machine.rows()[i];
    if (!row.unavailable.empty()) continue;
    if (!pinned.contains(row.name)) {
      violations.push_back(fmt::format("{}: no pinned counts in {}", row.name, path));
      continue;
    }
    const auto& line = pinned[row.name];
    const RowCounts& now = counts[i];
    const auto check = [&](const char* key, int64_t value, bool at_least) {
      const int64_t limit = line.value(key, int64_t{0});
      if (at_least ? value >= limit : value <= limit) return;
      violations.push_back(fmt::format("{}: {} is {}, pinned {} {}", row.name, key, value,
                                       at_least ? "at least" : "at most", limit));
    };
    check("passed", now.passed, true);
    check("unsupported", now.unsupported, false);
    check("mistrusted", now.mistrusted, false);
  }
  return violations;
}

Status WriteCounts(const Machine& machine, const Counts& counts, const std::string& hopper_path) {
  const std::string path = CountsPath(hopper_path, machine.CudaProperties());
  nlohmann::json pinned = nlohmann::json::object();
  if (const Result<std::string> text = ReadText(path); text.ok()) {
    pinned = nlohmann::json::parse(*text, nullptr, false);
    if (!pinned.is_object()) pinned = nlohmann::json::object();
  }
  for (size_t i = 0; i < counts.size(); ++i) {
    const Row& row = machine.rows()[i];
    if (!row.unavailable.empty()) continue;
    const RowCounts& now = counts[i];
    pinned[row.name] = {
        {"passed", now.passed}, {"unsupported", now.unsupported}, {"mistrusted", now.mistrusted}};
  }
  return WriteText(path, pinned.dump(2) + "\n");
}

Status WriteModels(const Machine& machine, const Counts& counts, const std::string& path) {
  const Result<std::string> old = ReadText(path);
  const std::string before = old.ok() ? *old : "";
  std::string text =
      "# Error models of the kernels\n\n"
      "Generated by `marlin_conformance --write-models`; the declared columns come from the "
      "kernel\n"
      "tables and a test compares them, the last column was measured on the conformance cases: "
      "the\n"
      "largest error over the tight bound of `docs/design/numerics.md` (1 is the limit).\n";
  for (const char* backend : kBackends) {
    text += KernelTable(backend).empty() ? SectionOf(before, backend)
                                         : MakeSection(machine, counts, backend, before);
  }
  return WriteText(path, text);
}

std::string CompareModels(const std::string& path) {
  const Result<std::string> text = ReadText(path);
  if (!text.ok()) return text.status().message();
  for (const char* backend : kBackends) {
    for (const KernelDesc& kernel : KernelTable(backend)) {
      const std::string line = DeclaredLine(kernel);
      if (text->find(line) != std::string::npos) continue;
      return fmt::format("{}: lacks the line '{}'; run --write-models", path, line);
    }
  }
  return {};
}

Status WriteText(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  return file ? Status() : Status(Code::kIo, path + ": cannot be written");
}

}  // namespace marlin::conformance
