#include "cli/bench/bench_arguments.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "bench/document.h"
#include "text/product_names.h"

namespace marlin::cli {

void BenchArguments::Declare(ArgumentList& arguments) {
  arguments.Group("Measurement");
  device.Declare(arguments, "auto, cpu, cuda, cuda:N or metal");
  arguments.Option("--threads", &threads, kThreadRange, "N",
                   "Threads of the CPU; default: all processors");
  arguments.Option("--max-time", &max_time, {.least = 0, .without_least = true}, "S",
                   "Seconds to measure each case at most, and three times at least; default 4");
  arguments.Option("--record", &record, "FILE", "Also writes the JSON document, dated, to FILE");
  arguments.Option("--commit", &commit, "HASH",
                   "The commit of this program, which the record names");
}

bench::TimingOptions BenchArguments::Timing() const {
  bench::TimingOptions timing;
  timing.max_seconds = max_time.value_or(timing.max_seconds);
  timing.min_seconds = std::min(timing.min_seconds, timing.max_seconds);
  return timing;
}

Status BenchArguments::Report(Console& console, const nlohmann::ordered_json& document,
                              const std::string& text) const {
  if (!record.empty()) {
    std::ofstream file(record, std::ios::trunc);
    file << bench::RecordText(document);
    file.close();
    if (!file) return Status(Code::kIo, record + ": cannot be written");
  }
  return console.json() ? console.PrintJson(document) : console.Print(text);
}

void GemmArguments::Declare(ArgumentList& arguments) {
  arguments.Group("Kernels");
  arguments.Option("--accuracy", &accuracy, "ACCURACY", "Accuracy class: default, exact or w4a8");
  arguments.Choices({"default", "exact", "w4a8"});
  arguments.Flag("--batch-invariant", &batch_invariant,
                 "Results of a row do not depend on the other rows");
}

Result<GemmOptions> GemmArguments::Options() const {
  const Result<Accuracy> known = ParseAccuracy(accuracy);
  if (!known.ok()) return known.status().WithContext("--accuracy");
  GemmOptions options;
  options.accuracy = *known;
  options.determinism = batch_invariant ? Determinism::kBatchInvariant : Determinism::kDefault;
  return options;
}

}  // namespace marlin::cli
