// metal-sim: runs a kernel of a Metal source on the host CPU and checks it.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "backends/metal/runtime/simulator.h"
#include "base/errors.h"
#include "base/macros.h"
#include "base/text_table.h"
#include "cli/arguments/metal_sim_arguments.h"
#include "cli/command.h"
#include "metal_sim/launch.h"
#include "metal_sim/metal_program.h"
#include "metal_sim/type_check.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;
using metal_sim::Finding;
using metal_sim::MetalProgram;
using metal_sim::Report;

/// A finding with its source locations.
struct PlacedFinding {
  const Finding* finding;
  std::string place;
  std::string other_place;
};

std::vector<PlacedFinding> PlaceFindings(const MetalProgram& program, const Report& report) {
  std::vector<const void*> sites;
  for (const Finding& finding : report.findings) {
    sites.push_back(finding.site);
    sites.push_back(finding.other_site);
  }
  const std::vector<std::string> places = program.Locate(sites);
  std::vector<PlacedFinding> placed;
  for (size_t i = 0; i < report.findings.size(); ++i) {
    placed.push_back({&report.findings[i], places[2 * i], places[2 * i + 1]});
  }
  return placed;
}

/// Ends the process after a time limit, with the error that a command would print: native code of a
/// kernel cannot be cancelled.
class TimeLimit {
 public:
  TimeLimit(const Console& console, const std::string& file, int64_t seconds) {
    const Status status(
        Code::kInvalidArgument,
        fmt::format("{}: compiling and running took more than {} s; --time-limit allows more", file,
                    seconds));
    json_text = console.json() ? Console::ErrorDocument(status) : "";
    line_text = Console::ErrorLine(status);
    previous_ = std::signal(SIGALRM, [](int) {
      (void)!write(STDOUT_FILENO, json_text.data(), json_text.size());
      (void)!write(STDERR_FILENO, line_text.data(), line_text.size());
      _exit(ExitCode(Code::kInvalidArgument));
    });
    alarm(static_cast<unsigned>(seconds));
  }
  ~TimeLimit() {
    alarm(0);
    std::signal(SIGALRM, previous_);
  }
  TimeLimit(const TimeLimit&) = delete;
  TimeLimit& operator=(const TimeLimit&) = delete;

 private:
  // Formatted in advance: the signal handler must not allocate.
  static inline std::string json_text;
  static inline std::string line_text;
  void (*previous_)(int) = nullptr;
};

class MetalSimCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("FILE", &file_, "A Metal source file");
    arguments.Option("--kernel", &kernel_, "NAME",
                     "The kernel to run; default: the file's only one");
    arguments.Flag("--list", &list_, "Lists the kernels and their arguments, and runs nothing");
    arguments.Flag("--type-check", &type_check_,
                   "Checks address spaces and types, and runs nothing");
    arguments.Group("Launch");
    launch_.Declare(arguments);
    arguments.Group("Schedules");
    arguments.Option("--runs", &runs_, {1, 10000}, "N",
                     "Runs with N schedules: the first in order, the others at random (default 3)");
    arguments.Option("--preemption", &preemption_, {.most = 1}, "P",
                     "Probability of preempting a thread at a memory access (default 0.01)");
    arguments.Option("--time-limit", &seconds_, {1, 86400}, "SECONDS",
                     "For compiling and all runs (default 600): a kernel may never end");
    arguments.Group("Compilation");
    arguments.Flag("--fast-math", &fast_math_, "Compiles as Metal does by default: reassociates");
    arguments.Option("--define", &defines_, "NAME=VALUE", "As on a compiler's command line");
    arguments.Option("--include", &includes_, "FOLDER", "Another #include directory");
    arguments.Option("--msl", &version_, {200, 999}, "VERSION",
                     "Metal language version: 310 is 3.1 (default)");
  }

  Status Run(Console& console) override {
    MARLIN_RETURN_IF_ERROR(launch_.Read());
    metal_sim::CompileOptions options;
    options.defines = defines_;
    options.include_folders = includes_;
    options.msl_version = static_cast<int>(version_.value_or(options.msl_version));
    options.fast_math = fast_math_;
    options.clang = metal::SimulatorCompiler();
    if (type_check_) return CheckTypes(console, options);
    console.Message(fmt::format("compiling {} ...", file_));
    const TimeLimit limit(console, file_, seconds_.value_or(600));
    if (list_) return ListKernels(console, options);
    if (kernel_) options.kernels = {*kernel_};
    MARLIN_ASSIGN_OR_RETURN(const auto program,
                            metal::FromSimulator(MetalProgram::Compile(file_, options)));
    MARLIN_ASSIGN_OR_RETURN(const metal_sim::Kernel* const kernel, ChooseKernel(*program));
    MARLIN_RETURN_IF_ERROR(metal::FromSimulator(program->SetConstants(launch_.constants())));
    return Simulate(console, *program, *kernel);
  }

 private:
  Status CheckTypes(Console& console, const metal_sim::CompileOptions& options) {
    MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> findings,
                            metal::FromSimulator(metal_sim::TypeCheck(file_, options)));
    const Json document = {{"findings", findings}};
    const std::string text = findings.empty() ? "" : fmt::format("{}\n", fmt::join(findings, "\n"));
    MARLIN_RETURN_IF_ERROR(console.json() ? console.PrintJson(document) : console.Print(text));
    return Conclude(findings.size());
  }

  /// Reports findings as malformed input.
  Status Conclude(size_t findings) const {
    if (findings == 0) return Status();
    return Status(
        Code::kMalformedFile,
        fmt::format("{}: {}", file_, FormatCounted(static_cast<int64_t>(findings), "finding")));
  }

  Result<const metal_sim::Kernel*> ChooseKernel(const MetalProgram& program) {
    if (!kernel_ && program.module().kernel_count == 1) return &program.module().kernels[0];
    if (kernel_) return metal::FromSimulator(program.Find(*kernel_));
    return Invalid(fmt::format("--kernel: {} has {}; --list shows them", file_,
                               program.module().kernel_count));
  }

  Status ListKernels(Console& console, const metal_sim::CompileOptions& options) const {
    MARLIN_ASSIGN_OR_RETURN(const std::vector<metal_sim::KernelEntry> kernels,
                            metal::FromSimulator(MetalProgram::List(file_, options)));
    Json document = {{"kernels", Json::array()}};
    Table table({"kernel", "arguments"}, 2);
    for (const metal_sim::KernelEntry& kernel : kernels) {
      Json names = Json::array();
      std::vector<std::string> words;
      for (const metal_sim::KernelArgument& argument : kernel.arguments) {
        const bool bound = argument.source == metal_sim::Source::kBuffer;
        const bool memory = argument.source == metal_sim::Source::kThreadgroupMemory;
        if (!bound && !memory) continue;
        words.push_back(fmt::format("{} {}({})", argument.name, bound ? "buffer" : "threadgroup",
                                    argument.index));
        names.push_back({{"name", argument.name},
                         {"kind", bound ? "buffer" : "threadgroup"},
                         {"index", argument.index}});
      }
      table.AddRow({kernel.name, fmt::format("{}", fmt::join(words, ", "))});
      document["kernels"].push_back({{"name", kernel.name}, {"arguments", names}});
    }
    return console.json() ? console.PrintJson(document) : console.Print(table.ToString());
  }

  /// Prints outputs and counters of the first run, and the findings of all runs without duplicates.
  Status Simulate(Console& console, const MetalProgram& program, const metal_sim::Kernel& kernel) {
    const int64_t runs = runs_.value_or(3);
    Json document = {{"kernel", kernel.name}, {"runs", runs}, {"findings", Json::array()}};
    std::map<std::string, bool> seen;
    std::string text;
    for (int64_t run = 0; run < runs; ++run) {
      MetalLaunchArguments arguments = launch_;
      metal_sim::Launch launch = arguments.MakeLaunch();
      launch.program_ranges = program.ranges();
      metal_sim::SimulationOptions options;
      options.seed = static_cast<uint64_t>(run);
      options.preemption = run == 0 ? 0 : preemption_.value_or(0.01);
      options.msl_version = static_cast<int>(version_.value_or(options.msl_version));
      MARLIN_ASSIGN_OR_RETURN(const Report report,
                              metal::FromSimulator(metal_sim::Simulate(kernel, launch, options)));
      for (const PlacedFinding& placed : PlaceFindings(program, report)) {
        Add(placed, &seen, &text, &document);
      }
      if (run == 0) {
        MARLIN_RETURN_IF_ERROR(arguments.WriteOutputs());
        MARLIN_RETURN_IF_ERROR(ShowRun(arguments, report, &text, &document));
      }
    }
    text += fmt::format("{}: {} in {}\n", kernel.name, FormatCounted(std::ssize(seen), "finding"),
                        FormatCounted(runs, "run"));
    MARLIN_RETURN_IF_ERROR(console.json() ? console.PrintJson(document) : console.Print(text));
    return Conclude(seen.size());
  }

  static void Add(const PlacedFinding& placed, std::map<std::string, bool>* seen, std::string* text,
                  Json* document) {
    const std::string kind = FindingKindName(placed.finding->kind);
    const std::string key = kind + "|" + placed.place + "|" + placed.other_place;
    if (!seen->emplace(key, true).second) return;
    const std::string where = placed.place.empty() ? "" : placed.place + ": ";
    const std::string other =
        placed.other_place.empty() ? "" : fmt::format("\n  and {}", placed.other_place);
    *text += fmt::format("{}{}: {}{}\n", where, kind, placed.finding->text, other);
    (*document)["findings"].push_back({{"kind", kind},
                                       {"place", placed.place},
                                       {"other_place", placed.other_place},
                                       {"text", placed.finding->text},
                                       {"count", placed.finding->count}});
  }

  static Status ShowRun(const MetalLaunchArguments& arguments, const Report& report,
                        std::string* text, Json* document) {
    MARLIN_ASSIGN_OR_RETURN(const std::vector<int> printed, arguments.Printed());
    for (const int index : printed) {
      const MetalBuffer& buffer = arguments.buffers().at(index);
      const int64_t size = MetalScalarBytes(buffer.type);
      const int64_t count = static_cast<int64_t>(buffer.bytes.size()) / size;
      constexpr int64_t kShown = 16;
      std::vector<std::string> values;
      for (int64_t i = 0; i < std::min(count, kShown); ++i) {
        values.push_back(FormatMetalScalar(buffer.type, buffer.bytes.data() + i * size));
      }
      *text += fmt::format("buffer({}): {}{}\n", index, fmt::join(values, " "),
                           count > kShown ? " ..." : "");
      (*document)["buffers"].push_back({{"index", index}, {"values", values}});
    }
    const metal_sim::Counters& counters = report.counters;
    *text += fmt::format(
        "{} threads, {} of threadgroup memory, {} barriers, {} simdgroup operations, {} matrix "
        "operations, {} atomics\n",
        FormatInteger(counters.threads), FormatBytes(counters.threadgroup_bytes),
        FormatInteger(counters.threadgroup_barriers), FormatInteger(counters.simdgroup_operations),
        FormatInteger(counters.matrix_operations), FormatInteger(counters.atomics));
    Json& json = (*document)["counters"];
    json = {{"threads", counters.threads},
            {"threadgroup_bytes", counters.threadgroup_bytes},
            {"threadgroup_barriers", counters.threadgroup_barriers},
            {"simdgroup_barriers", counters.simdgroup_barriers},
            {"simdgroup_operations", counters.simdgroup_operations},
            {"matrix_operations", counters.matrix_operations},
            {"multiply_adds", counters.multiply_adds},
            {"atomics", counters.atomics},
            {"buffers", Json::array()}};
    for (const metal_sim::BufferCounters& buffer : counters.buffers) {
      *text += fmt::format("{}: {} read ({} of different bytes), {} written\n", buffer.name,
                           FormatBytes(buffer.bytes_read), FormatBytes(buffer.unique_bytes_read),
                           FormatBytes(buffer.bytes_written));
      json["buffers"].push_back({{"name", buffer.name},
                                 {"bytes_read", buffer.bytes_read},
                                 {"unique_bytes_read", buffer.unique_bytes_read},
                                 {"bytes_written", buffer.bytes_written},
                                 {"unique_bytes_written", buffer.unique_bytes_written}});
    }
    return Status();
  }

  std::string file_;
  std::optional<std::string> kernel_;
  MetalLaunchArguments launch_;
  bool list_ = false;
  bool type_check_ = false;
  std::optional<int64_t> runs_;
  std::optional<int64_t> seconds_;
  std::optional<double> preemption_;
  bool fast_math_ = false;
  std::vector<std::string> defines_;
  std::vector<std::string> includes_;
  std::optional<int64_t> version_;
};

}  // namespace

std::unique_ptr<Command> Make_metal_sim() { return std::make_unique<MetalSimCommand>(); }

}  // namespace marlin::cli
