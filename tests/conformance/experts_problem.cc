#include "experts_problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/macros.h"
#include "layout/sparse_24.h"
#include "problem.h"
#include "random.h"
#include "reference/decoder.h"
#include "reference/elements.h"

namespace marlin::conformance {
namespace {

// Numbers that tell the matrices of a case apart.
constexpr int64_t kSharedExpert = 1 << 20;
enum MatrixRole : int64_t { kGateRole, kUpRole, kDownRole, kSharedGateRole };

Random RandomFor(const ExpertsCase& c, std::string_view what) {
  return Random(HashText(what) ^ (c.seed << 8));
}

// Group size, scale type and zero points of a matrix.
void VaryWeights(Random& random, Case& matrix) {
  const FormatInfo& info = GetFormatInfo(matrix.format);
  if (!info.quantized) return;
  const int64_t groups[] = {16, 32, 48, 64, 128, matrix.k};
  matrix.group_size = std::min(matrix.k, groups[random.Integer(0, 5)]);
  matrix.scale_type = static_cast<ScaleType>(random.Integer(0, 4));
  const bool lattice = IsLattice(matrix.data);
  // In the lattice 8-bit codes need all of the bits, and so would biases.
  if (lattice && info.bits == 8) return;
  if (info.zero_point != ZeroPoint::kNone && random.OneIn(2)) {
    matrix.zero = !lattice && random.OneIn(2) ? ZeroKind::kFractional : ZeroKind::kInteger;
  }
  if (!lattice && !matrix.user_codebook && random.OneIn(4)) {
    matrix.weight_biases = true;
    matrix.zero = ZeroKind::kNone;
  }
  matrix.global_divides = matrix.scale_type == ScaleType::kE4M3 && random.OneIn(2);
  if (matrix.zero != ZeroKind::kNone && random.OneIn(2)) matrix.zero_type = ScaleType::kF32;
}

// Whether a matrix can be 2:4: pruned weights need a code of value 0.
bool CanBeSparse(const Case& matrix) {
  const bool offsets = matrix.zero != ZeroKind::kNone || matrix.weight_biases;
  if (!CheckSparse24(matrix.format, offsets).ok()) return false;
  return !GetFormatInfo(matrix.format).has_codebook || matrix.user_codebook ||
         CodeOfZero(FormatValues(matrix.format)).has_value();
}

Result<QuantizedWeights> MakeMatrix(const ExpertsCase& c, int64_t number, int64_t k, int64_t n,
                                    int64_t stack) {
  Random random = RandomFor(c, fmt::format("matrix {}", number));
  Case matrix;
  if (c.format == "mixed") {
    const auto formats = AllFormats();
    matrix.format =
        formats[static_cast<size_t>(number * 7 + static_cast<int64_t>(c.seed)) % formats.size()]
            .format;
  } else {
    MARLIN_ASSIGN_OR_RETURN(matrix.format, ParseFormat(c.format));
  }
  const FormatInfo& info = GetFormatInfo(matrix.format);
  matrix.k = k;
  matrix.n = n;
  matrix.experts = static_cast<int>(stack);
  matrix.group_size = info.quantized ? std::min<int64_t>(k, 32) : k;
  matrix.zero = info.zero_point == ZeroPoint::kRequired ? ZeroKind::kInteger : ZeroKind::kNone;
  matrix.data = c.data;
  // The built-in quantiles are not lattice values.
  matrix.user_codebook =
      IsLattice(c.data) && info.has_codebook && matrix.format != Format::kCodebook4;
  matrix.seed = c.seed * 4096 + static_cast<uint64_t>(number);
  if (c.varied) VaryWeights(random, matrix);
  // Varied matrices include dense ones.
  matrix.sparse = c.sparse && CanBeSparse(matrix) && (!c.varied || random.Integer(0, 2) > 0);
  return MakeWeights(matrix);
}

std::vector<float> MakeBias(const ExpertsCase& c, int64_t number, MatrixRole role, int64_t n) {
  std::vector<float> bias;
  if (!c.biased) return bias;
  Random random = RandomFor(c, fmt::format("bias {} {}", number, static_cast<int64_t>(role)));
  // Products of biased gates and ups need more bits than bf16 has.
  const bool zero = IsLattice(c.data) && role != kDownRole && c.accuracy != Accuracy::kExact;
  for (int64_t i = 0; i < n; ++i) {
    const double value = IsLattice(c.data) ? static_cast<double>(random.Integer(-8, 8)) * 0.5
                                           : 0.5 * random.Gaussian();
    bias.push_back(zero ? 0.0F : static_cast<float>(value));
  }
  return bias;
}

class DataBuilder {
 public:
  explicit DataBuilder(ExpertsData* data) : data_(*data), c_(data->c) {}

  Status AddExperts() {
    data_.experts.resize(static_cast<size_t>(c_.experts));
    for (int64_t e = 0; e < c_.experts; ++e) {
      if (c_.missing && e % 3 == 1) continue;
      ExpertData& expert = data_.experts[static_cast<size_t>(e)];
      // Experts may differ in size, which one stack cannot.
      const int64_t inner = c_.varied && !c_.stacked ? c_.inner + 16 * (e % 3) : c_.inner;
      MARLIN_RETURN_IF_ERROR(AddExpert(e, inner, &expert));
    }
    if (c_.shared == SharedKind::kNone) return Status();
    MARLIN_RETURN_IF_ERROR(AddExpert(kSharedExpert, c_.inner + 32, &data_.shared));
    if (c_.shared == SharedKind::kPlain) return Status();
    return AddMatrix(kSharedExpert, kSharedGateRole, c_.hidden, 1, &data_.shared_gate);
  }

  void AddTokens() {
    AddActivations();
    Random random = RandomFor(c_, "selections");
    std::vector<int32_t> order(static_cast<size_t>(c_.experts));
    std::iota(order.begin(), order.end(), 0);
    if (c_.selection == Selection::kFew) {
      order.resize(static_cast<size_t>(std::min(c_.experts, c_.top_k + 1)));
    }
    for (int64_t t = 0; t < c_.tokens; ++t) {
      for (size_t i = order.size() - 1; i > 0; --i) {
        std::swap(order[i], order[static_cast<size_t>(random.Integer(0, static_cast<int64_t>(i)))]);
      }
      for (int64_t s = 0; s < c_.top_k; ++s) {
        data_.ids.push_back(c_.selection == Selection::kOne
                                ? static_cast<int32_t>(c_.experts - 1)
                                : order[static_cast<size_t>(s) % order.size()]);
        constexpr float kPowers[] = {1.0F, 2.0F, -1.0F, -2.0F};
        data_.weights.push_back(IsLattice(c_.data) ? kPowers[random.Integer(0, 3)]
                                                   : static_cast<float>(random.Uniform()));
      }
    }
  }

 private:
  Status AddExpert(int64_t number, int64_t inner, ExpertData* expert) {
    const int64_t columns = c_.apart ? inner : 2 * inner;
    MARLIN_RETURN_IF_ERROR(AddMatrix(number, kGateRole, c_.hidden, columns, &expert->gate));
    if (c_.apart) {
      MARLIN_RETURN_IF_ERROR(AddMatrix(number, kUpRole, c_.hidden, inner, &expert->up));
    }
    return AddMatrix(number, kDownRole, inner, c_.hidden, &expert->down);
  }

  Status AddMatrix(int64_t number, MatrixRole role, int64_t k, int64_t n, MatrixData* matrix) {
    const bool stacked = c_.stacked && number != kSharedExpert;
    const int64_t seed = (stacked ? 0 : number * 4) + role;
    auto& stack = stacks_[role];
    if (!stacked || stack == nullptr) {
      MARLIN_ASSIGN_OR_RETURN(QuantizedWeights made,
                              MakeMatrix(c_, seed, k, n, stacked ? c_.experts : 1));
      matrix->weights = std::make_shared<const QuantizedWeights>(std::move(made));
      if (stacked) stack = matrix->weights;
    }
    if (stacked) {
      matrix->weights = stack;
      matrix->index = number;
    }
    if (role != kSharedGateRole) matrix->bias = MakeBias(c_, number, role, n);
    MARLIN_ASSIGN_OR_RETURN(matrix->dense, reference::Dequantize(*matrix->weights, matrix->index));
    return Status();
  }

  void AddActivations() {
    Random random = RandomFor(c_, "activations");
    data_.x.assign(static_cast<size_t>(c_.tokens * c_.hidden), 0.0);
    for (int64_t t = 0; t < c_.tokens; ++t) {
      double* const row = data_.x.data() + t * c_.hidden;
      if (!IsLattice(c_.data)) {
        for (int64_t i = 0; i < c_.hidden; ++i) {
          row[i] = reference::RoundTo(0.05 * random.Gaussian(), c_.x_type);
        }
        continue;
      }
      // One power of two: gates and ups are codes, and bf16 holds their products. fp32 also holds
      // those of sums of two of one format.
      const bool two = c_.accuracy == Accuracy::kExact && c_.format != "mixed";
      for (int terms = two ? 2 : 1; terms > 0; --terms) {
        const double value = two || random.OneIn(2) ? 1.0 : 2.0;
        row[random.Integer(0, c_.hidden - 1)] = random.OneIn(2) ? value : -value;
      }
    }
  }

  ExpertsData& data_;
  const ExpertsCase& c_;
  std::shared_ptr<const QuantizedWeights> stacks_[4];
};

// The rows of every expert, in the order of the tokens.
void CollectRows(ExpertsData& data) {
  const ExpertsCase& c = data.c;
  std::vector<ExpertRows> all(data.experts.size() + 1);
  const auto add = [&](ExpertRows& rows, int64_t token, double weight) {
    rows.tokens.push_back(token);
    rows.weights.push_back(weight);
    const auto x = data.x.begin() + token * c.hidden;
    rows.x.insert(rows.x.end(), x, x + c.hidden);
  };
  for (size_t i = 0; i < data.ids.size(); ++i) {
    const auto id = static_cast<size_t>(data.ids[i]);
    if (!data.experts[id].present()) continue;
    all[id].expert = &data.experts[id];
    add(all[id], static_cast<int64_t>(i) / c.top_k, data.weights[i]);
  }
  if (data.shared.present()) {
    all.back().expert = &data.shared;
    for (int64_t t = 0; t < c.tokens; ++t) add(all.back(), t, 1.0);
  }
  for (ExpertRows& rows : all) {
    if (rows.expert != nullptr) data.rows.push_back(std::move(rows));
  }
}

void RunRows(ExpertsData& data, ExpertRows& rows) {
  const ExpertsCase& c = data.c;
  const auto count = static_cast<int64_t>(rows.tokens.size());
  const reference::Mlp mlp = rows.expert->mlp();
  rows.run = reference::RunMlp(mlp, rows.x, count, GateOf(c));
  if (rows.expert == &data.shared && data.shared_gate.weights != nullptr) {
    rows.shared_score = reference::Multiply(rows.x, count, data.shared_gate.dense);
    std::transform(rows.shared_score.sum.begin(), rows.shared_score.sum.end(), rows.weights.begin(),
                   reference::Sigmoid);
  }
  for (int64_t row = 0; row < count; ++row) {
    const auto at = static_cast<size_t>(row);
    double* const sum = data.expected.data() + rows.tokens[at] * c.hidden;
    for (int64_t n = 0; n < c.hidden; ++n) {
      sum[n] += rows.weights[at] * rows.run.DownAt(mlp, row, n);
    }
  }
}

// The exponent of the lowest bit of a zero: above that of any other number.
constexpr int kNoBit = 1 << 20;

// Returns the exponent of the largest power of two that divides x.
int LowestBit(double x) {
  if (x == 0) return kNoBit;
  int exponent = 0;
  const double fraction = std::frexp(std::abs(x), &exponent);
  return exponent - 53 + __builtin_ctzll(static_cast<uint64_t>(std::ldexp(fraction, 53)));
}

// Whether `bits` bits hold x. Sums of 0 units are 0.
bool Fits(double x, int bits, int lowest) { return x == 0 || x < std::ldexp(1.0, lowest + bits); }

/// Which outputs are exact in any order of addition: the type between the GEMMs holds the products
/// of gate and up, and the magnitudes of all terms sum to less than 2^24 units of the lowest bit of
/// any.
class LatticeCheck {
 public:
  explicit LatticeCheck(const ExpertsData& data)
      : data_(data), total_(data.expected.size(), 0.0), lowest_(data.expected.size(), kNoBit) {}

  std::vector<bool> Exact() {
    for (const ExpertRows& rows : data_.rows) AddRows(rows);
    std::vector<bool> exact;
    for (size_t i = 0; i < total_.size(); ++i) exact.push_back(Fits(total_[i], 24, lowest_[i]));
    return exact;
  }

 private:
  void AddRows(const ExpertRows& rows) {
    const reference::Mlp mlp = rows.expert->mlp();
    const reference::DenseWeights& weights = *mlp.down.weights;
    std::vector<int> bits;  // The weights' lowest.
    for (size_t i = 0; i < weights.value.size(); ++i) {
      bits.push_back(std::min(LowestBit(weights.value[i]), LowestBit(weights.magnitude[i])));
    }
    const int held = data_.c.accuracy == Accuracy::kExact ? 24 : 8;
    const auto inner = static_cast<size_t>(weights.k);
    for (size_t row = 0; row < rows.tokens.size(); ++row) {
      std::vector<int> lowest(static_cast<size_t>(weights.n), kNoBit);
      for (size_t i = 0; i < inner; ++i) {
        const double value = rows.run.inner[row * inner + i];
        const int bit = LowestBit(value);
        const bool fits = Fits(std::abs(value), held, bit);
        for (size_t n = 0; n < lowest.size(); ++n) {
          lowest[n] = std::min(lowest[n], fits ? bit + bits[i * lowest.size() + n] : -kNoBit);
        }
      }
      AddOutputs(rows, row, lowest);
    }
  }

  // `lowest`: the lowest bits of the terms of the row's results.
  void AddOutputs(const ExpertRows& rows, size_t row, const std::vector<int>& lowest) {
    const double weight = std::abs(rows.weights[row]);
    const std::vector<float>& bias = rows.expert->down.bias;
    for (size_t n = 0; n < lowest.size(); ++n) {
      const size_t at = static_cast<size_t>(rows.tokens[row]) * lowest.size() + n;
      const double constant = bias.empty() ? 0.0 : std::abs(double{bias[n]});
      total_[at] += weight * (rows.run.down.magnitude[row * lowest.size() + n] + constant);
      const int bit = std::min(lowest[n], LowestBit(constant));
      lowest_[at] = std::min(lowest_[at], bit + LowestBit(weight));
    }
  }

  const ExpertsData& data_;
  std::vector<double> total_;  ///< [tokens, hidden]
  std::vector<int> lowest_;
};

}  // namespace

Result<std::unique_ptr<ExpertsData>> MakeExpertsData(const ExpertsCase& c) {
  auto data = std::make_unique<ExpertsData>();
  data->c = c;
  DataBuilder builder(data.get());
  MARLIN_RETURN_IF_ERROR(builder.AddExperts());
  builder.AddTokens();
  data->expected.assign(static_cast<size_t>(c.tokens * c.hidden), 0.0);
  CollectRows(*data);
  for (ExpertRows& rows : data->rows) RunRows(*data, rows);
  if (IsLattice(c.data)) data->exact = LatticeCheck(*data).Exact();
  return data;
}

}  // namespace marlin::conformance
