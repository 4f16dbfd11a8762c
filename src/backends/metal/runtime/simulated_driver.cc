#include "backends/metal/runtime/simulated_driver.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <numeric>
#include <system_error>
#include <utility>

#include "backends/metal/plan/kernel_files.h"
#include "backends/metal/runtime/host_memory_driver.h"
#include "backends/metal/runtime/launch_slots.h"
#include "backends/metal/runtime/simulated_order.h"
#include "backends/metal/runtime/simulator.h"
#include "base/environment.h"
#include "base/macros.h"
#include "base/parse_number.h"
#include "metal_sim/metal_program.h"
#include "metal_sim/random_source.h"
#include "metal_sim/temporary_folder.h"

namespace marlin::metal {
namespace {

namespace fs = std::filesystem;
using metal_sim::MetalProgram;

/// Small, so that the small GEMMs of the tests are split in every way that large ones are on a GPU.
constexpr int kSimulatedCores = 2;

/// The kernel sources in a temporary folder, and the programs compiled from them. A program runs
/// one launch at a time because its function constants are global variables; concurrent calls get
/// programs of their own.
class Programs {
 public:
  explicit Programs(metal_sim::CompileOptions options) : options_(std::move(options)) {}

  /// Errors: kIo.
  Status WriteSources() {
    const auto named = ReadEnvironment("METAL_MARLIN_METAL_SIM_SOURCES");
    if (named && !named->value.empty()) {
      root_ = named->value;
      options_.include_folders = {named->value};
      return Status();
    }
    MARLIN_ASSIGN_OR_RETURN(folder_,
                            FromSimulator(metal_sim::TemporaryFolder::Make("marlin-metal-")));
    root_ = folder_.path();
    options_.include_folders = {root_.string()};
    std::error_code error;
    for (const KernelFile& source : KernelFiles()) {
      const fs::path path = root_ / source.path;
      fs::create_directories(path.parent_path(), error);
      std::ofstream file(path, std::ios::binary);
      file.write(source.text.data(), static_cast<std::streamsize>(source.text.size()));
      file.close();
      if (!file) return Status(Code::kIo, path.string() + ": cannot be written");
    }
    return Status();
  }

  /// A program for exclusive use until GiveBack.
  Result<std::unique_ptr<MetalProgram>> Take(std::string_view source) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto& free = free_[std::string(source)];
      if (!free.empty()) {
        auto program = std::move(free.back());
        free.pop_back();
        return program;
      }
    }
    return FromSimulator(MetalProgram::Compile(root_ / PathOfKernelFile(source), options_));
  }

  void GiveBack(std::string_view source, std::unique_ptr<MetalProgram> program) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_[std::string(source)].push_back(std::move(program));
  }

 private:
  metal_sim::CompileOptions options_;
  fs::path root_;
  metal_sim::TemporaryFolder folder_;  ///< Without METAL_MARLIN_METAL_SIM_SOURCES.
  std::mutex mutex_;
  std::map<std::string, std::vector<std::unique_ptr<MetalProgram>>> free_;
};

class SimulatedDriver final : public HostMemoryDriver {
 public:
  SimulatedDriver(metal_sim::CompileOptions compile, metal_sim::SimulationOptions options,
                  std::vector<SimulatedLaunch>* record, std::function<bool()> drops,
                  bool count_slots)
      : fast_math_(compile.fast_math),
        programs_(std::move(compile)),
        options_(options),
        record_(record),
        order_(std::move(drops)),
        slots_(count_slots ? std::make_unique<LaunchSlots>() : nullptr) {}

  Status Start() {
    MARLIN_RETURN_IF_ERROR(FromSimulator(metal_sim::MetalCompiler::Check(SimulatorCompiler())));
    return programs_.WriteSources();
  }

  DriverInfo Info() const override {
    return {"metal-sim", "simulator", {"MSL 3.1", "checks races, bounds, initialisation"}};
  }
  DeviceShape Shape() const override { return {kSimulatedCores, true, fast_math_}; }

  Status Run(std::span<const KernelLaunch> launches, void* /*stream*/) override {
    Together together;
    for (const KernelLaunch& launch : launches) {
      const uint64_t number = order_.Begin(launch);
      if (number != together.number) {
        MARLIN_RETURN_IF_ERROR(RunTogether(together));
        together = {number, {}};
      }
      together.launches.push_back(&launch);
    }
    return RunTogether(together);
  }
  Status Synchronize(void* /*stream*/) override {
    order_.Barrier();
    return Status();
  }

 private:
  /// Launches without a barrier between them.
  struct Together {
    uint64_t number = 0;
    std::vector<const KernelLaunch*> launches;
  };

  Status RunTogether(const Together& together) {
    std::vector<size_t> turns(together.launches.size());
    std::iota(turns.begin(), turns.end(), size_t{0});
    if (options_.seed != 0) {
      metal_sim::SplitMix64 random(options_.seed + together.number);
      for (size_t left = turns.size(); left > 1; --left) {
        std::swap(turns[left - 1], turns[random.Next() % left]);
      }
    }
    std::vector<SimulatedLaunch> simulated(turns.size());
    for (const size_t turn : turns) {
      const KernelLaunch& launch = *together.launches[turn];
      MARLIN_ASSIGN_OR_RETURN(Outcome outcome, RunOne(launch));
      MARLIN_RETURN_IF_ERROR(
          order_.End(together.number, launch, std::move(outcome.report.observed)));
      simulated[turn] = {std::string(launch.function), std::move(outcome.report.counters),
                         outcome.slots};
    }
    if (record_ != nullptr) {
      std::move(simulated.begin(), simulated.end(), std::back_inserter(*record_));
    }
    return Status();
  }

  struct Outcome {
    metal_sim::Report report;
    int64_t slots = 0;
  };

  Result<Outcome> RunOne(const KernelLaunch& launch) {
    MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<MetalProgram> program, programs_.Take(launch.source));
    Result<Outcome> outcome = Simulate(launch, *program);
    programs_.GiveBack(launch.source, std::move(program));
    return outcome;
  }

  Result<Outcome> Simulate(const KernelLaunch& launch, MetalProgram& program) const {
    MARLIN_ASSIGN_OR_RETURN(const metal_sim::Kernel* const kernel,
                            FromSimulator(program.Find(std::string(launch.function))));
    MARLIN_RETURN_IF_ERROR(FromSimulator(program.SetConstants(ConstantsOf(launch, program))));
    metal_sim::Launch described;
    described.grid = {launch.threadgroups[0], launch.threadgroups[1], launch.threadgroups[2]};
    described.threads_per_threadgroup = {launch.threads, 1, 1};
    described.program_ranges = program.ranges();
    for (const KernelBuffer& buffer : launch.buffers) {
      metal_sim::BufferBinding binding;
      binding.data = const_cast<void*>(buffer.data);  // Read-only bindings are never written.
      binding.bytes = buffer.bytes;
      binding.read_only = !buffer.written;
      binding.initialised = buffer.cleared;
      described.buffers[buffer.index] = binding;
    }
    if (launch.reached != nullptr) {
      for (const MemoryRange& range : launch.reached->ranges) {
        described.reached_ranges.emplace_back(
            range.data, static_cast<const std::byte*>(range.data) + range.bytes);
      }
    }
    for (const AddressedRange& range : launch.addressed) {
      if (range.bytes == 0) continue;
      const auto* const begin = static_cast<const std::byte*>(range.data);
      described.addressed_ranges.push_back({begin, begin + range.bytes, range.written});
    }
    const std::span<const std::byte> bytes = ParameterBytes(launch);
    std::vector<uint8_t>& parameters = described.values[MARLIN_BUFFER_PARAMETERS];
    parameters.resize(bytes.size());
    std::memcpy(parameters.data(), bytes.data(), bytes.size());
    Outcome outcome;
    if (slots_ != nullptr) {
      MARLIN_ASSIGN_OR_RETURN(outcome.slots, slots_->Count(launch, described));
    }
    MARLIN_ASSIGN_OR_RETURN(outcome.report,
                            FromSimulator(metal_sim::Simulate(*kernel, described, options_)));
    if (!outcome.report.clean()) return FirstFinding(launch, program, outcome.report);
    return outcome;
  }

  static metal_sim::ConstantValues ConstantsOf(const KernelLaunch& launch,
                                               const MetalProgram& program) {
    metal_sim::ConstantValues values;
    const metal_sim::Module& module = program.module();
    for (int i = 0; i < module.constant_count; ++i) {
      const int index = module.constants[i].index;
      const int32_t value = launch.constants[static_cast<size_t>(index)];
      std::vector<uint8_t>& bytes = values[index];
      bytes.resize(sizeof(value));
      std::memcpy(bytes.data(), &value, sizeof(value));
    }
    return values;
  }

  static Status FirstFinding(const KernelLaunch& launch, const MetalProgram& program,
                             const metal_sim::Report& report) {
    const metal_sim::Finding& first = report.findings.front();
    const std::vector<std::string> places = program.Locate({first.site, first.other_site});
    return Status(
        Code::kInternal,
        fmt::format("{}: {}: {}: {}{} ({} findings)", launch.function, places[0],
                    metal_sim::FindingKindName(first.kind), first.text,
                    places[1].empty() ? "" : " and " + places[1], report.findings.size()));
  }

  const bool fast_math_;
  Programs programs_;
  metal_sim::SimulationOptions options_;
  std::vector<SimulatedLaunch>* const record_;  ///< Or null.
  SimulatedOrder order_;
  const std::unique_ptr<LaunchSlots> slots_;  ///< Or null.
};

/// Parses a number in an environment variable; leaves `value` unchanged if it is unset or empty.
template <typename T>
Status ReadNumber(const char* name, T* value) {
  const auto given = ReadEnvironment(name);
  if (!given || given->value.empty() || ParseNumber(given->value, value)) return Status();
  return Status(Code::kInvalidArgument,
                fmt::format("{}: expected a number, got '{}'", given->name, given->value));
}

}  // namespace

Result<std::unique_ptr<Driver>> OpenSimulatedDriver(std::vector<SimulatedLaunch>* record,
                                                    std::function<bool()> drops, bool count_slots) {
  metal_sim::SimulationOptions options;
  MARLIN_RETURN_IF_ERROR(ReadNumber("METAL_MARLIN_METAL_SIM_SEED", &options.seed));
  MARLIN_RETURN_IF_ERROR(ReadNumber("METAL_MARLIN_METAL_SIM_PREEMPTION", &options.preemption));
  int fast_math = 0;
  MARLIN_RETURN_IF_ERROR(ReadNumber("METAL_MARLIN_METAL_SIM_FAST_MATH", &fast_math));
  metal_sim::CompileOptions compile;
  compile.fast_math = fast_math != 0;
  compile.clang = SimulatorCompiler();
  auto driver = std::make_unique<SimulatedDriver>(std::move(compile), options, record,
                                                  std::move(drops), count_slots);
  MARLIN_RETURN_IF_ERROR(driver->Start());
  return std::unique_ptr<Driver>(std::move(driver));
}

}  // namespace marlin::metal
