// bench dequantize: expanding weights to the type of activations.
#include "base/macros.h"
#include "cli/bench/case_arguments.h"
#include "cli/bench/product_run.h"
#include "cli/command.h"

namespace marlin::cli {
namespace {

class BenchDequantizeCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    cases_.Declare(arguments);
    cases_.DeclareSparsity(arguments);
    common_.Declare(arguments);
  }

  Status Run(Console& console) override {
    MARLIN_ASSIGN_OR_RETURN(const std::unique_ptr<BenchDevice> device, BenchDevice::Find(common_));
    MARLIN_RETURN_IF_ERROR(cases_.Read(device->beyond_cache_bytes()));
    MARLIN_RETURN_IF_ERROR(device->Open());
    ProductRun run{"bench dequantize", {}, false};
    for (bench::BenchCase& each : cases_.AllCases(device->beyond_cache_bytes())) {
      run.groups.push_back({std::move(each)});
    }
    return RunProducts(console, common_, *device, run);
  }

 private:
  CaseArguments cases_{"dequantize",
                       "A matrix of k x n weights; m does not count; may be repeated"};
  BenchArguments common_;
};

}  // namespace

std::unique_ptr<Command> Make_bench_dequantize() {
  return std::make_unique<BenchDequantizeCommand>();
}

}  // namespace marlin::cli
