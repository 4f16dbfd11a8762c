// convert: writes a quantized checkpoint in the format of another program.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "base/text_table.h"
#include "cli/command.h"
#include "cli/progress_bar.h"
#include "marlin/checkpoint.h"

namespace marlin::cli {
namespace {

class ConvertCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("SRC", &source_, "A quantized checkpoint");
    arguments.RequiredOption("-o,--output", &output_, "DST",
                             "The directory to write; it appears whole or not at all");
    arguments.RequiredOption("--to", &target_, "FORMAT",
                             fmt::format("{}", fmt::join(ConversionTargets(), ", ")).c_str());
    arguments.Flag("--overwrite", &overwrite_, "Replace DST if it exists");
  }

  Status Run(Console& console) override {
    const auto start = std::chrono::steady_clock::now();
    {
      ProgressBar bar(console, "convert");
      MARLIN_RETURN_IF_ERROR(
          ConvertCheckpoint(source_, output_, target_, overwrite_,
                            [&bar](int64_t done, int64_t total) { bar.Update(done, total); }));
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (console.json()) {
      return console.PrintJson(
          {{"output", output_}, {"target", target_}, {"seconds", elapsed.count()}});
    }
    return console.Print(fmt::format("{}: {}, every weight as in {}, in {:.1f} s\n", output_,
                                     target_, source_, elapsed.count()));
  }

 private:
  std::string source_;
  std::string output_;
  std::string target_;
  bool overwrite_ = false;
};

}  // namespace

std::unique_ptr<Command> Make_convert() { return std::make_unique<ConvertCommand>(); }

}  // namespace marlin::cli
