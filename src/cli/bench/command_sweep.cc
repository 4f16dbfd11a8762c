// bench sweep: random GEMMs, by their distance from the roofline.
#include <nlohmann/json.hpp>
#include <optional>

#include "base/macros.h"
#include "bench/sweep.h"
#include "cli/bench/bench_device.h"
#include "cli/bench/kernel_choice.h"
#include "cli/bench/machine.h"
#include "cli/command.h"
#include "cli/progress_bar.h"

namespace marlin::cli {
namespace {

class BenchSweepCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Option("--count", &count_, {.least = 1}, "N", "Random problems; default 50");
    arguments.Option("--seed", &seed_, {.least = 0}, "N", "Seed of the problems; default 1");
    arguments.Option("--seconds", &seconds_, {.least = 0, .without_least = true}, "S",
                     "Begins no problem after this time; default: no limit");
    arguments.Option("--kernel", &kernel_, "NAME",
                     "Forces one kernel; all: also times the kernels that were not selected");
    gemm_.Declare(arguments);
    common_.Declare(arguments);
  }

  Status Run(Console& console) override {
    MARLIN_ASSIGN_OR_RETURN(const std::unique_ptr<BenchDevice> device, BenchDevice::Find(common_));
    MARLIN_ASSIGN_OR_RETURN(const bench::SweepOptions options, Options());
    MARLIN_RETURN_IF_ERROR(device->Open());
    if (!options.gemm.kernel.empty()) {
      MARLIN_RETURN_IF_ERROR(CheckKernelName(device->device(), kernel_));
    }
    if (device->device().info().backend != "cpu") {
      return Status(Code::kUnsupported, "bench sweep: only on a CPU, got " + device->name());
    }
    ProgressBar bar(console, "bench sweep");
    bar.Update(0, options.count, "measuring this machine");
    MARLIN_ASSIGN_OR_RETURN(const std::unique_ptr<Machine> machine,
                            Machine::Measure(*device, device->device()));
    MARLIN_ASSIGN_OR_RETURN(
        const bench::Sweep sweep,
        bench::Sweep::Run(machine->device(), machine->probe(), machine->ceilings(), options,
                          [&](int64_t done, int64_t total, const std::string& next) {
                            bar.Update(done, total, next);
                          }));
    bar.Clear();
    nlohmann::ordered_json document = machine->Document(common_.commit);
    document.update(sweep.ToJson());
    return common_.Report(console, document, machine->Heading() + sweep.ToText());
  }

 private:
  Result<bench::SweepOptions> Options() const {
    bench::SweepOptions options;
    options.count = count_.value_or(options.count);
    options.seed = seed_.value_or(options.seed);
    options.seconds = seconds_.value_or(options.seconds);
    options.others = kernel_ == "all";
    options.timing = common_.Timing();
    MARLIN_ASSIGN_OR_RETURN(options.gemm, gemm_.Options());
    if (!options.others) options.gemm.kernel = kernel_;
    return options;
  }

  std::optional<int64_t> count_;
  std::optional<int64_t> seed_;
  std::optional<double> seconds_;
  std::string kernel_;
  GemmArguments gemm_;
  BenchArguments common_;
};

}  // namespace

std::unique_ptr<Command> Make_bench_sweep() { return std::make_unique<BenchSweepCommand>(); }

}  // namespace marlin::cli
