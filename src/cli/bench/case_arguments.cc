#include "cli/bench/case_arguments.h"

#include <fmt/core.h>

#include <algorithm>
#include <sstream>

#include "base/errors.h"
#include "base/macros.h"
#include "base/read_file.h"

namespace marlin::cli {

void CaseArguments::Declare(ArgumentList& arguments) {
  arguments.Group("Cases");
  arguments.Option("--shape", &shapes_, "M,N,K", shape_help_);
  arguments.Option("--shapes", &shapes_file_, "FILE",
                   "A file with one M,N,K a line; # begins a comment");
  products_.Declare(arguments);
}

void CaseArguments::DeclareSparsity(ArgumentList& arguments) {
  arguments.Option("--sparsity", &sparsities_, "SPARSITY",
                   "dense (default) or 2:4; may be repeated");
}

Status CaseArguments::Read(int64_t weight_bytes) {
  MARLIN_RETURN_IF_ERROR(ReadShapes());
  MARLIN_RETURN_IF_ERROR(products_.Read());
  MARLIN_RETURN_IF_ERROR(ReadSparsities());
  // Sizes are checked before the machine is measured, which takes seconds.
  for (const bench::BenchCase& each : AllCases(weight_bytes)) {
    MARLIN_RETURN_IF_ERROR(CheckCaseFits(each));
  }
  return {};
}

Status CaseArguments::ReadShapes() {
  if (!shapes_file_.empty()) MARLIN_RETURN_IF_ERROR(ReadShapesFile());
  if (shapes_.empty()) {
    shapes_ = {"1,4096,4096", "4,4096,4096", "16,4096,4096", "64,4096,4096", "512,4096,4096"};
  }
  for (const std::string& text : shapes_) {
    MARLIN_ASSIGN_OR_RETURN(const bench::GemmShape shape, ParseShape(text));
    parsed_shapes_.push_back(shape);
  }
  return {};
}

Status CaseArguments::ReadShapesFile() {
  const size_t given = shapes_.size();
  constexpr int64_t kMostBytes = int64_t{1} << 20;
  MARLIN_ASSIGN_OR_RETURN(const std::string text, ReadFile(shapes_file_, kMostBytes));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    line.resize(std::min(line.find('#'), line.size()));
    std::istringstream words(line);
    for (std::string word; words >> word;) shapes_.push_back(word);
  }
  if (shapes_.size() > given) return {};
  return Invalid(fmt::format("--shapes: {}: expected at least one M,N,K, got none", shapes_file_));
}

Status CaseArguments::ReadSparsities() {
  const std::vector<std::string> names =
      sparsities_.empty() ? std::vector<std::string>{"dense"} : sparsities_;
  for (const Format format : products_.formats()) {
    for (const std::string& name : names) {
      const Result<Sparsity> sparsity = ParseSparsity(name);
      if (!sparsity.ok()) return sparsity.status().WithContext("--sparsity");
      kinds_.push_back({format, *sparsity});
    }
  }
  return {};
}

bench::BenchCase CaseArguments::MakeCase(const WeightKind& kind, const bench::GemmShape& shape,
                                         int64_t weight_bytes) const {
  bench::BenchCase bench = products_.MakeCase(kind.format, shape, weight_bytes);
  bench.spec.sparsity = kind.sparsity;
  bench.op = op_;
  return bench;
}

std::vector<bench::BenchCase> CaseArguments::AllCases(int64_t weight_bytes) const {
  std::vector<bench::BenchCase> cases;
  for (const WeightKind& kind : kinds_) {
    for (const bench::GemmShape& shape : parsed_shapes_) {
      cases.push_back(MakeCase(kind, shape, weight_bytes));
    }
  }
  return cases;
}

}  // namespace marlin::cli
