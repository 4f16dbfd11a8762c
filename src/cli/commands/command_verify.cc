// verify: checks the checksums of a quantized checkpoint, and its error against the source.
#include <fmt/core.h>

#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/text_table.h"
#include "checkpoint/files/verify_checksums.h"
#include "cli/command.h"
#include "cli/commands/verification.h"
#include "cli/progress_bar.h"
#include "marlin/checkpoint.h"
#include "marlin/prepared.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

/// JSON has no infinity: an exact tensor has no SQNR.
Json SqnrJson(const ErrorSums& errors) {
  const double sqnr = errors.SqnrDb();
  return std::isfinite(sqnr) ? Json(sqnr) : Json();
}

Json ErrorsJson(const ErrorSums& errors) {
  return {{"relative_error", errors.RelativeError()},
          {"sqnr_db", SqnrJson(errors)},
          {"max_error", errors.max_error},
          {"parameters", errors.parameters}};
}

std::vector<std::string> ErrorCells(const ErrorSums& errors) {
  if (errors.error_squares == 0) return {"exact", "", "0"};
  return {fmt::format("{:.3e}", errors.RelativeError()), fmt::format("{:.2f}", errors.SqnrDb()),
          fmt::format("{:.3e}", errors.max_error)};
}

class VerifyCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("QUANT", &path_, "A quantized checkpoint, or a file that `prepare` wrote");
    arguments.Option("--against", &against_, "SRC", "The checkpoint that it was made from");
    arguments.Model(&path_);
    arguments.Model(&against_);
    arguments.Option("--max-error", &max_error_, RealRange(), "X",
                     "Fail when a tensor's relative error exceeds this (needs --against)");
    arguments.Flag("--allow-extra-tensors", &allow_extra_tensors_,
                   "Leave out tensors that the index of QUANT or SRC does not list");
  }

  Status Check(const Console& /*console*/) const override {
    if (!max_error_ || against_) return {};
    return Invalid("--max-error needs --against");
  }

  Status Run(Console& console) override {
    if (IsPreparedModel(path_)) return VerifyPrepared(console);
    const CheckpointOptions opening{allow_extra_tensors_};
    MARLIN_ASSIGN_OR_RETURN(const Checkpoint quantized, Checkpoint::Open(path_, opening));
    if (quantized.quant_method().empty()) {
      return Invalid(fmt::format("{}: is not a quantized checkpoint", path_));
    }
    {
      ProgressBar bar(console, "verify");
      MARLIN_RETURN_IF_ERROR(VerifyChecksums(
          quantized, [&bar](int64_t done, int64_t total) { bar.Update(done, total); }));
    }
    Comparison comparison;
    if (against_) {
      MARLIN_ASSIGN_OR_RETURN(const Checkpoint source, Checkpoint::Open(*against_, opening));
      ProgressBar bar(console, "verify");
      MARLIN_ASSIGN_OR_RETURN(
          comparison, CompareCheckpoints(quantized, source, [&](int64_t done, int64_t total) {
            bar.Update(done, total);
          }));
    }
    Status verdict = Judge(comparison);
    MARLIN_RETURN_IF_ERROR(console.json()
                               ? PrintDocument(console, quantized, comparison, verdict.ok())
                               : PrintTables(console, quantized, comparison));
    return verdict;
  }

 private:
  Status VerifyPrepared(Console& console) const {
    if (against_) {
      return Invalid(
          fmt::format("{}: prepared weights have no --against; verify the directory", path_));
    }
    MARLIN_RETURN_IF_ERROR(VerifyPreparedModel(path_));
    if (console.json()) return console.PrintJson({{"ok", true}, {"tensors", Json::array()}});
    return console.Print(EscapeUnprintable(path_) + ": all checksums match\n");
  }

  Status Judge(const Comparison& comparison) const {
    const TensorComparison* worst = comparison.Worst();
    if (!max_error_ || worst == nullptr) return Status();
    const double error = worst->errors.RelativeError();
    if (error <= *max_error_) return Status();
    return Status(Code::kMalformedFile,
                  fmt::format("{}: relative error {:.6g}, at most {:.6g} allowed",
                              Printable(worst->name), error, *max_error_));
  }

  static Status PrintDocument(Console& console, const Checkpoint& quantized,
                              const Comparison& comparison, bool ok) {
    Json document = {{"ok", ok},
                     {"checksums", quantized.quantized() ? quantized.tensors().size() : 0},
                     {"tensors", Json::array()},
                     {"classes", Json::array()}};
    for (const TensorComparison& tensor : comparison.tensors) {
      Json row = {{"name", tensor.name},
                  {"format", tensor.format},
                  {"layer_class", LayerClassName(tensor.layer_class)}};
      row.update(ErrorsJson(tensor.errors));
      document["tensors"].push_back(std::move(row));
    }
    for (size_t i = 0; i < comparison.classes.size(); ++i) {
      if (comparison.classes[i].parameters == 0) continue;
      Json row = {{"layer_class", LayerClassName(static_cast<LayerClass>(i))}};
      row.update(ErrorsJson(comparison.classes[i]));
      document["classes"].push_back(std::move(row));
    }
    return console.PrintJson(document);
  }

  Status PrintTables(Console& console, const Checkpoint& quantized,
                     const Comparison& comparison) const {
    std::string text = EscapeUnprintable(path_);
    text += quantized.quantized()
                ? fmt::format(": {}, all checksums match\n",
                              FormatCounted(std::ssize(quantized.tensors()), "tensor"))
                : fmt::format(": {}, all valid; {} files have no checksums\n",
                              FormatCounted(std::ssize(quantized.modules()), "module"),
                              quantized.quant_method());
    if (against_) text += fmt::format("\n{}\n{}", TensorTable(comparison), ClassTable(comparison));
    return console.Print(text);
  }

  /// Tensors kept bit for bit are counted, not listed.
  static std::string TensorTable(const Comparison& comparison) {
    Table table({"tensor", "format", "relative error", "SQNR dB", "max error"}, 2);
    int64_t exact = 0;
    for (const TensorComparison& tensor : comparison.tensors) {
      if (tensor.errors.error_squares == 0) {
        ++exact;
        continue;
      }
      std::vector<std::string> cells = {tensor.name, tensor.format};
      for (std::string& cell : ErrorCells(tensor.errors)) cells.push_back(std::move(cell));
      table.AddRow(std::move(cells));
    }
    return table.ToString() + fmt::format("and {} without error\n", FormatCounted(exact, "tensor"));
  }

  static std::string ClassTable(const Comparison& comparison) {
    Table table({"layer class", "parameters", "relative error", "SQNR dB", "max error"});
    const auto add = [&table](std::string name, const ErrorSums& errors) {
      std::vector<std::string> cells = {std::move(name), FormatCount(errors.parameters)};
      for (std::string& cell : ErrorCells(errors)) cells.push_back(std::move(cell));
      table.AddRow(std::move(cells));
    };
    for (size_t i = 0; i < comparison.classes.size(); ++i) {
      if (comparison.classes[i].parameters == 0) continue;
      add(std::string(LayerClassName(static_cast<LayerClass>(i))), comparison.classes[i]);
    }
    add("total", comparison.total);
    return table.ToString();
  }

  std::string path_;
  std::optional<std::string> against_;
  std::optional<double> max_error_;
  bool allow_extra_tensors_ = false;
};

}  // namespace

std::unique_ptr<Command> Make_verify() { return std::make_unique<VerifyCommand>(); }

}  // namespace marlin::cli
