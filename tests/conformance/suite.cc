#include "suite.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <vector>

#include "cases.h"
#include "report.h"
#include "runner.h"

namespace marlin::conformance {
namespace {

class Suite {
 public:
  Suite(const SuiteOptions& options, const Machine& machine)
      : options_(options), machine_(machine), filter_(options.filter) {
    for (const Row& row : machine.rows()) counts_[row.name];
  }

  // Runs one problem on all rows that take it and that the filter names.
  void RunProblem(const Case& problem) {
    std::unique_ptr<Problem> data;
    for (const Row& row : machine_.rows()) {
      if (!Takes(row, problem)) continue;
      Case c = problem;
      c.kernel = row.name;
      const std::string name = CaseName(c);
      if (!options_.filter.empty() && !std::regex_search(name, filter_)) continue;
      const Result<Case> parsed = ParseCase(name);
      if (!parsed.ok() || *parsed != c) {
        Record(row, name, {Outcome::kFailed, "the name does not give this case back", 0});
        continue;
      }
      if (options_.list) {
        fmt::print("{}\n", name);
        continue;
      }
      if (!row.unavailable.empty()) {
        ++counts_[row.name].skipped;
        continue;
      }
      if (data == nullptr) {
        Result<std::unique_ptr<Problem>> made = MakeProblem(problem);
        if (!made.ok()) {
          Record(row, name, {Outcome::kFailed, made.status().message(), 0});
          continue;
        }
        data = std::move(*made);
      }
      Record(row, name, RunCase(machine_, row, c, *data));
    }
  }

  // Prints the summary; returns the exit code.
  int Finish() {
    if (options_.list) return 0;
    std::vector<std::string> violations;
    if (!options_.expected_path.empty()) {
      violations = CompareCounts(machine_, counts_, options_.expected_path);
    }
    if (!options_.check_models_path.empty()) {
      const std::string difference = CompareModels(machine_, options_.check_models_path);
      if (!difference.empty()) violations.push_back(difference);
    }
    WriteFiles(&violations);
    if (options_.json) {
      PrintJson(violations);
    } else {
      PrintTable(violations);
    }
    return failed_ > 0 || !violations.empty() || (passed_ == 0 && skipped_ == 0) ? 1 : 0;
  }

  bool Stopped() const { return options_.stop_at_failure && failed_ > 0; }

 private:
  static bool Takes(const Row& row, const Case& problem) {
    const bool wants_dequantize = problem.check == Check::kDequantize;
    if (wants_dequantize != (row.op == "dequantize")) return false;
    if (problem.data != DataClass::kLatticeInt8 || wants_dequantize) return true;
    // The int8 lattice is judged on the int8 kernels, and on the scalar one to check the data.
    if (row.desc == nullptr) return false;
    return row.desc->grade == Grade::kW4A8 || row.level == Isa::kScalar;
  }

  // Of "no kernel for <problem>: <kernel>: <reason>" what does not depend on the problem.
  static std::string Reason(const Row& row, const std::string& message) {
    const size_t at = message.rfind(row.name + ": ");
    return at == std::string::npos ? row.name + ": " + message : message.substr(at);
  }

  void Record(const Row& row, const std::string& name, const CaseResult& result) {
    RowCounts& counts = counts_[row.name];
    switch (result.outcome) {
      case Outcome::kPassed:
        ++counts.passed;
        ++passed_;
        break;
      case Outcome::kFailed:
        ++counts.failed;
        ++failed_;
        break;
      case Outcome::kUnsupported:
        ++counts.unsupported;
        ++reasons_[Reason(row, result.message)];
        break;
      case Outcome::kMistrusted:
        ++counts.mistrusted;
        break;
    }
    if (result.outcome == Outcome::kPassed && result.worst_ratio > counts.worst_ratio) {
      counts.worst_ratio = result.worst_ratio;
      counts.worst_case = name;
    }
    if (!options_.name.empty() && result.outcome != Outcome::kFailed) {
      constexpr const char* kNames[] = {"passed", "failed", "unsupported", "mistrusted"};
      fmt::print(stderr, "{} {} (error {:.3f} of the tight bound) {}\n",
                 kNames[static_cast<int>(result.outcome)], name, result.worst_ratio,
                 result.message);
    }
    if (result.outcome != Outcome::kFailed) return;
    failures_.push_back({{"case", name}, {"message", result.message}});
    if (failures_.size() <= kMaxPrintedFailures) {
      fmt::print(stderr, "FAILED {}\n  {}\n  repeat: marlin_conformance --case {}\n", name,
                 result.message, name);
    }
  }

  void WriteFiles(std::vector<std::string>* violations) const {
    if (!options_.write_expected_path.empty()) {
      const Status written = WriteCounts(machine_, counts_, options_.write_expected_path);
      if (!written.ok()) violations->push_back(written.message());
    }
    if (!options_.write_models_path.empty()) {
      const Status written =
          WriteText(options_.write_models_path, ModelsMarkdown(machine_, counts_));
      if (!written.ok()) violations->push_back(written.message());
    }
  }

  void PrintTable(const std::vector<std::string>& violations) {
    fmt::print("{:<28} {:>7} {:>7} {:>12} {:>11} {:>7}  {}\n", "kernel", "passed", "failed",
               "unsupported", "mistrusted", "skipped", "worst error / tight bound");
    for (const Row& row : machine_.rows()) {
      const RowCounts& counts = counts_[row.name];
      fmt::print("{:<28} {:>7} {:>7} {:>12} {:>11} {:>7}  {:.3f} {}\n", row.name, counts.passed,
                 counts.failed, counts.unsupported, counts.mistrusted, counts.skipped,
                 counts.worst_ratio, counts.worst_case);
    }
    for (const auto& [reason, count] : reasons_) fmt::print("unsupported x{}: {}\n", count, reason);
    for (const Row& row : machine_.rows()) {
      const int64_t skipped = counts_[row.name].skipped;
      if (skipped == 0) continue;
      skipped_ += skipped;
      fmt::print("skipped: {}: {} ({} cases)\n", row.unavailable, row.name, skipped);
    }
    for (const std::string& violation : violations) fmt::print("VIOLATION {}\n", violation);
    fmt::print("{} passed, {} failed, {} skipped\n", passed_, failed_, skipped_);
  }

  void PrintJson(const std::vector<std::string>& violations) {
    nlohmann::json rows = nlohmann::json::array();
    for (const Row& row : machine_.rows()) {
      const RowCounts& counts = counts_[row.name];
      skipped_ += counts.skipped;
      rows.push_back({{"kernel", row.name},
                      {"passed", counts.passed},
                      {"failed", counts.failed},
                      {"unsupported", counts.unsupported},
                      {"mistrusted", counts.mistrusted},
                      {"skipped", counts.skipped},
                      {"unavailable", row.unavailable},
                      {"worst_ratio", counts.worst_ratio},
                      {"worst_case", counts.worst_case}});
    }
    const nlohmann::json document = {{"passed", passed_},     {"failed", failed_},
                                     {"skipped", skipped_},   {"kernels", rows},
                                     {"failures", failures_}, {"violations", violations}};
    fmt::print("{}\n", document.dump(2));
  }

  static constexpr size_t kMaxPrintedFailures = 50;

  const SuiteOptions& options_;
  const Machine& machine_;
  std::regex filter_;
  Counts counts_;
  std::map<std::string, int64_t> reasons_;
  std::vector<nlohmann::json> failures_;
  int64_t passed_ = 0;
  int64_t failed_ = 0;
  int64_t skipped_ = 0;
};

int RunNamedCase(const SuiteOptions& options, const Machine& machine) {
  const Result<Case> c = ParseCase(options.name);
  if (!c.ok()) {
    fmt::print(stderr, "{}\n", c.status().message());
    return 1;
  }
  if (machine.Find(c->kernel) == nullptr) {
    fmt::print(stderr, "case: no kernel named '{}'\n", c->kernel);
    return 1;
  }
  SuiteOptions one = options;
  one.filter = "/cpu/" + c->kernel + "/";
  Suite suite(one, machine);
  suite.RunProblem(*c);
  return suite.Finish();
}

}  // namespace

int RunSuite(const SuiteOptions& options) {
  const Result<Machine> machine = Machine::Open();
  if (!machine.ok()) {
    fmt::print(stderr, "{}\n", machine.status().message());
    return 5;
  }
  if (!options.name.empty()) return RunNamedCase(options, *machine);

  SelectionSize size;
  if (options.nightly) size = {.gemm = 6000, .dequantize = 800};
  Suite suite(options, *machine);
  for (const Case& problem : SelectProblems(machine->Kernels(), size)) {
    suite.RunProblem(problem);
    if (suite.Stopped()) break;
  }
  return suite.Finish();
}

}  // namespace marlin::conformance
