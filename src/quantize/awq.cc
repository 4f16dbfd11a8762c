#include "quantize/awq.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <set>

#include "base/checked.h"
#include "base/macros.h"
#include "layout/parameters.h"
#include "quantize/quantizer.h"

namespace marlin {
namespace {

using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr int kSteps = 10;                ///< Steps of the exponent a, from 0 to 1.
constexpr int kMostExponent = 10;         ///< Beyond 2^10 a scale would not serve its group.
constexpr double kLeastGain = 0.02;       ///< Smaller ones are chance.
constexpr double kLeastMagnitude = 1e-6;  ///< Relative to the largest; keeps logarithms finite.
constexpr int64_t kLeastColumns = 8;      ///< Fewer do not show what a matrix is like.
constexpr int64_t kTokensPerTask = 64;

/// Some columns of a matrix.
struct ColumnSample {
  Rows weights;  ///< [k, columns]
  double output = 0;
  const QuantizeOptions* options = nullptr;
};

class Search {
 public:
  Search(ThreadPool& pool, const AwqInputs& inputs, const AwqSharing& sharing)
      : pool_(pool),
        inputs_(inputs),
        sharing_(sharing),
        tokens_(static_cast<int64_t>(inputs.sample.size()) / inputs.k),
        x_(inputs.sample.data(), tokens_, inputs.k) {}

  void Sample(std::span<const AwqMatrix> matrices, int64_t columns);
  Result<std::vector<int8_t>> Run();

 private:
  void SampleMatrix(const AwqMatrix& matrix, int64_t columns);
  std::vector<double> InputMagnitudes() const;
  std::vector<double> WeightMagnitudes() const;
  std::vector<double> PerScale(const std::vector<double>& values) const;
  double OutputSquares(const Rows& weights) const;
  Result<double> Error(const std::vector<int8_t>& exponents);
  Result<double> ErrorOf(const ColumnSample& sample, const std::vector<int8_t>& exponents);

  ThreadPool& pool_;
  const AwqInputs& inputs_;
  const AwqSharing& sharing_;
  int64_t tokens_;
  Eigen::Map<const Rows> x_;  ///< [tokens, k]
  std::vector<ColumnSample> samples_;
};

void Search::Sample(std::span<const AwqMatrix> matrices, int64_t columns) {
  const auto count = static_cast<int64_t>(matrices.size());
  // With too many matrices for the columns, one of every `step` is sampled: an odd step, because
  // gates and ups alternate.
  const int64_t step = CeilDivide(count * kLeastColumns, std::max(columns, kLeastColumns)) | 1;
  const int64_t chosen = CeilDivide(count, step);
  const int64_t each = std::max(kLeastColumns, columns / std::max<int64_t>(chosen, 1));
  for (int64_t i = 0; i < count; i += step) SampleMatrix(matrices[static_cast<size_t>(i)], each);
}

void Search::SampleMatrix(const AwqMatrix& matrix, int64_t columns) {
  const TensorView& view = matrix.matrix;
  const int64_t n = view.dim(1);
  const int64_t count = std::min(columns, n);
  ColumnSample sample;
  sample.options = &matrix.options;
  sample.weights.resize(inputs_.k, count);
  for (int64_t k = 0; k < inputs_.k; ++k) {
    for (int64_t c = 0; c < count; ++c) {
      const int64_t element = k * view.stride(0) + (c * n / count) * view.stride(1);
      sample.weights(k, c) = ParameterAt(view.As<std::byte>(), view.dtype(), element);
    }
  }
  sample.output = OutputSquares(sample.weights);
  if (sample.output > 0 && std::isfinite(sample.output)) samples_.push_back(std::move(sample));
}

double Search::OutputSquares(const Rows& weights) const {
  std::vector<double> sums(static_cast<size_t>(CeilDivide(tokens_, kTokensPerTask)));
  pool_.Run(static_cast<int64_t>(sums.size()), [&](int64_t task, int) {
    const int64_t first = task * kTokensPerTask;
    const int64_t count = std::min(kTokensPerTask, tokens_ - first);
    const Rows product = x_.middleRows(first, count) * weights;
    sums[static_cast<size_t>(task)] = product.cast<double>().squaredNorm();
  });
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

/// The means of values [k] that share a scale.
std::vector<double> Search::PerScale(const std::vector<double>& values) const {
  const auto count = static_cast<size_t>(sharing_.count(inputs_.k));
  std::vector<double> means(count);
  std::vector<double> members(count);
  for (int64_t k = 0; k < inputs_.k; ++k) {
    const auto scale = static_cast<size_t>(sharing_.of(k));
    means[scale] += values[static_cast<size_t>(k)];
    members[scale] += 1;
  }
  double largest = 0;
  for (size_t i = 0; i < count; ++i) {
    means[i] /= std::max(members[i], 1.0);
    largest = std::max(largest, means[i]);
  }
  for (double& mean : means) mean = std::max(mean, kLeastMagnitude * largest);
  return means;
}

/// Base-2 logarithms of the inputs' root mean squares.
std::vector<double> Search::InputMagnitudes() const {
  std::vector<double> magnitudes =
      PerScale({inputs_.mean_squares.begin(), inputs_.mean_squares.end()});
  for (double& magnitude : magnitudes) magnitude = 0.5 * std::log2(magnitude);
  return magnitudes;
}

/// Base-2 logarithms of the weights' mean magnitudes relative to the largest of their column.
std::vector<double> Search::WeightMagnitudes() const {
  std::vector<double> sums(static_cast<size_t>(inputs_.k));
  for (const ColumnSample& sample : samples_) {
    const Eigen::Array<float, 1, Eigen::Dynamic> largest =
        sample.weights.cwiseAbs().colwise().maxCoeff().array();
    const double share = 1.0 / static_cast<double>(sample.weights.cols());
    for (int64_t k = 0; k < inputs_.k; ++k) {
      for (int64_t c = 0; c < sample.weights.cols(); ++c) {
        if (largest(c) == 0) continue;
        const double relative = std::abs(sample.weights(k, c)) / largest(c);
        sums[static_cast<size_t>(k)] += relative * share;
      }
    }
  }
  std::vector<double> magnitudes = PerScale(sums);
  for (double& magnitude : magnitudes) magnitude = std::log2(magnitude);
  return magnitudes;
}

Result<double> Search::ErrorOf(const ColumnSample& sample, const std::vector<int8_t>& exponents) {
  Rows scaled = sample.weights;
  for (int64_t k = 0; k < inputs_.k; ++k) {
    scaled.row(k) *= std::ldexp(1.0F, exponents[static_cast<size_t>(sharing_.of(k))]);
  }
  QuantizeOptions options = *sample.options;
  options.method = QuantizeMethod::kRtn;
  const Shape shape{scaled.rows(), scaled.cols()};
  const TensorView dense(scaled.data(), DType::kF32, shape);
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights,
                          QuantizeOn(pool_, dense, options, nullptr));
  Rows errors(scaled.rows(), scaled.cols());
  MARLIN_RETURN_IF_ERROR(Dequantize(weights, MutableTensorView(errors.data(), DType::kF32, shape)));
  for (int64_t k = 0; k < inputs_.k; ++k) {
    errors.row(k) *= std::ldexp(1.0F, -exponents[static_cast<size_t>(sharing_.of(k))]);
  }
  errors -= sample.weights;
  return OutputSquares(errors) / sample.output;
}

Result<double> Search::Error(const std::vector<int8_t>& exponents) {
  double sum = 0;
  for (const ColumnSample& sample : samples_) {
    MARLIN_ASSIGN_OR_RETURN(const double error, ErrorOf(sample, exponents));
    sum += error;
  }
  return sum;
}

/// Powers of two nearest to 2^logarithms, moved so that the largest and the smallest are inverses.
std::vector<int8_t> ExponentsOf(const std::vector<double>& logarithms) {
  const auto [least, most] = std::minmax_element(logarithms.begin(), logarithms.end());
  const double middle = (*least + *most) / 2;
  std::vector<int8_t> exponents;
  exponents.reserve(logarithms.size());
  for (const double logarithm : logarithms) {
    const long rounded = std::lround(logarithm - middle);
    exponents.push_back(
        static_cast<int8_t>(std::clamp<long>(rounded, -kMostExponent, kMostExponent)));
  }
  return exponents;
}

Result<std::vector<int8_t>> Search::Run() {
  const std::vector<int8_t> none(static_cast<size_t>(sharing_.count(inputs_.k)));
  const bool finite = std::all_of(inputs_.mean_squares.begin(), inputs_.mean_squares.end(),
                                  [](float square) { return std::isfinite(square); });
  if (samples_.empty() || !finite) return std::vector<int8_t>();
  MARLIN_ASSIGN_OR_RETURN(const double unscaled, Error(none));
  double best = unscaled * (1 - kLeastGain);
  std::vector<int8_t> chosen;
  const std::vector<double> inputs = InputMagnitudes();
  const std::vector<double> weights = WeightMagnitudes();
  std::set<std::vector<int8_t>> tried = {none};
  for (int step = 0; step <= kSteps; ++step) {
    const double a = static_cast<double>(step) / kSteps;
    for (const double b : {0.0, 1 - a}) {
      std::vector<double> logarithms(inputs.size());
      for (size_t i = 0; i < inputs.size(); ++i) logarithms[i] = a * inputs[i] - b * weights[i];
      std::vector<int8_t> exponents = ExponentsOf(logarithms);
      if (!tried.insert(exponents).second) continue;
      const Result<double> error = Error(exponents);
      // For example a scale beyond its type's range: the weights cannot be stored with it.
      if (!error.ok() && error.status().code() == Code::kUnsupported) continue;
      MARLIN_RETURN_IF_ERROR(error.status());
      if (!(*error < best)) continue;
      best = *error;
      chosen = std::move(exponents);
    }
  }
  return chosen;
}

}  // namespace

Result<std::vector<int8_t>> SearchAwqExponents(ThreadPool& pool, const AwqInputs& inputs,
                                               const AwqSharing& sharing,
                                               std::span<const AwqMatrix> matrices,
                                               int64_t columns) {
  Search search(pool, inputs, sharing);
  search.Sample(matrices, columns);
  return search.Run();
}

}  // namespace marlin
