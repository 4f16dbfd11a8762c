#include "experts_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "base/macros.h"
#include "experts_bounds.h"
#include "experts_run.h"
#include "reference/elements.h"

namespace marlin::conformance {
namespace {

CaseResult Failed(std::string message) { return {Outcome::kFailed, std::move(message), 0}; }

CaseResult FromStatus(const Status& status) {
  if (status.code() == Code::kUnsupported) {
    return {Outcome::kUnsupported, status.message(), 0};
  }
  return Failed(fmt::format("{}: {}", CodeName(status.code()), status.message()));
}

// The error models of the kernels that the device may select for the GEMMs of a case.
std::vector<KernelModel> ModelsOf(const Device& device, const Row& row, Accuracy accuracy) {
  const std::vector<KernelInfo> kernels = device.info().kernels;
  const auto available = [&](const KernelDesc& kernel) {
    return std::any_of(kernels.begin(), kernels.end(), [&](const KernelInfo& info) {
      return info.name == kernel.name && info.available;
    });
  };
  std::vector<KernelModel> models;
  for (const KernelDesc& kernel : KernelTable(row.backend)) {
    const bool allowed = kernel.grade == Grade::kExact || accuracy == Accuracy::kW4A8 ||
                         (kernel.grade == Grade::kBf16Compute && accuracy == Accuracy::kDefault);
    const bool selectable =
        std::string_view(kernel.op) == "gemm" && kernel.chosen != Chosen::kByName;
    if (!selectable || !allowed || !available(kernel)) continue;
    const KernelModel model{kernel.error, kernel.grade};
    if (std::find(models.begin(), models.end(), model) == models.end()) models.push_back(model);
  }
  return models;
}

/// A device and the experts that it runs.
class Bench {
 public:
  static Result<Bench> Make(const Device& device, const Row& row, const ExpertsData& data) {
    MARLIN_ASSIGN_OR_RETURN(auto prepared, PreparedExperts::Make(device, data));
    return Bench(device, row, std::move(prepared));
  }

  Result<ExpertsRun> Plan(const ExpertsData& data, const std::vector<int64_t>& tokens) const {
    return ExpertsRun::Make(device_, row_.backend, prepared_, data, tokens);
  }
  Result<ExpertsRun> Run(const ExpertsData& data, const std::vector<int64_t>& tokens) const {
    MARLIN_ASSIGN_OR_RETURN(ExpertsRun run, Plan(data, tokens));
    MARLIN_RETURN_IF_ERROR(run.Run());
    return run;
  }

 private:
  Bench(const Device& device, const Row& row, std::shared_ptr<const PreparedExperts> prepared)
      : device_(device), row_(row), prepared_(std::move(prepared)) {}

  Device device_;
  const Row& row_;
  std::shared_ptr<const PreparedExperts> prepared_;
};

// Whether more than half of the reference is zero, or of a lattice not exact.
bool IsMistrusted(const ExpertsData& data) {
  const auto zeros = std::count(data.expected.begin(), data.expected.end(), 0.0);
  const auto inexact = std::count(data.exact.begin(), data.exact.end(), false);
  return 2 * std::max(zeros, inexact) > static_cast<int64_t>(data.expected.size());
}

CaseResult Compare(const Bench& bench, const ExpertsData& data,
                   const std::vector<KernelModel>& models) {
  const ExpertsCase& c = data.c;
  const Result<ExpertsRun> run = bench.Run(data, AllTokens(data));
  if (!run.ok()) return FromStatus(run.status());
  const std::vector<Allowance> allowances = ExpertsAllowances(data, models);
  CaseResult result;
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t n = 0; n < c.hidden; ++n) {
      const auto at = static_cast<size_t>(t * c.hidden + n);
      const double got = run->Output(t, n);
      const Verdict verdict = Judge(got, data.expected[at], allowances[at], c.out_type, false);
      result.worst_ratio = std::max(result.worst_ratio, verdict.ratio);
      if (verdict.passed) continue;
      return Failed(
          fmt::format("[{}, {}]: got {:.9g}, expected {:.9g} ({}), bound {:.3g} hard {:.3g} tight",
                      t, n, got, reference::RoundTo(data.expected[at], c.out_type),
                      allowances[at].exact ? "exactly" : "within the bound", allowances[at].hard,
                      allowances[at].tight));
    }
  }
  if (IsMistrusted(data)) result.outcome = Outcome::kMistrusted;
  return result;
}

CaseResult Repeat(const Device& device, const Row& row, const ExpertsData& data, int repetitions) {
  // The first runs prepare weights and allocate memory anew; the rest reuse them.
  constexpr int kPreparations = 3;
  std::optional<ExpertsRun> run;
  uint64_t first = 0;
  for (int i = 0; i < repetitions; ++i) {
    if (i < kPreparations) {
      const Result<Bench> bench = Bench::Make(device, row, data);
      if (!bench.ok()) return FromStatus(bench.status());
      Result<ExpertsRun> planned = bench->Plan(data, AllTokens(data));
      if (!planned.ok()) return FromStatus(planned.status());
      run.emplace(std::move(*planned));
    }
    const Status status = run->Run();
    if (!status.ok()) return FromStatus(status);
    if (i == 0) first = run->Hash();
    if (run->Hash() != first) return Failed(fmt::format("run {} differs from the first", i + 1));
  }
  return {};
}

CaseResult CompareThreads(const Machine& machine, const Row& row, const ExpertsData& data) {
  uint64_t first = 0;
  for (const int threads : {1, 2, 3, 5}) {
    const Result<Device> device = machine.DeviceWithThreads(row, threads);
    if (!device.ok()) return FromStatus(device.status());
    const Result<Bench> bench = Bench::Make(*device, row, data);
    if (!bench.ok()) return FromStatus(bench.status());
    const Result<ExpertsRun> run = bench->Run(data, AllTokens(data));
    if (!run.ok()) return FromStatus(run.status());
    if (threads == 1) first = run->Hash();
    if (run->Hash() != first) return Failed(fmt::format("{} threads differ from 1", threads));
  }
  return {};
}

// Empty, or the first difference between the rows of `part` and those of `whole` that it holds.
std::string FindDifference(const ExpertsCase& c, const ExpertsRun& part,
                           const std::vector<int64_t>& tokens, const ExpertsRun& whole) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    for (int64_t n = 0; n < c.hidden; ++n) {
      const auto row = static_cast<int64_t>(i);
      if (part.Bits(row, n) == whole.Bits(tokens[i], n)) continue;
      return fmt::format("token {} column {} of {} tokens: {:.9g}; of {}: {:.9g}", tokens[i], n,
                         tokens.size(), part.Output(row, n), c.tokens, whole.Output(tokens[i], n));
    }
  }
  return {};
}

CaseResult CompareSubsets(const Bench& bench, const ExpertsData& data) {
  const ExpertsCase& c = data.c;
  const Result<ExpertsRun> whole = bench.Run(data, AllTokens(data));
  if (!whole.ok()) return FromStatus(whole.status());
  for (const int64_t count : {1, 2, 3, 7, 8, 9, 16, 17, 33}) {
    if (count >= c.tokens) break;
    std::vector<int64_t> tokens;  // Others for every count, and not consecutive.
    for (int64_t i = 0; i < count; ++i) tokens.push_back((count * 11 + i * 7) % c.tokens);
    const Result<ExpertsRun> part = bench.Run(data, tokens);
    if (!part.ok()) return FromStatus(part.status());
    const std::string difference = FindDifference(c, *part, tokens, *whole);
    if (!difference.empty()) return Failed(difference);
  }
  return {};
}

CaseResult Poison(const Bench& bench, const ExpertsData& data) {
  const ExpertsCase& c = data.c;
  const Result<ExpertsRun> clean = bench.Run(data, AllTokens(data));
  if (!clean.ok()) return FromStatus(clean.status());
  ExpertsData poisoned;
  poisoned.c = c;
  poisoned.x = data.x;
  poisoned.ids = data.ids;
  poisoned.weights = data.weights;
  const int64_t nan = c.tokens / 3;
  const int64_t inf = c.tokens - 1;
  const auto at = [&](int64_t token) {
    return static_cast<size_t>(token * c.hidden + static_cast<int64_t>(c.seed) * 31 % c.hidden);
  };
  poisoned.x[at(inf)] = std::numeric_limits<double>::infinity();
  poisoned.x[at(nan)] = std::numeric_limits<double>::quiet_NaN();
  const Result<ExpertsRun> run = bench.Run(poisoned, AllTokens(data));
  if (!run.ok()) return FromStatus(run.status());
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t n = 0; n < c.hidden; ++n) {
      const double got = run->Output(t, n);
      if (t == nan && !std::isnan(got)) {
        return Failed(fmt::format("[{}, {}]: got {:.9g}, expected NaN", t, n, got));
      }
      if (t == nan || t == inf || run->Bits(t, n) == clean->Bits(t, n)) continue;
      return Failed(
          fmt::format("[{}, {}]: got {:.9g}, without NaN and Inf in rows {} and {} "
                      "{:.9g}",
                      t, n, got, nan, inf, clean->Output(t, n)));
    }
  }
  return {};
}

CaseResult RefuseBadIds(const Bench& bench, const ExpertsData& data) {
  const ExpertsCase& c = data.c;
  const int64_t token = c.tokens - 1;
  const int64_t selection = c.top_k - 1;
  for (const int64_t id : {c.experts, int64_t{-1}, int64_t{1} << 30}) {
    ExpertsData wrong;
    wrong.c = c;
    wrong.x = data.x;
    wrong.ids = data.ids;
    wrong.weights = data.weights;
    wrong.ids[static_cast<size_t>(token * c.top_k + selection)] = static_cast<int32_t>(id);
    const Result<ExpertsRun> run = bench.Run(wrong, AllTokens(data));
    if (run.ok()) return Failed(fmt::format("id {}: no error", id));
    if (run.status().code() == Code::kUnsupported) return FromStatus(run.status());
    const std::string wanted = fmt::format("token {}, selection {}: {} ", token, selection, id);
    const bool right = run.status().code() == Code::kInvalidArgument &&
                       run.status().message().find(wanted) != std::string::npos;
    if (right) continue;
    return Failed(fmt::format("expected '{}', got '{}'", wanted, run.status().message()));
  }
  const Result<ExpertsRun> after = bench.Run(data, AllTokens(data));
  return after.ok() ? CaseResult{} : FromStatus(after.status());
}

}  // namespace

CaseResult RunExpertsCase(const Machine& machine, const Row& row, const ExpertsData& data,
                          int repetitions) {
  const Device& device = machine.DeviceFor(row);
  const ExpertsCheck check = data.c.check;
  if (check == ExpertsCheck::kRepeat) return Repeat(device, row, data, repetitions);
  if (check == ExpertsCheck::kThreads) return CompareThreads(machine, row, data);
  const Result<Bench> bench = Bench::Make(device, row, data);
  if (!bench.ok()) return FromStatus(bench.status());
  switch (check) {
    case ExpertsCheck::kBatchInvariant:
      return CompareSubsets(*bench, data);
    case ExpertsCheck::kPoison:
      return Poison(*bench, data);
    case ExpertsCheck::kBadId:
      return RefuseBadIds(*bench, data);
    default:
      return Compare(*bench, data, ModelsOf(device, row, data.c.accuracy));
  }
}

}  // namespace marlin::conformance
