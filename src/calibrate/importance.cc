// Measures an importance matrix: the mean squares of the inputs of a model's matrices.
#include "marlin/importance.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "base/printable.h"
#include "calibrate/calibration_text.h"
#include "calibrate/layer_walk.h"
#include "calibrate/measure_model.h"
#include "checkpoint/readers/gguf/gguf_names.h"
#include "checkpoint/readers/gguf/gguf_row_places.h"
#include "engine/model_impl.h"
#include "model/open_model.h"
#include "recipe/expert_name.h"

namespace marlin {
namespace {

constexpr int64_t kImportanceTokens = 16384;

/// Squares of one input, summed over tokens in fp64 and in the order of the text.
class SquareSums {
 public:
  void Add(const HostRows& rows) {
    sums_.resize(static_cast<size_t>(rows.width));
    for (size_t i = 0; i < rows.values.size(); ++i) {
      const double value = rows.values[i];
      sums_[i % sums_.size()] += value * value;
    }
    tokens_ += rows.rows();
  }
  int64_t tokens() const { return tokens_; }
  const std::vector<double>& sums() const { return sums_; }

 private:
  std::vector<double> sums_;
  int64_t tokens_ = 0;
};

class ImportanceMeter final : private InputVisitor {
 public:
  ImportanceMeter(ModelDirectory directory, const std::string& path, const Device& device,
                  const ImportanceOptions& options)
      : directory_(std::move(directory)),
        path_(path),
        device_(device),
        options_(options),
        walk_(directory_, device_, {.experts_by_pass = true}) {}

  Result<ImportanceMatrix> Run();

 private:
  /// Squares of an expert's inputs so far.
  struct ExpertSums {
    SquareSums gate_up;
    SquareSums down;
  };

  InputSink SinkFor(const MatrixInput& input) override;
  Status VisitExpert(const ExpertVisit& visit) override;
  Status FindNames();
  Status Record(const MatrixInput& input, const SquareSums& sums);
  Status RecordMatrix(const InputMatrix& matrix, int64_t k, const SquareSums& sums);

  ModelDirectory directory_;
  const std::string& path_;
  Device device_;
  const ImportanceOptions& options_;
  LayerWalk walk_;
  GgufNaming naming_;
  GgufHeads heads_;
  std::map<int64_t, ExpertSums> experts_;  ///< By number, in the current layer.
  ImportanceMatrix matrix_;
};

Status ImportanceMeter::FindNames() {
  const std::string type(directory_.config.family->model_type);
  naming_ = GgufNamingOf(type);
  heads_ = GgufDeltaHeads(directory_.config.shape);
  if (naming_.known()) return {};
  return Status(Code::kUnsupported,
                fmt::format("importance: GGUF has no names for the tensors of model_type '{}'",
                            Printable(type)));
}

/// Records the inputs of a matrix under its GGUF name.
Status ImportanceMeter::RecordMatrix(const InputMatrix& matrix, int64_t k, const SquareSums& sums) {
  const std::string& tensor = matrix.tensor;
  const std::optional<ExpertName> own = ParseExpertName(tensor);
  const std::vector<GgufTensorOf> stored = GgufTensorsOf(naming_, own ? own->common : tensor);
  if (stored.empty()) {
    return Status(Code::kUnsupported,
                  fmt::format("importance: GGUF has no name for \"{}\"", Printable(tensor)));
  }
  const int64_t number = own ? own->expert : std::max<int64_t>(matrix.expert, 0);
  const bool routed = own.has_value() || matrix.expert >= 0;
  ImportanceMatrix::Inputs& inputs = matrix_.inputs[stored.front().name];
  if (inputs.k == 0) {
    inputs.experts = routed ? directory_.config.shape.experts : 1;
    inputs.k = k;
    inputs.mean_squares.resize(static_cast<size_t>(inputs.experts * k));
    inputs.counts.resize(static_cast<size_t>(inputs.experts));
  }
  if (sums.tokens() == 0) return {};
  const auto tokens = static_cast<double>(sums.tokens());
  inputs.counts[static_cast<size_t>(number)] = static_cast<float>(tokens);
  for (int64_t i = 0; i < k; ++i) {
    const auto mean = static_cast<float>(sums.sums()[static_cast<size_t>(i)] / tokens);
    // The file holds sums in fp32.
    if (!std::isfinite(mean * static_cast<float>(tokens))) {
      return Status(Code::kNonFiniteInput, fmt::format("the squares of input {} of \"{}\" are not "
                                                       "finite",
                                                       i, Printable(tensor)));
    }
    const int64_t column = GgufColumn(stored.front().place, heads_, k, i);
    inputs.mean_squares[static_cast<size_t>(number * k + column)] = mean;
  }
  // One matrix may be several of GGUF.
  for (size_t i = 1; i < stored.size(); ++i) matrix_.inputs[stored[i].name] = inputs;
  return {};
}

Status ImportanceMeter::Record(const MatrixInput& input, const SquareSums& sums) {
  for (const InputMatrix& matrix : input.matrices) {
    MARLIN_RETURN_IF_ERROR(RecordMatrix(matrix, input.k, sums));
  }
  return {};
}

InputSink ImportanceMeter::SinkFor(const MatrixInput& input) {
  const auto sums = std::make_shared<SquareSums>();
  return {[sums](const HostRows& rows, const HostRows&) {
            sums->Add(rows);
            return Status();
          },
          [this, &input, sums] { return Record(input, *sums); }};
}

Status ImportanceMeter::VisitExpert(const ExpertVisit& visit) {
  const ExpertMatrices& matrices = visit.matrices;
  ExpertSums& sums = experts_[matrices.expert];
  if (visit.shared()) {
    MARLIN_ASSIGN_OR_RETURN(const HostRows inner, walk_.CurrentInner(visit, visit.current));
    sums.down.Add(inner);
  } else if (!visit.tokens.empty()) {
    const HostRows routed = SelectRows(visit.current, visit.tokens);
    sums.gate_up.Add(routed);
    MARLIN_ASSIGN_OR_RETURN(const HostRows inner, walk_.CurrentInner(visit, routed));
    sums.down.Add(inner);
  }
  if (!visit.last) return {};
  MARLIN_RETURN_IF_ERROR(Record(matrices.gate_up, sums.gate_up));
  MARLIN_RETURN_IF_ERROR(Record(matrices.down, sums.down));
  experts_.erase(matrices.expert);
  return {};
}

Result<ImportanceMatrix> ImportanceMeter::Run() {
  MARLIN_RETURN_IF_ERROR(FindNames());
  const int64_t wanted = options_.text.tokens > 0 ? options_.text.tokens : kImportanceTokens;
  MARLIN_ASSIGN_OR_RETURN(
      const auto texts, CalibrationTexts(path_, directory_.config, device_, options_.text, wanted));
  MARLIN_RETURN_IF_ERROR(walk_.Start(texts, kPassTokens));
  MARLIN_RETURN_IF_ERROR(walk_.RunAll(*this, options_.progress));
  return std::move(matrix_);
}

}  // namespace

Result<ImportanceMatrix> MeasureImportance(const std::string& source, const Device& device,
                                           const ImportanceOptions& options) {
  return MeasureModel<ImportanceMeter>(source, device, options);
}

}  // namespace marlin
