// Formats for a number of bits: minimizes the sum of what every matrix costs alone.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "marlin/sensitivity.h"
#include "recipe/choice_options.h"

namespace marlin {
namespace {

/// A format of one matrix.
struct Option {
  int64_t bytes = 0;
  double kl = 0;
  size_t format = 0;
};

/// Raising a matrix from one option of its hull to the next.
struct Step {
  double slope = 0;  ///< KL that a byte removes.
  size_t matrix = 0;
  size_t from = 0;
};

Result<int64_t> BytesOf(const Sensitivity::Matrix& matrix, const FormatChoice& choice) {
  MARLIN_ASSIGN_OR_RETURN(WeightsSpec spec,
                          QuantizedSpec({matrix.k, matrix.n}, QuantizeOptionsOf(choice)));
  spec.experts = matrix.experts;
  return CodeAndScaleBytes(spec);
}

/// The lower convex hull of KL over bytes, from the fewest bytes to the smallest KL.
std::vector<Option> HullOf(std::vector<Option> options) {
  std::stable_sort(options.begin(), options.end(), [](const Option& a, const Option& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.kl < b.kl;
  });
  const auto slope = [](const Option& a, const Option& b) {
    return (a.kl - b.kl) / static_cast<double>(b.bytes - a.bytes);
  };
  std::vector<Option> hull;
  for (const Option& option : options) {
    if (!hull.empty() && (option.bytes == hull.back().bytes || option.kl >= hull.back().kl)) {
      continue;
    }
    while (hull.size() >= 2 &&
           slope(hull[hull.size() - 2], hull.back()) <= slope(hull.back(), option)) {
      hull.pop_back();
    }
    hull.push_back(option);
  }
  return hull;
}

class Assigner {
 public:
  explicit Assigner(const Sensitivity& sensitivity) : sensitivity_(sensitivity) {}

  /// Errors: as AssignFormats.
  Status TakeFormats(std::span<const FormatChoice> formats);
  Status TakeMatrices(std::span<const TensorShape> tensors);
  Result<FormatAssignment> Assign(double target);

 private:
  const Sensitivity& sensitivity_;
  std::vector<size_t> formats_;
  std::vector<std::vector<Option>> hulls_;  ///< By matrix.
  int64_t weights_ = 0;
};

Status Assigner::TakeFormats(std::span<const FormatChoice> formats) {
  const std::vector<FormatChoice>& measured = sensitivity_.formats;
  for (size_t i = 0; formats.empty() && i < measured.size(); ++i) formats_.push_back(i);
  for (const FormatChoice& choice : formats) {
    const auto found = std::find(measured.begin(), measured.end(), choice);
    if (found == measured.end()) {
      return Invalid(fmt::format("format {}: was not measured", choice.ToString()));
    }
    formats_.push_back(static_cast<size_t>(found - measured.begin()));
  }
  return {};
}

Status Assigner::TakeMatrices(std::span<const TensorShape> tensors) {
  std::map<std::string_view, int64_t> sizes;
  for (const TensorShape& tensor : tensors) sizes[tensor.name] = tensor.shape.ElementCount();
  if (sensitivity_.matrices.empty()) return Invalid("sensitivity: has no matrices");
  for (const Sensitivity::Matrix& matrix : sensitivity_.matrices) {
    const auto found = sizes.find(matrix.name);
    const int64_t weights = matrix.experts * matrix.k * matrix.n;
    if (found == sizes.end() || found->second != weights) {
      return Invalid(fmt::format("sensitivity of another model: \"{}\" has {} weights, not {}",
                                 Printable(matrix.name), weights,
                                 found == sizes.end() ? 0 : found->second));
    }
    weights_ += weights;
    std::vector<Option> options;
    for (const size_t format : formats_) {
      MARLIN_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(matrix, sensitivity_.formats[format]));
      options.push_back({bytes, matrix.kl[format], format});
    }
    hulls_.push_back(HullOf(std::move(options)));
  }
  return {};
}

Result<FormatAssignment> Assigner::Assign(double target) {
  const auto weights = static_cast<double>(weights_);
  const double budget = target * weights / 8.0;
  double bytes = 0;
  std::vector<Step> steps;
  for (size_t m = 0; m < hulls_.size(); ++m) {
    const std::vector<Option>& hull = hulls_[m];
    bytes += static_cast<double>(hull.front().bytes);
    for (size_t i = 0; i + 1 < hull.size(); ++i) {
      steps.push_back(
          {(hull[i].kl - hull[i + 1].kl) / static_cast<double>(hull[i + 1].bytes - hull[i].bytes),
           m, i});
    }
  }
  // Steps of one matrix are in the order of their slopes already, and stay so.
  std::stable_sort(steps.begin(), steps.end(),
                   [](const Step& a, const Step& b) { return a.slope > b.slope; });
  std::vector<size_t> chosen(hulls_.size());
  for (const Step& step : steps) {
    // A step over the budget is skipped, with those that build on it; smaller matrices may still
    // fit.
    if (chosen[step.matrix] != step.from) continue;
    const std::vector<Option>& hull = hulls_[step.matrix];
    const auto more = static_cast<double>(hull[step.from + 1].bytes - hull[step.from].bytes);
    if (bytes + more > budget) continue;
    bytes += more;
    chosen[step.matrix] = step.from + 1;
  }
  FormatAssignment assignment;
  assignment.recipe.set_name(fmt::format("target-bpw:{}", target));
  assignment.bits_per_weight = 8.0 * bytes / weights;
  assignment.weights = weights_;
  for (size_t m = 0; m < hulls_.size(); ++m) {
    const Option& option = hulls_[m][chosen[m]];
    assignment.predicted_kl += option.kl;
    assignment.recipe.SetTensor(sensitivity_.matrices[m].name, sensitivity_.formats[option.format]);
  }
  return assignment;
}

}  // namespace

int64_t CodeAndScaleBytes(const WeightsSpec& spec) {
  const FormatInfo& info = GetFormatInfo(spec.format);
  const int64_t bytes = StoredBytes(spec);
  return bytes == INT64_MAX || !info.has_codebook ? bytes : bytes - (int64_t{4} << info.bits);
}

Result<double> LeastBitsPerWeight(std::span<const Sensitivity::Matrix> matrices,
                                  std::span<const FormatChoice> formats) {
  double bytes = 0;
  double weights = 0;
  for (const Sensitivity::Matrix& matrix : matrices) {
    int64_t least = INT64_MAX;
    for (const FormatChoice& choice : formats) {
      MARLIN_ASSIGN_OR_RETURN(const int64_t own, BytesOf(matrix, choice));
      least = std::min(least, own);
    }
    bytes += static_cast<double>(least);
    weights += static_cast<double>(matrix.experts * matrix.k * matrix.n);
  }
  return weights > 0 ? 8.0 * bytes / weights : 0.0;
}

Status CheckTarget(std::span<const Sensitivity::Matrix> matrices,
                   std::span<const FormatChoice> formats, double target) {
  if (!std::isfinite(target) || target <= 0.0) {
    return Invalid(fmt::format("target: expected a positive number of bits, got {}", target));
  }
  MARLIN_ASSIGN_OR_RETURN(const double least, LeastBitsPerWeight(matrices, formats));
  if (least <= target) return {};
  return Invalid(
      fmt::format("target: {} bits per weight, the smallest formats take {:.4f}", target, least));
}

Result<FormatAssignment> AssignFormats(const Sensitivity& sensitivity,
                                       std::span<const TensorShape> tensors, double target,
                                       std::span<const FormatChoice> formats) {
  Assigner assigner(sensitivity);
  MARLIN_RETURN_IF_ERROR(assigner.TakeFormats(formats));
  MARLIN_RETURN_IF_ERROR(assigner.TakeMatrices(tensors));
  const std::span<const FormatChoice> all(sensitivity.formats);
  MARLIN_RETURN_IF_ERROR(
      CheckTarget(sensitivity.matrices, formats.empty() ? all : formats, target));
  return assigner.Assign(target);
}

}  // namespace marlin
