// Random valid cases, and pairwise (all-pairs) selection among them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "case.h"
#include "random.h"

namespace marlin::conformance {

/// The value sets from which the cases of one backend are drawn.
struct SizeClasses {
  std::string backend;
  std::vector<int64_t> m;
  std::vector<int64_t> n;
  std::vector<int64_t> k;
  std::vector<int64_t> groups;  ///< 0 means k.
  int64_t max_work = 0;         ///< Multiply-adds of one problem: keeps the reference cheap.
  int64_t max_lattice_k = 0;    ///< Upper limit of k for lattice data.
  bool int8 = false;            ///< Whether to draw data for int8 kernels.
};

/// Draws valid cases; a pure function of the arguments.
class CaseSource {
 public:
  CaseSource(SizeClasses sizes, uint64_t seed) : random_(seed), sizes_(std::move(sizes)) {}

  Case Draw(Check check);

 private:
  DType DrawType();
  void DrawShape(Case& c);
  void DrawWeights(Case& c);
  void DrawEpilogue(Case& c);

  Random random_;
  SizeClasses sizes_;
};

/// Takes, `count` times, the candidate that covers the most new pairs of properties.
void SelectByPairs(CaseSource& source, Check check, int count, std::vector<Case>* selected);

/// The properties of a case whose pairs are covered, e.g. "format=u4".
std::vector<std::string> Properties(const Case& c);

}  // namespace marlin::conformance
