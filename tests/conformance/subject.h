// A problem of any kind, as the suite runs it on the rows of a machine.
#pragma once

#include <memory>
#include <string>

#include "experts_case.h"
#include "experts_problem.h"
#include "router_case.h"
#include "router_run.h"
#include "runner.h"

namespace marlin::conformance {

/// A problem whose data are made when the first row needs them.
class Subject {
 public:
  virtual ~Subject() = default;
  virtual bool Takes(const Row& row) const = 0;
  /// The name of the case on a row.
  virtual std::string Name(const Row& row) const = 0;
  /// Whether that name gives the case back.
  virtual bool NameGivesCaseBack(const Row& row) const = 0;
  virtual CaseResult Run(const Machine& machine, const Row& row, int repetitions) = 0;
};

/// A GEMM, or the decoding of weights.
class GemmSubject final : public Subject {
 public:
  explicit GemmSubject(const Case& c) : c_(c) {}
  bool Takes(const Row& row) const override;
  std::string Name(const Row& row) const override { return CaseName(On(row)); }
  bool NameGivesCaseBack(const Row& row) const override;
  CaseResult Run(const Machine& machine, const Row& row, int repetitions) override;

 private:
  Case On(const Row& row) const;

  Case c_;
  std::unique_ptr<Problem> data_;
};

class RouterSubject final : public Subject {
 public:
  explicit RouterSubject(const RouterCase& c) : c_(c) {}
  bool Takes(const Row& row) const override;
  std::string Name(const Row& row) const override { return CaseName(On(row)); }
  bool NameGivesCaseBack(const Row& row) const override;
  CaseResult Run(const Machine& machine, const Row& row, int repetitions) override;

 private:
  RouterCase On(const Row& row) const;

  RouterCase c_;
  std::unique_ptr<RouterProblem> data_;
};

class ExpertsSubject final : public Subject {
 public:
  explicit ExpertsSubject(const ExpertsCase& c) : c_(c) {}
  bool Takes(const Row& row) const override;
  std::string Name(const Row& row) const override { return CaseName(On(row)); }
  bool NameGivesCaseBack(const Row& row) const override;
  CaseResult Run(const Machine& machine, const Row& row, int repetitions) override;

 private:
  ExpertsCase On(const Row& row) const;

  ExpertsCase c_;
  std::unique_ptr<ExpertsData> data_;
};

/// The subject of a case's name, and the row that it names.
struct NamedSubject {
  std::unique_ptr<Subject> subject;
  std::string backend;
  std::string row;
};

/// Errors: kInvalidArgument naming the part that is not understood.
Result<NamedSubject> ParseSubject(const std::string& name);

}  // namespace marlin::conformance
