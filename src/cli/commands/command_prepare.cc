// prepare: writes a model's prepared weights to a file that later starts map.
#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "base/macros.h"
#include "base/text_table.h"
#include "cli/arguments/device_argument.h"
#include "cli/command.h"
#include "cli/progress_bar.h"
#include "marlin/prepared.h"
#include "text/documents.h"

namespace marlin::cli {
namespace {

class PrepareCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("MODEL", &model_, "A plain or quantized directory");
    arguments.Model(&model_);
    arguments.RequiredOption("-o,--output", &output_, "FILE",
                             "The file to write; it appears whole or not at all");
    device_.Declare(arguments, "auto or cpu");
    arguments.Option("--threads", &threads_, kThreadRange, "N",
                     "Threads of the CPU; default: all processors");
    arguments.Flag("--overwrite", &overwrite_, "Replace FILE if it is a prepared-weight file");
  }

  Status Run(Console& console) override {
    MARLIN_ASSIGN_OR_RETURN(const Device device,
                            device_.Open({static_cast<int>(threads_.value_or(0))}));
    PrepareModelOptions options;
    options.overwrite = overwrite_;
    ProgressBar bar(console, "prepare");
    options.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
    MARLIN_ASSIGN_OR_RETURN(const PrepareModelReport report,
                            PrepareModel(model_, device, output_, options));
    bar.Clear();
    if (console.json()) {
      return console.PrintJson(PreparedDocument(report));
    }
    return console.Print(
        fmt::format("{}: {} in the layout {}, {:.1f} s\nrun it with: metal-marlin generate {} "
                    "--prepared {} ...\n",
                    report.output, FormatBytes(report.bytes), report.layout, report.seconds, model_,
                    report.output));
  }

 private:
  std::string model_;
  std::string output_;
  DeviceArgument device_;
  std::optional<int64_t> threads_;
  bool overwrite_ = false;
};

}  // namespace

std::unique_ptr<Command> Make_prepare() { return std::make_unique<PrepareCommand>(); }

}  // namespace marlin::cli
