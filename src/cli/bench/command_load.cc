// bench load: loading a model until its weights are ready.
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "bench/document.h"
#include "bench/load.h"
#include "cli/bench/bench_device.h"
#include "cli/command.h"
#include "cli/progress_bar.h"

namespace marlin::cli {
namespace {

class BenchLoadCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("MODEL", &path_, "A plain or quantized model directory");
    arguments.Model(&path_);
    arguments.Option("--prepared", &options_.prepared, "FILE", "Weights that `prepare` wrote");
    common_.Declare(arguments);
  }

  Status Run(Console& console) override {
    MARLIN_ASSIGN_OR_RETURN(const std::unique_ptr<BenchDevice> device, BenchDevice::Find(common_));
    MARLIN_RETURN_IF_ERROR(device->Open());
    ProgressBar bar(console, "bench load");
    bar.Update(0, 1, path_);
    MARLIN_ASSIGN_OR_RETURN(const bench::LoadBench bench,
                            bench::BenchLoad(path_, device->device(), options_, common_.Timing()));
    bar.Clear();
    common_.device.SayTaken(console, bench.device);
    nlohmann::ordered_json document = bench::DocumentHead(bench.device, common_.commit);
    document["results"] = nlohmann::ordered_json::array({bench.ToJson()});
    return common_.Report(console, document, bench.ToText());
  }

 private:
  std::string path_;
  ModelOptions options_;
  BenchArguments common_;
};

}  // namespace

std::unique_ptr<Command> Make_bench_load() { return std::make_unique<BenchLoadCommand>(); }

}  // namespace marlin::cli
