// bench gemm: GEMMs with quantized weights, compared with dense ones.
#include "base/macros.h"
#include "cli/bench/baseline_argument.h"
#include "cli/bench/case_arguments.h"
#include "cli/bench/kernel_choice.h"
#include "cli/bench/product_run.h"
#include "cli/command.h"

namespace marlin::cli {
namespace {

class BenchGemmCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    cases_.Declare(arguments);
    cases_.DeclareSparsity(arguments);
    gemm_.Declare(arguments);
    arguments.Option("--kernel", &kernel_, "NAME",
                     "Forces one kernel, or NAME@WIDTHxSPLITS; all, on a GPU: every variant");
    baseline_.Declare(arguments);
    common_.Declare(arguments);
  }

  Status Run(Console& console) override {
    MARLIN_ASSIGN_OR_RETURN(const std::unique_ptr<BenchDevice> device, BenchDevice::Find(common_));
    MARLIN_ASSIGN_OR_RETURN(GemmOptions options, gemm_.Options());
    options.kernel = kernel_;
    MARLIN_RETURN_IF_ERROR(cases_.Read(device->beyond_cache_bytes()));
    MARLIN_RETURN_IF_ERROR(baseline_.Check(*device, cases_.shapes()));
    MARLIN_RETURN_IF_ERROR(device->Open());
    ProductRun run{"bench gemm", {}, baseline_.given()};
    for (bench::BenchCase& each : cases_.AllCases(device->beyond_cache_bytes())) {
      each.options = options;
      run.groups.push_back({each});
    }
    MARLIN_RETURN_IF_ERROR(CheckKernel(*device, run));
    return RunProducts(console, common_, *device, run);
  }

 private:
  Status CheckKernel(const BenchDevice& device, const ProductRun& run) const {
    if (kernel_.empty() || (kernel_ == "all" && device.is_cuda())) return {};
    MARLIN_RETURN_IF_ERROR(CheckKernelName(device.device(), kernel_));
    for (const std::vector<bench::BenchCase>& group : run.groups) {
      MARLIN_RETURN_IF_ERROR(CheckKernelRuns(device.device(), group.front()));
    }
    return {};
  }

  CaseArguments cases_{"gemm"};
  GemmArguments gemm_;
  std::string kernel_;
  BaselineArgument baseline_;
  BenchArguments common_;
};

}  // namespace

std::unique_ptr<Command> Make_bench_gemm() { return std::make_unique<BenchGemmCommand>(); }

}  // namespace marlin::cli
