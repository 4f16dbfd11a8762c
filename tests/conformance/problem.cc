#include "problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/macros.h"
#include "base/scalars.h"
#include "random.h"
#include "reference/elements.h"
#include "store_element.h"

namespace marlin::conformance {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
// Padding elements between the rows of a padded matrix.
constexpr int64_t kRowPadding = 13;
// Approximate number of nonzero activations in a sparse lattice row.
constexpr int64_t kSparseTerms = 300;

double LatticeActivation(Random& random, const Case& c, int64_t m, int64_t k) {
  if (c.k > kMaxDenseLatticeK && !random.OneIn(c.k / kSparseTerms + 1)) return 0;
  if (c.data == DataClass::kLatticeWide && (k * 7 + m) % std::max<int64_t>(c.k / 4, 1) == 0) {
    // Nine bits: needs both terms where activations are split into two bf16 terms.
    return static_cast<double>(random.Integer(257, 511)) * (random.OneIn(2) ? 1.0 : -1.0);
  }
  // The last block may be partial.
  const int64_t block_k = std::min<int64_t>(c.k - k / 32 * 32, 16);
  if (c.data == DataClass::kLatticeInt8 && k % 32 == (m * 5 + 3) % block_k) {
    return random.OneIn(2) ? 127.0 : -127.0;  // The int8 scale of the block becomes 1.
  }
  const int64_t value = random.Integer(-2, 2);
  return static_cast<double>(value == 0 && c.k <= 4 ? 1 : value);
}

double RandomActivation(Random& random, const Case& c, int64_t m, int64_t k) {
  switch (c.data) {
    case DataClass::kLattice:
    case DataClass::kLatticeWide:
    case DataClass::kLatticeInt8:
      return LatticeActivation(random, c, m, k);
    case DataClass::kOneHot:
      return k == (m * 7 + static_cast<int64_t>(c.seed)) % c.k
                 ? 1.0 + 0.5 * static_cast<double>(m % 3)
                 : 0.0;
    case DataClass::kHeavy:
      return random.Gaussian() * (k % 37 == 5 ? 60.0 : 1.0);
    case DataClass::kExtremes:
      return (random.OneIn(2) ? 1.0 : -1.0) *
             (c.a_type == DType::kF16 || c.c_type == DType::kF16 ? 30.0 : 0x1p40);
    case DataClass::kNonFinite: {
      const int64_t at = static_cast<int64_t>(c.seed * 31) % c.k;
      if (m == 1 && k == at) return kInf;
      if (m == (c.m > 2 ? 2 : 0) && k == at) return std::numeric_limits<double>::quiet_NaN();
      return random.Gaussian();
    }
    default:
      return random.Gaussian();
  }
}

void FillActivations(Problem& problem) {
  const Case& c = problem.c;
  Random random(HashText("activations") ^ (c.seed << 8));
  const int64_t bytes = DTypeBytes(c.a_type);
  const int64_t stride = c.k + (c.padded ? kRowPadding : 0);
  const int64_t count = c.m == 0 ? 0 : (c.m - 1) * stride + c.k;
  problem.a_memory = GuardedBuffer(count * bytes, c.misaligned ? bytes : 0);
  for (int64_t m = 0; m < c.m; ++m) {
    for (int64_t k = 0; k < c.k; ++k) {
      StoreElement(problem.a_memory.data(), c.a_type, m * stride + k,
                   RandomActivation(random, c, m, k));
    }
  }
  problem.a = TensorView(problem.a_memory.data(), c.a_type, {c.m, c.k}, {stride, 1});
}

void FillEpilogue(Problem& problem) {
  const Case& c = problem.c;
  Random random(HashText("epilogue") ^ (c.seed << 8));
  problem.epilogue.activation = c.activation;
  problem.epilogue.gated = c.gated;
  if (c.bias) {
    const int64_t bytes = DTypeBytes(c.bias_type);
    problem.bias_memory = GuardedBuffer(c.n * bytes, c.misaligned ? bytes : 0);
    for (int64_t n = 0; n < c.n; ++n) {
      const double bias = IsLattice(c.data) ? static_cast<double>(random.Integer(-20, 20)) * 0.25
                                            : random.Gaussian();
      StoreElement(problem.bias_memory.data(), c.bias_type, n, bias);
    }
    problem.epilogue.bias = TensorView(problem.bias_memory.data(), c.bias_type, {c.n});
  }
  if (c.row_weight) {
    problem.row_weight_memory = GuardedBuffer(c.m * 4, c.misaligned ? 4 : 0);
    for (int64_t m = 0; m < c.m; ++m) {
      // Four powers of two with an odd period: the rows of different tiles and MC blocks, which are
      // multiples of 8 apart, get different weights.
      const double weight =
          IsLattice(c.data) ? std::ldexp(1.0, static_cast<int>(m % 5 % 4) - 2) : random.Uniform();
      StoreElement(problem.row_weight_memory.data(), DType::kF32, m, weight);
    }
    problem.epilogue.row_weight = TensorView(problem.row_weight_memory.data(), DType::kF32, {c.m});
  }
}

// Returns the largest power of two that divides x; Inf for 0.
double LowestBit(double x) {
  if (x == 0) return kInf;
  int exponent = 0;
  const double fraction = std::frexp(std::abs(x), &exponent);
  const auto bits = static_cast<uint64_t>(std::ldexp(fraction, 53));
  return std::ldexp(1.0, exponent - 53 + __builtin_ctzll(bits));
}

// Exact in any order of addition: the sum of all magnitudes is below 2^24 units of the smallest bit
// of any term. Lattice activations and biases are multiples of 1 and 1/4.
void CheckLattice(Problem& problem) {
  const Case& c = problem.c;
  problem.weights_fit_bf16 = true;
  std::vector<double> unit(static_cast<size_t>(c.n), c.bias ? 0.25 : kInf);
  for (int64_t k = 0; k < c.k; ++k) {
    for (int64_t n = 0; n < c.n; ++n) {
      const double value = problem.dense.value[static_cast<size_t>(k * c.n + n)];
      const double magnitude = problem.dense.magnitude[static_cast<size_t>(k * c.n + n)];
      auto& lowest = unit[static_cast<size_t>(n)];
      lowest = std::min({lowest, LowestBit(value), LowestBit(magnitude)});
      problem.weights_fit_bf16 &= reference::RoundTo(value, DType::kBf16) == value;
    }
  }
  for (int64_t m = 0; m < c.m; ++m) {
    for (int64_t n = 0; n < c.n; ++n) {
      const double sum =
          problem.product.magnitude[static_cast<size_t>(m * c.n + n)] + (c.bias ? 5.0 : 0.0);
      if (sum >= 0x1p24 * unit[static_cast<size_t>(n)]) {
        problem.broken_precondition = fmt::format("lattice: column {} sums to {} in units of {}", n,
                                                  sum, unit[static_cast<size_t>(n)]);
      }
    }
  }
}

void CheckScalesDiffer(Problem& problem) {
  const TensorView& scales = problem.weights.scales;
  if (scales.empty()) return;
  const int64_t groups = scales.dim(1);
  const auto scale = [&](int64_t g, int64_t n) {
    return reference::LoadElement(scales.data(), scales.dtype(), g * scales.dim(2) + n);
  };
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t n = 0; n < scales.dim(2); ++n) {
      const bool same =
          (n > 0 && scale(g, n) == scale(g, n - 1)) || (g > 0 && scale(g, n) == scale(g - 1, n));
      if (same) {
        problem.broken_precondition =
            fmt::format("lattice: the scale of group {} column {} equals a neighbour's", g, n);
      }
    }
  }
}

}  // namespace

Result<PreparedWeights> Problem::PreparedFor(const Device& device,
                                             const PrepareOptions& options) const {
  const bool same_layout = prepared_options_.marlin_w4 == options.marlin_w4;
  if (prepared_device_ == device && same_layout) return prepared_;
  prepared_device_.reset();
  prepared_ = {};
  MARLIN_ASSIGN_OR_RETURN(
      prepared_,
      Prepare(n == c.n ? weights : RepeatColumns(weights, n, c.gated ? 2 : 1), device, options));
  prepared_device_ = device;
  prepared_options_ = options;
  return prepared_;
}

Result<std::unique_ptr<Problem>> MakeProblem(const Case& whole) {
  auto problem = std::make_unique<Problem>();
  problem->c = whole;
  const Case& c = problem->c;
  problem->m = c.m;
  problem->n = c.n;
  if (c.check == Check::kPeriodic) {
    problem->c.m = std::min(c.m, kPeriodRows);
    problem->c.n = std::min(c.n, (c.gated ? 2 : 1) * kPeriodColumns);
  }
  problem->weights = MakeWeights(c);
  problem->expert = c.experts - 1;
  FillActivations(*problem);
  FillEpilogue(*problem);
  MARLIN_ASSIGN_OR_RETURN(problem->dense, reference::Dequantize(problem->weights, problem->expert));
  problem->product = reference::Multiply(problem->a, problem->dense);
  problem->expected = reference::Finish(problem->product, problem->epilogue);
  if (IsLattice(c.data)) {
    CheckLattice(*problem);
    CheckScalesDiffer(*problem);
  }
  return problem;
}

}  // namespace marlin::conformance
