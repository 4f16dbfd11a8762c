#include "large.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/macros.h"
#include "bounds.h"
#include "product_run.h"
#include "reference/elements.h"
#include "store_element.h"

namespace marlin::conformance {
namespace {

// Rows of exact values [m, n] as a device stores them, each repeated up to `columns`.
class RepeatedRows {
 public:
  RepeatedRows(const std::vector<double>& values, int64_t n, DType type, int64_t columns)
      : values_(values),
        n_(n),
        type_(type),
        columns_(columns),
        row_(static_cast<size_t>(columns * DTypeBytes(type))) {}

  // Empty, or how a stored row differs from row `m`.
  std::string Difference(int64_t m, const std::byte* got) {
    const size_t period = static_cast<size_t>(n_ * DTypeBytes(type_));
    for (int64_t n = 0; n < n_; ++n) {
      StoreElement(row_.data(), type_, n, values_[static_cast<size_t>(m * n_ + n)]);
    }
    for (size_t at = period; at < row_.size(); at += period) {
      std::memcpy(row_.data() + at, row_.data(), std::min(period, row_.size() - at));
    }
    if (std::memcmp(got, row_.data(), row_.size()) == 0) return {};
    for (int64_t n = 0; n < columns_; ++n) {
      const double value = reference::LoadElement(got, type_, n);
      const double expected = reference::LoadElement(row_.data(), type_, n);
      // The sign of a zero is free.
      if (value == expected) continue;
      return fmt::format("column {}: got {:.9g}, expected {:.9g} (exactly)", n, value, expected);
    }
    return {};
  }

 private:
  const std::vector<double>& values_;
  int64_t n_;
  DType type_;
  int64_t columns_;
  std::vector<std::byte> row_;
};

CaseResult Failed(std::string message) { return {Outcome::kFailed, std::move(message), 0}; }

}  // namespace

CaseResult JudgeLargeProduct(const Problem& problem, const ProductRun& run, Grade grade) {
  const Case& c = problem.c;
  if (!problem.broken_precondition.empty()) return Failed(problem.broken_precondition);
  const bool exact =
      LatticeIsExactFor(problem, grade) && c.activation == Activation::kNone && !c.gated && !c.bias;
  if (!exact) return Failed("large: this kernel is not exact on the data of this case");
  const std::string damage = run.Damage();
  if (!damage.empty()) return Failed(damage);
  RepeatedRows expected(problem.expected, c.n, c.c_type, problem.large_n);
  for (int64_t m = 0; m < problem.large_m; ++m) {
    const std::string difference = expected.Difference(m % c.m, run.Row(m));
    if (!difference.empty()) return Failed(fmt::format("row {} {}", m, difference));
  }
  return {};
}

CaseResult JudgeLargeWeights(const Problem& problem, const std::byte* rows, int64_t stride) {
  const Case& c = problem.c;
  RepeatedRows expected(problem.dense.value, c.n, c.c_type, problem.large_n);
  for (int64_t k = 0; k < c.k; ++k) {
    const std::string difference = expected.Difference(k, rows + k * stride * DTypeBytes(c.c_type));
    if (!difference.empty()) return Failed(fmt::format("row {} {}", k, difference));
  }
  return {};
}

}  // namespace marlin::conformance
