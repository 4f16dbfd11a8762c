// marlin_conformance: every kernel row against the double-precision reference.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "guarded_buffer.h"
#include "suite.h"

namespace {

using marlin::conformance::GuardedBuffer;
using marlin::conformance::SuiteOptions;

int Run(int argc, char** argv) {
  SuiteOptions options;
  bool no_guards = false;
  CLI::App app("Tests every kernel against the double-precision reference.");
  app.add_option("--case", options.name, "Run the one case of this name");
  app.add_option("--filter", options.filter, "Run the cases whose name matches this regex");
  app.add_option("--device", options.device,
                 "Test the kernels of cpu, cuda, metal (a Mac's GPU, elsewhere its simulator) or "
                 "all (default)")
      ->check(CLI::IsMember({"cpu", "cuda", "metal", "all"}));
  app.add_option("--level", options.level,
                 "Test only the CPU kernels of one ISA level: scalar, avx2, avx512, amx or neon")
      ->check(CLI::IsMember({"scalar", "avx2", "avx512", "amx", "neon"}));
  app.add_option("--jobs", options.jobs, "Problems in flight; 0: one per processor")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--repeat", options.repetitions, "Number of runs of every repeat check")
      ->check(CLI::PositiveNumber);
  app.add_flag("--large", options.large,
               "Run only the problems with more than 2^31 elements, on a GPU");
  app.add_flag("--no-guards", no_guards,
               "Omit the guard zone behind the data, for external memory checkers");
  app.add_flag("--list", options.list, "Print the case names and exit");
  app.add_flag("--json", options.json, "Print one JSON document on stdout");
  app.add_flag("--progress", options.progress,
               "Print the name of each case on stderr before it runs, to tell a crash's");
  app.add_flag("--nightly", options.nightly, "Run the larger nightly selection");
  app.add_flag("--stop", options.stop_at_failure, "Stop at the first failure");
  app.add_flag("--mixed", options.mixed,
               "Take problems of all formats and shapes in turn, for a failure that comes soon");
  app.add_option("--expected", options.expected_path, "Compare the counts with this file");
  app.add_option("--write-expected", options.write_expected_path, "Write the counts to this file");
  app.add_option("--write-models", options.write_models_path,
                 "Write the error models and worst ratios as Markdown");
  app.add_option("--check-models", options.check_models_path,
                 "Compare the error models with this Markdown file");
  CLI11_PARSE(app, argc, argv);
  if (no_guards) GuardedBuffer::trailing_bytes = 0;
  return marlin::conformance::RunSuite(options);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "marlin_conformance: {}\n", error.what());
    return 70;
  }
}
