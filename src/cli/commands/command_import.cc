// import: converts a checkpoint of another program to a directory of this one.
#include <fmt/core.h>

#include <map>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "base/text_table.h"
#include "cli/arguments/recipe_arguments.h"
#include "cli/checkpoint_listing.h"
#include "cli/command.h"
#include "cli/progress_bar.h"
#include "marlin/checkpoint.h"
#include "text/documents.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

/// Growth below this is not worth a word: a global scale of a small matrix.
constexpr double kSameSize = 1.005;

/// "exact" or "exact, 1.33x larger".
std::string Verdict(const ImportedModule& module) {
  if (module.growth < kSameSize) return module.exactness;
  return fmt::format("{}, {:.2f}x larger", module.exactness, module.growth);
}

bool IsRounded(const ImportedModule& module) { return module.exactness == "re-rounded"; }

class ImportCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("SRC", &source_,
                         "A GGUF file, or a directory that another program quantized");
    arguments.Model(&source_);
    arguments.RequiredOption("-o,--output", &output_, "DST",
                             "The directory to write; it appears whole or not at all");
    arguments.Option("--shard-size", &shard_size_, "SIZE", "Largest file to write");
    arguments.Flag("--allow-requantize", &allow_requantize_,
                   "Quantize matrices that no format of codes holds, to s8 in groups of 32");
    arguments.Flag("--allow-extra-tensors", &allow_extra_tensors_,
                   "Leave out tensors that the index does not list or the model does not have");
    arguments.Flag("--dry-run", &dry_run_, "Report, write nothing");
    arguments.Flag("--overwrite", &overwrite_, "Replace DST if it exists");
    arguments.Flag("--no-model-card", &no_model_card_, "Write no README.md");
  }

  Status Run(Console& console) override {
    ImportCheckpointOptions options;
    MARLIN_ASSIGN_OR_RETURN(options.shard_bytes, ParseByteSize("--shard-size", shard_size_));
    options.overwrite = overwrite_;
    options.model_card = !no_model_card_;
    options.dry_run = dry_run_;
    options.allow_extra_tensors = allow_extra_tensors_;
    options.allow_requantize = allow_requantize_;
    ProgressBar bar(console, "import");
    options.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
    const Result<ImportCheckpointReport> report = ImportCheckpoint(source_, output_, options);
    bar.Clear();
    if (!report.ok()) return report.status();
    return console.json() ? PrintDocument(console, *report) : PrintSummary(console, *report);
  }

 private:
  Status PrintDocument(Console& console, const ImportCheckpointReport& report) const {
    Json modules = Json::array();
    for (const ImportedModule& module : report.modules) {
      modules.push_back({{"name", module.name},
                         {"format", FormatName(module.spec.format)},
                         {"group_size", module.spec.group_size},
                         {"exactness", module.exactness},
                         {"growth", module.growth}});
      if (!IsRounded(module)) continue;
      modules.back()["relative_error"] = module.relative_error;
      modules.back()["max_error"] = module.max_error;
    }
    return console.PrintJson({{"output", report.output},
                              {"method", report.method},
                              {"dry_run", dry_run_},
                              {"tensors", report.tensors},
                              {"parameters", report.parameters},
                              {"quantized_parameters", report.quantized_parameters},
                              {"bits_per_weight", report.bits_per_weight},
                              {"bytes", report.bytes},
                              {"source_bytes", report.source_bytes},
                              {"coverage", report.coverage},
                              {"modules", modules},
                              {"skipped", SkippedJson(report.skipped)},
                              {"files", SkippedJson(report.files)},
                              {"notes", report.notes},
                              {"seconds", report.seconds}});
  }

  Status PrintSummary(Console& console, const ImportCheckpointReport& report) const {
    std::string text = fmt::format(
        "{}{}: {} parameters in {}, {} ({} in the source), {:.3f} bits per weight, from "
        "{}, "
        "{:.1f} s\n",
        dry_run_ ? "(dry run) " : "", report.output, FormatCount(report.parameters),
        FormatCounted(report.tensors, "tensor"), FormatBytes(report.bytes),
        FormatBytes(report.source_bytes), report.bits_per_weight,
        report.method.empty() ? "floats" : report.method, report.seconds);
    text += CoverageLines(report.coverage, report.skipped);
    struct Group {
      int64_t modules = 0;
      int64_t parameters = 0;
    };
    std::map<std::pair<std::string, std::string>, Group> groups;
    for (const ImportedModule& module : report.modules) {
      const std::string format =
          fmt::format("{}/g{}", FormatName(module.spec.format), module.spec.group_size);
      Group& group = groups[{format, Verdict(module)}];
      ++group.modules;
      group.parameters += module.spec.experts * module.spec.k * module.spec.n;
    }
    Table table({"format", "modules", "parameters", "values"});
    for (const auto& [key, group] : groups) {
      table.AddRow(
          {key.first, FormatInteger(group.modules), FormatCount(group.parameters), key.second});
    }
    if (!groups.empty()) text += table.ToString();
    for (const ImportedModule& module : report.modules) {
      if (!IsRounded(module) || dry_run_) continue;
      text += fmt::format("re-rounded {}: relative error {:.3e}, largest {:.3e}\n", module.name,
                          module.relative_error, module.max_error);
    }
    for (const SkippedTensor& file : report.files) text += WithoutLine(file);
    text += NoteLines(report.notes);
    return console.Print(text);
  }

  std::string source_;
  std::string output_;
  std::string shard_size_ = "5GB";
  bool allow_requantize_ = false;
  bool dry_run_ = false;
  bool allow_extra_tensors_ = false;
  bool overwrite_ = false;
  bool no_model_card_ = false;
};

}  // namespace

std::unique_ptr<Command> Make_import() { return std::make_unique<ImportCommand>(); }

}  // namespace marlin::cli
