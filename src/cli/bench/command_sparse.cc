// bench sparse: GEMMs with 2:4 weights, each measured in turn with dense weights of its format.
#include "base/macros.h"
#include "cli/bench/baseline_argument.h"
#include "cli/bench/case_arguments.h"
#include "cli/bench/product_run.h"
#include "cli/command.h"

namespace marlin::cli {
namespace {

class BenchSparseCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    cases_.Declare(arguments);
    gemm_.Declare(arguments);
    baseline_.Declare(arguments);
    common_.Declare(arguments);
  }

  Status Run(Console& console) override {
    MARLIN_ASSIGN_OR_RETURN(const std::unique_ptr<BenchDevice> device, BenchDevice::Find(common_));
    MARLIN_ASSIGN_OR_RETURN(const GemmOptions options, gemm_.Options());
    MARLIN_RETURN_IF_ERROR(cases_.Read(device->beyond_cache_bytes()));
    MARLIN_RETURN_IF_ERROR(baseline_.Check(*device, cases_.shapes()));
    ProductRun run{"bench sparse", {}, baseline_.given()};
    const int64_t bytes = device->beyond_cache_bytes();
    for (const Format format : cases_.formats()) {
      for (const bench::GemmShape& shape : cases_.shapes()) {
        bench::BenchCase dense = cases_.MakeCase({format, Sparsity::kDense}, shape, bytes);
        bench::BenchCase sparse = cases_.MakeCase({format, Sparsity::k24}, shape, bytes);
        MARLIN_RETURN_IF_ERROR(CheckCaseFits(sparse));
        dense.options = sparse.options = options;
        run.groups.push_back({dense, sparse});
      }
    }
    MARLIN_RETURN_IF_ERROR(device->Open());
    return RunProducts(console, common_, *device, run);
  }

 private:
  CaseArguments cases_{"sparse"};
  GemmArguments gemm_;
  BaselineArgument baseline_;
  BenchArguments common_;
};

}  // namespace

std::unique_ptr<Command> Make_bench_sparse() { return std::make_unique<BenchSparseCommand>(); }

}  // namespace marlin::cli
