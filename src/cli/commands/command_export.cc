// export: writes a checkpoint in another program's format.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "cli/checkpoint_listing.h"
#include "cli/command.h"
#include "cli/progress_bar.h"
#include "marlin/checkpoint.h"
#include "text/documents.h"

namespace marlin::cli {
namespace {

class ExportCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("SRC", &source_,
                         "A quantized checkpoint; for gguf also an unquantized one");
    arguments.Model(&source_);
    arguments.RequiredOption("-o,--output", &output_, "DST",
                             "The directory, for gguf without --shard-size the file, to write; it "
                             "appears whole or not at all");
    arguments.RequiredOption("--to", &target_, "LAYOUT",
                             fmt::format("{}", fmt::join(ConversionTargets(), ", ")).c_str());
    arguments.Choices(ConversionTargets());
    arguments.Option("--shard-size", &shard_size_, "SIZE",
                     "Largest safetensors file to write (5GB), or for gguf the largest shard");
    arguments.Flag("--allow-extra-tensors", &allow_extra_tensors_,
                   "Leave out tensors that the index does not list or the model does not have");
    arguments.Flag("--overwrite", &overwrite_, "Replace DST if it exists");
    arguments.Flag("--no-model-card", &no_model_card_, "Write no README.md");
  }

  Status Run(Console& console) override {
    MARLIN_RETURN_IF_ERROR(CheckTarget());
    ConvertCheckpointOptions options;
    options.target = target_;
    options.overwrite = overwrite_;
    options.allow_extra_tensors = allow_extra_tensors_;
    options.model_card = !no_model_card_;
    MARLIN_ASSIGN_OR_RETURN(options.shard_bytes,
                            ParseByteSize("--shard-size", shard_size_.value_or("5GB")));
    MARLIN_RETURN_IF_ERROR(CheckOutput());
    ProgressBar bar(console, "export");
    options.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
    const Result<ConvertCheckpointReport> report = ConvertCheckpoint(source_, output_, options);
    bar.Clear();
    if (!report.ok()) return report.status();
    if (console.json()) {
      return console.PrintJson({{"output", report->output},
                                {"target", report->target},
                                {"files", SkippedJson(report->files)},
                                {"notes", report->notes},
                                {"seconds", report->seconds}});
    }
    std::string text = fmt::format("{}: {}, every weight as in {}, {:.1f} s\n", output_, target_,
                                   source_, report->seconds);
    for (const SkippedTensor& file : report->files) text += WithoutLine(file);
    text += NoteLines(report->notes);
    return console.Print(text);
  }

 private:
  Status CheckTarget() const {
    const std::vector<std::string> known = ConversionTargets();
    if (std::find(known.begin(), known.end(), target_) != known.end()) return {};
    return Invalid(fmt::format("--to: unknown layout '{}'; known: {}", Printable(target_),
                               fmt::join(known, ", ")));
  }

  /// One GGUF file ends in .gguf, a directory of shards does not.
  Status CheckOutput() const {
    if (target_ != "gguf" || output_.ends_with(".gguf") != shard_size_.has_value()) return {};
    return Invalid(fmt::format("{}: {}", Printable(output_),
                               shard_size_ ? "with --shard-size it is the directory of the shards, "
                                             "whose name does not end in .gguf"
                                           : "gguf is one file, whose name must end in .gguf, "
                                             "unless --shard-size is given"));
  }

  std::string source_;
  std::string output_;
  std::string target_;
  std::optional<std::string> shard_size_;
  bool overwrite_ = false;
  bool allow_extra_tensors_ = false;
  bool no_model_card_ = false;
};

}  // namespace

std::unique_ptr<Command> Make_export() { return std::make_unique<ExportCommand>(); }

}  // namespace marlin::cli
