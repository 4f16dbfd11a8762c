#include "subject.h"

#include <utility>

#include "base/macros.h"
#include "experts_checks.h"

namespace marlin::conformance {
namespace {

CaseResult Failed(const Status& status) { return {Outcome::kFailed, status.message(), 0}; }

}  // namespace

Case GemmSubject::On(const Row& row) const {
  Case c = c_;
  c.kernel = row.name;
  return c;
}

bool GemmSubject::Takes(const Row& row) const {
  if (row.backend != c_.backend || (row.op != "gemm" && row.op != "dequantize")) return false;
  // One-row periodic problems also test dequantize.
  if (c_.check == Check::kPeriodic && c_.m == 1 && !c_.gated) return true;
  // So do repeat checks whose weights are small enough to download repeatedly.
  constexpr int64_t kMostRepeatedWeights = 1 << 20;
  if (c_.check == Check::kRepeat && c_.n * c_.k <= kMostRepeatedWeights) return true;
  const bool wants_dequantize = c_.check == Check::kDequantize;
  if (wants_dequantize != (row.op == "dequantize")) return false;
  if (c_.data != DataClass::kLatticeInt8 || wants_dequantize) return true;
  // The int8 lattice runs on the int8 kernels, and on the scalar one to validate the data.
  if (row.desc == nullptr) return false;
  return row.desc->grade == Grade::kW4A8 || row.level == Isa::kScalar;
}

bool GemmSubject::NameGivesCaseBack(const Row& row) const {
  const Result<Case> parsed = ParseCase(Name(row));
  return parsed.ok() && *parsed == On(row);
}

CaseResult GemmSubject::Run(const Machine& machine, const Row& row, int repetitions) {
  if (data_ == nullptr) {
    Result<std::unique_ptr<Problem>> made = MakeProblem(c_);
    if (!made.ok()) return Failed(made.status());
    data_ = std::move(*made);
  }
  return RunCase(machine, row, *data_, repetitions);
}

RouterCase RouterSubject::On(const Row& row) const {
  RouterCase c = c_;
  c.row = row.name;
  return c;
}

bool RouterSubject::Takes(const Row& row) const {
  return row.backend == c_.backend && row.op == "router";
}

bool RouterSubject::NameGivesCaseBack(const Row& row) const {
  const Result<RouterCase> parsed = ParseRouterCase(Name(row));
  return parsed.ok() && *parsed == On(row);
}

CaseResult RouterSubject::Run(const Machine& machine, const Row& row, int /*repetitions*/) {
  if (data_ == nullptr) data_ = std::make_unique<RouterProblem>(MakeRouterProblem(c_));
  return RunRouterCase(machine, row, *data_);
}

ExpertsCase ExpertsSubject::On(const Row& row) const {
  ExpertsCase c = c_;
  c.row = row.name;
  return c;
}

bool ExpertsSubject::Takes(const Row& row) const {
  return row.backend == c_.backend && row.op == "experts";
}

bool ExpertsSubject::NameGivesCaseBack(const Row& row) const {
  const Result<ExpertsCase> parsed = ParseExpertsCase(Name(row));
  return parsed.ok() && *parsed == On(row);
}

CaseResult ExpertsSubject::Run(const Machine& machine, const Row& row, int repetitions) {
  if (data_ == nullptr) {
    Result<std::unique_ptr<ExpertsData>> made = MakeExpertsData(c_);
    if (!made.ok()) return Failed(made.status());
    data_ = std::move(*made);
  }
  return RunExpertsCase(machine, row, *data_, repetitions);
}

Result<NamedSubject> ParseSubject(const std::string& name) {
  if (name.starts_with("router/")) {
    MARLIN_ASSIGN_OR_RETURN(const RouterCase c, ParseRouterCase(name));
    return NamedSubject{std::make_unique<RouterSubject>(c), c.backend, c.row};
  }
  if (NamesExperts(name)) {
    MARLIN_ASSIGN_OR_RETURN(const ExpertsCase c, ParseExpertsCase(name));
    return NamedSubject{std::make_unique<ExpertsSubject>(c), c.backend, c.row};
  }
  MARLIN_ASSIGN_OR_RETURN(const Case c, ParseCase(name));
  return NamedSubject{std::make_unique<GemmSubject>(c), c.backend, c.kernel};
}

}  // namespace marlin::conformance
