#include "calibrate/awq_scaler.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/checked.h"
#include "base/macros.h"
#include "checkpoint/convert/conversion.h"
#include "layout/weights_shapes.h"
#include "plan/gemm/backend.h"

namespace marlin {
namespace {

/// Tokens whose outputs the candidates' errors are measured on.
constexpr int64_t kSampleTokens = 512;
/// An expert with fewer tokens is also measured on others.
constexpr int64_t kLeastExpertTokens = 256;
/// Columns that each candidate quantizes: over all matrices of an input; for an expert's down.
constexpr int64_t kColumns = 256;
constexpr int64_t kExpertColumns = 64;

/// At most `most` evenly spaced numbers below `count`.
std::vector<int64_t> Spread(int64_t count, int64_t most) {
  std::vector<int64_t> numbers;
  const int64_t step = std::max<int64_t>(CeilDivide(count, most), 1);
  for (int64_t i = 0; i < count; i += step) numbers.push_back(i);
  return numbers;
}

/// Mean squares over all rows, and an evenly spaced sample of the rows.
class SampledInputs {
 public:
  explicit SampledInputs(int64_t tokens)
      : step_(std::max<int64_t>(CeilDivide(tokens, kSampleTokens), 1)) {}

  void Add(const HostRows& rows) {
    const int64_t k = rows.width;
    inputs_.k = k;
    sums_.resize(static_cast<size_t>(k));
    for (int64_t r = 0; r < rows.rows(); ++r, ++tokens_) {
      const auto row = rows.values.begin() + r * k;
      for (int64_t i = 0; i < k; ++i) {
        const double value = row[i];
        sums_[static_cast<size_t>(i)] += value * value;
      }
      if (tokens_ % step_ == 0) inputs_.sample.insert(inputs_.sample.end(), row, row + k);
    }
  }

  AwqInputs Take() {
    const auto tokens = static_cast<double>(std::max<int64_t>(tokens_, 1));
    for (const double sum : sums_) inputs_.mean_squares.push_back(static_cast<float>(sum / tokens));
    return std::move(inputs_);
  }

 private:
  int64_t step_;
  int64_t tokens_ = 0;
  std::vector<double> sums_;
  AwqInputs inputs_;
};

AwqInputs InputsOf(const HostRows& rows) {
  SampledInputs sampled(rows.rows());
  sampled.Add(rows);
  return sampled.Take();
}

}  // namespace

AwqScaler::AwqScaler(const ModelDirectory& directory, const Device& device,
                     std::span<const std::vector<int32_t>> texts, const QuantizePlan& plan)
    : directory_(directory),
      device_(device),
      texts_(texts),
      walk_(directory_, device_, {}),
      pool_(0) {
  for (const PlanUnit& unit : plan.units) {
    if (unit.action != PlanUnit::Action::kQuantize) continue;
    for (const size_t tensor : unit.sources) units_[source().tensors[tensor].name] = &unit;
  }
}

/// Whether tensors that change hold the products: fp16 has no large powers of two.
bool AwqScaler::Fits(const ExponentsByTensor& changed, Status* status) const {
  for (const auto& [name, exponents] : changed) {
    const size_t tensor = *source().FindTensor(name);
    if (ScaledDType(source().tensors[tensor].dtype, exponents) != DType::kF16) continue;
    const Result<AlignedBuffer> scaled = ScaledTensor(source(), tensor, exponents);
    *status = scaled.status();
    if (!scaled.ok()) return false;
    const TensorInfo& info = source().tensors[tensor];
    const Shape flat{1, info.shape.ElementCount()};
    if (FindNonFinite(TensorView(scaled->data(), info.dtype, flat)) >= 0) return false;
  }
  return true;
}

ExponentsByTensor AwqScaler::Changed(const MatrixInput& input,
                                     std::span<const int8_t> scales) const {
  ExponentsByTensor changed;
  const auto entry = [&](const std::string& tensor) -> TensorExponents& {
    const auto [made, is_new] = changed.try_emplace(tensor);
    const auto before = is_new ? exponents_.find(tensor) : exponents_.end();
    if (before != exponents_.end()) made->second = before->second;
    return made->second;
  };
  const auto multiply = [&](const InputMatrix& matrix) {
    std::vector<int8_t>& in = entry(matrix.tensor).in;
    in.resize(static_cast<size_t>(matrix.experts * input.k));
    for (int64_t k = 0; k < input.k; ++k) {
      int8_t& sum = in[static_cast<size_t>(std::max<int64_t>(matrix.expert, 0) * input.k + k)];
      sum = static_cast<int8_t>(sum + scales[static_cast<size_t>(input.sharing.of(k))]);
    }
  };
  for (const InputMatrix& matrix : input.matrices) multiply(matrix);
  for (const InputMatrix& matrix : input.routed) multiply(matrix);
  for (const InputProducer& producer : input.producers) {
    TensorExponents& exponents = entry(producer.tensor);
    exponents.one_plus = producer.one_plus;
    std::vector<int8_t>& out = exponents.out;
    out.resize(static_cast<size_t>(producer.size));
    for (size_t i = 0; i < scales.size(); ++i) {
      int8_t& sum = out[static_cast<size_t>(producer.elements[i])];
      sum = static_cast<int8_t>(sum - scales[i]);
    }
  }
  return changed;
}

Status AwqScaler::Fold(const MatrixInput& input, const AwqInputs& measured, int64_t columns) {
  std::vector<LoadedTensor> loaded;
  std::vector<AwqMatrix> matrices;
  const auto load = [&](const InputMatrix& consumer) -> Status {
    const auto found = units_.find(consumer.tensor);
    if (found == units_.end()) return {};
    const PlanUnit& unit = *found->second;
    MARLIN_ASSIGN_OR_RETURN(LoadedTensor tensor,
                            LoadedTensor::Load(source(), *source().FindTensor(consumer.tensor)));
    TensorView matrix = MatrixOf(tensor.view(), consumer.expert);
    if (unit.record.layout == SourceLayout::kOutIn) matrix = matrix.Transposed();
    matrices.push_back({matrix, OptionsFor(unit.choice, QuantizeMethod::kRtn, consumer.tensor)});
    loaded.push_back(std::move(tensor));
    return {};
  };
  for (const InputMatrix& matrix : input.matrices) MARLIN_RETURN_IF_ERROR(load(matrix));
  for (const InputMatrix& matrix : input.routed) MARLIN_RETURN_IF_ERROR(load(matrix));
  if (matrices.empty()) return {};
  ++inputs_;
  MARLIN_ASSIGN_OR_RETURN(const std::vector<int8_t> scales,
                          SearchAwqExponents(pool_, measured, input.sharing, matrices, columns));
  if (scales.empty()) return {};
  ExponentsByTensor changed = Changed(input, scales);
  Status status;
  if (!Fits(changed, &status)) return status;
  ++scaled_inputs_;
  for (auto& [tensor, exponents] : changed) exponents_[tensor] = std::move(exponents);
  return {};
}

InputSink AwqScaler::SinkFor(const MatrixInput& input) {
  if (input.producers.empty()) return {};
  const auto measured = std::make_shared<SampledInputs>(walk_.tokens());
  return {[measured](const HostRows& rows, const HostRows&) {
            measured->Add(rows);
            return Status();
          },
          [this, &input, measured] { return Fold(input, measured->Take(), kColumns); }};
}

Status AwqScaler::VisitExpert(const ExpertVisit& visit) {
  const MatrixInput& down = visit.matrices.down;
  if (down.producers.empty()) return {};
  const int64_t tokens = visit.current.rows();
  std::vector<int64_t> chosen;
  if (visit.shared()) {
    chosen = Spread(tokens, kSampleTokens);
  } else {
    const std::span<const int64_t> own = visit.tokens;
    for (const int64_t i : Spread(static_cast<int64_t>(own.size()), kSampleTokens)) {
      chosen.push_back(own[static_cast<size_t>(i)]);
    }
    const auto missing = kLeastExpertTokens - static_cast<int64_t>(chosen.size());
    if (missing > 0) {
      const std::vector<int64_t> others = Spread(tokens, missing);
      chosen.insert(chosen.end(), others.begin(), others.end());
    }
  }
  MARLIN_ASSIGN_OR_RETURN(const HostRows inner,
                          walk_.CurrentInner(visit, SelectRows(visit.current, chosen)));
  return Fold(down, InputsOf(inner), visit.shared() ? kColumns : kExpertColumns);
}

Status AwqScaler::Run(const Progress& progress) {
  MARLIN_RETURN_IF_ERROR(walk_.Start(texts_, Internals::Impl(device_).backend().pass_tokens()));
  return walk_.RunAll(*this, progress);
}

}  // namespace marlin
