#include "suite.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <regex>
#include <utility>
#include <vector>

#include "backends/cpu/runtime/cpu_features.h"
#include "base/thread_pool.h"
#include "cases.h"
#include "report.h"
#include "runner.h"
#include "subject.h"

namespace marlin::conformance {
namespace {

// The result of a case on one row.
struct CaseRun {
  const Row* row = nullptr;
  std::string name;
  bool skipped = false;
  CaseResult result;
};

class Suite {
 public:
  Suite(const SuiteOptions& options, const Machine& machine)
      : options_(options),
        machine_(machine),
        filter_(options.filter),
        counts_(machine.rows().size()) {}

  // Runs problems, several at a time, until a failure stops the run; reports in the order of the
  // runs. S is the kind of subject of a case.
  template <typename S, typename C>
  void RunProblems(const std::vector<C>& problems, int jobs) {
    ThreadPool pool(jobs);
    // A single worker stops right at the first failure; larger batches keep several workers busy.
    const size_t batch =
        pool.worker_count() == 1 ? 1 : 8 * static_cast<size_t>(pool.worker_count());
    const std::vector<size_t> order = RunOrder(problems.size(), options_.mixed);
    for (size_t begin = 0; begin < problems.size() && !Stopped(); begin += batch) {
      const size_t count = std::min(batch, problems.size() - begin);
      std::vector<std::vector<CaseRun>> runs(count);
      pool.Run(static_cast<int64_t>(count), [&](int64_t i, int) {
        const auto at = static_cast<size_t>(i);
        S subject(problems[order[begin + at]]);
        runs[at] = RunProblem(subject);
      });
      for (const std::vector<CaseRun>& of_problem : runs) {
        for (const CaseRun& run : of_problem) Record(run);
      }
    }
  }

  // Runs one problem on the row of this name.
  void RunOn(Subject& subject, const Row& row) {
    if (subject.Takes(row)) Record(RunProblemOn(subject, row));
  }

  // Prints the summary; returns the exit code.
  int Finish() {
    if (options_.list) return 0;
    std::vector<std::string> violations;
    if (!options_.expected_path.empty()) {
      violations = CompareCounts(machine_, counts_, options_.expected_path);
    }
    if (!options_.check_models_path.empty()) {
      const std::string difference = CompareModels(options_.check_models_path);
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

 private:
  bool Stopped() const { return options_.stop_at_failure && failed_ > 0; }

  // Runs one problem on all matching rows that pass the filter.
  std::vector<CaseRun> RunProblem(Subject& subject) const {
    std::vector<CaseRun> runs;
    for (const Row& row : machine_.rows()) {
      if (!subject.Takes(row)) continue;
      const bool filtered =
          !options_.filter.empty() && !std::regex_search(subject.Name(row), filter_);
      if (!filtered) runs.push_back(RunProblemOn(subject, row));
    }
    return runs;
  }

  CaseRun RunProblemOn(Subject& subject, const Row& row) const {
    CaseRun run{&row, subject.Name(row), false, {}};
    if (!subject.NameGivesCaseBack(row)) {
      run.result = {Outcome::kFailed, "the name does not give this case back", 0};
    } else if (options_.list || !row.unavailable.empty()) {
      run.skipped = true;
    } else {
      if (options_.progress) fmt::print(stderr, "case {}\n", run.name);
      run.result = subject.Run(machine_, row, options_.repetitions);
    }
    return run;
  }

  // Returns the problem-independent part of "no kernel for <problem>: <kernel>: <reason>".
  static std::string Reason(const Row& row, const std::string& message) {
    const size_t at = message.rfind(row.name + ": ");
    return at == std::string::npos ? row.name + ": " + message : message.substr(at);
  }

  void Record(const CaseRun& run) {
    const Row& row = *run.row;
    const std::string& name = run.name;
    const CaseResult& result = run.result;
    RowCounts& counts = counts_[machine_.IndexOf(row)];
    if (options_.list) {
      fmt::print("{}\n", name);
      return;
    }
    if (run.skipped) {
      ++counts.skipped;
      ++skipped_;
      return;
    }
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
      const Status written = WriteModels(machine_, counts_, options_.write_models_path);
      if (!written.ok()) violations->push_back(written.message());
    }
  }

  void PrintTable(const std::vector<std::string>& violations) {
    fmt::print("{:<30} {:>7} {:>7} {:>12} {:>11} {:>7}  {}\n", "kernel", "passed", "failed",
               "unsupported", "mistrusted", "skipped", "worst error / tight bound");
    for (size_t i = 0; i < counts_.size(); ++i) {
      const Row& row = machine_.rows()[i];
      const RowCounts& counts = counts_[i];
      const std::string name =
          row.desc == nullptr ? fmt::format("{} ({})", row.name, row.backend) : row.name;
      fmt::print("{:<30} {:>7} {:>7} {:>12} {:>11} {:>7}  {:.3f} {}\n", name, counts.passed,
                 counts.failed, counts.unsupported, counts.mistrusted, counts.skipped,
                 counts.worst_ratio, counts.worst_case);
    }
    for (const auto& [reason, count] : reasons_) fmt::print("unsupported x{}: {}\n", count, reason);
    for (size_t i = 0; i < counts_.size(); ++i) {
      const Row& row = machine_.rows()[i];
      const int64_t skipped = counts_[i].skipped;
      if (skipped == 0) continue;
      fmt::print("skipped: {}: {} ({} cases)\n", row.unavailable, row.name, skipped);
    }
    for (const std::string& violation : violations) fmt::print("VIOLATION {}\n", violation);
    fmt::print("{} passed, {} failed, {} skipped\n", passed_, failed_, skipped_);
  }

  // The devices that ran the rows, so that a simulator is not taken for the GPU that it stands for.
  nlohmann::json Devices() const {
    nlohmann::json devices = nlohmann::json::object();
    for (const Row& row : machine_.rows()) {
      if (!row.unavailable.empty() || devices.contains(row.backend)) continue;
      const DeviceInfo info = machine_.DeviceFor(row).info();
      devices[row.backend] = {
          {"name", info.name}, {"model", info.model}, {"features", info.features}};
    }
    return devices;
  }

  void PrintJson(const std::vector<std::string>& violations) {
    nlohmann::json rows = nlohmann::json::array();
    for (size_t i = 0; i < counts_.size(); ++i) {
      const Row& row = machine_.rows()[i];
      const RowCounts& counts = counts_[i];
      rows.push_back({{"kernel", row.name},
                      {"backend", row.backend},
                      {"passed", counts.passed},
                      {"failed", counts.failed},
                      {"unsupported", counts.unsupported},
                      {"mistrusted", counts.mistrusted},
                      {"skipped", counts.skipped},
                      {"unavailable", row.unavailable},
                      {"worst_ratio", counts.worst_ratio},
                      {"worst_case", counts.worst_case}});
    }
    const nlohmann::json document = {{"devices", Devices()}, {"passed", passed_},
                                     {"failed", failed_},    {"skipped", skipped_},
                                     {"kernels", rows},      {"failures", failures_},
                                     {"reasons", reasons_},  {"violations", violations}};
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
  const Result<NamedSubject> named = ParseSubject(options.name);
  if (!named.ok()) {
    fmt::print(stderr, "{}\n", named.status().message());
    return 1;
  }
  const Row* const row = machine.Find(named->backend, named->row);
  if (row == nullptr) {
    fmt::print(stderr, "case: no kernel named '{}'\n", named->row);
    return 1;
  }
  Suite suite(options, machine);
  suite.RunOn(*named->subject, *row);
  return suite.Finish();
}

// Runs the router and the experts of a backend.
void RunMoe(const SuiteOptions& options, const std::string& backend, Suite* suite) {
  std::vector<RouterCase> routers = SelectRouterCases(backend, options.nightly);
  // A device reports the errors of its kernels when any thread waits for it.
  std::vector<RouterCase> wrong_routers;
  std::copy_if(routers.begin(), routers.end(), std::back_inserter(wrong_routers), ExpectsError);
  std::erase_if(routers, ExpectsError);
  std::vector<ExpertsCase> experts = SelectExpertsCases(backend, options.nightly);
  std::vector<ExpertsCase> wrong_experts;
  const auto wrong = [](const ExpertsCase& c) { return c.check == ExpertsCheck::kBadId; };
  std::copy_if(experts.begin(), experts.end(), std::back_inserter(wrong_experts), wrong);
  std::erase_if(experts, wrong);
  suite->RunProblems<RouterSubject>(routers, options.jobs);
  suite->RunProblems<RouterSubject>(wrong_routers, 1);
  suite->RunProblems<ExpertsSubject>(experts, options.jobs);
  suite->RunProblems<ExpertsSubject>(wrong_experts, 1);
}

// Every backend's counts are in a separate file.
bool NamesOneDevice(const SuiteOptions& options) {
  return (options.expected_path.empty() && options.write_expected_path.empty()) ||
         options.device != "all";
}

}  // namespace

std::vector<size_t> RunOrder(size_t count, bool mixed) {
  auto step = mixed ? static_cast<size_t>(0.618 * static_cast<double>(count)) : size_t{1};
  // With a common divisor it would not reach them all.
  while (std::gcd(step, count) != 1) ++step;
  std::vector<size_t> order(count);
  for (size_t i = 0; i < count; ++i) order[i] = i * step % count;
  return order;
}

int RunSuite(const SuiteOptions& options) {
  if (!NamesOneDevice(options)) {
    fmt::print(stderr, "--expected and --write-expected need --device cpu, cuda or metal\n");
    return 64;
  }
  std::optional<Isa> level;
  if (!options.level.empty()) {
    const Result<Isa> parsed = cpu::ParseIsa("--level", options.level);
    if (!parsed.ok()) {
      fmt::print(stderr, "{}\n", parsed.status().message());
      return 64;
    }
    level = *parsed;
  }
  const Result<Machine> machine = Machine::Open(options.device, level);
  if (!machine.ok()) {
    fmt::print(stderr, "{}\n", machine.status().message());
    return 5;
  }
  if (!options.name.empty()) return RunNamedCase(options, *machine);

  SelectionSize size;
  if (options.nightly) size = {.gemm = 6000, .dequantize = 800};
  Suite suite(options, *machine);
  for (const std::string& backend : machine->backends()) {
    if (!options.large) {
      suite.RunProblems<GemmSubject>(SelectProblems(backend, KernelTable(backend), size),
                                     options.jobs);
      RunMoe(options, backend, &suite);
    } else if (backend == "cuda") {
      suite.RunProblems<GemmSubject>(LargeProblems(backend), 1);  // Each uses much of the memory.
    }
  }
  return suite.Finish();
}

}  // namespace marlin::conformance
