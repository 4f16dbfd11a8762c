#include "product_run.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "base/macros.h"
#include "ops/gemm/candidates.h"
#include "reference/elements.h"

namespace marlin::conformance {
namespace {

constexpr int64_t kRowPadding = 11;

}  // namespace

Status ProductRun::PlaceInputs(const Problem& problem, const std::vector<int64_t>& rows) {
  const Case& c = problem.c;
  const int64_t bytes = DTypeBytes(c.a_type);
  const int64_t stride = problem.a.stride(0);
  GuardedBuffer a(rows.empty() ? 0 : ((rows_ - 1) * stride + c.k) * bytes,
                  c.misaligned ? bytes : 0);
  GuardedBuffer row_weight(c.row_weight ? rows_ * 4 : 0, c.misaligned ? 4 : 0);
  for (int64_t i = 0; i < rows_; ++i) {
    const int64_t row = rows[static_cast<size_t>(i)];
    std::memcpy(a.data() + i * stride * bytes, problem.a_memory.data() + row * stride * bytes,
                static_cast<size_t>(c.k * bytes));
    if (c.row_weight) {
      std::memcpy(row_weight.data() + i * 4, problem.row_weight_memory.data() + row * 4, 4);
    }
  }
  MARLIN_ASSIGN_OR_RETURN(a_, DeviceImage::Make(device_, std::move(a)));
  a_view_ = TensorView(a_.data(), c.a_type, {rows_, c.k}, {stride, 1});
  if (c.row_weight) {
    MARLIN_ASSIGN_OR_RETURN(row_weight_, DeviceImage::Make(device_, std::move(row_weight)));
    options_.row_weight = TensorView(row_weight_.data(), DType::kF32, {rows_});
  }
  if (c.bias) {
    const TensorView row(problem.bias_memory.data(), c.bias_type, {1, 1, c.n});
    const int64_t offset = c.misaligned ? DTypeBytes(c.bias_type) : 0;
    MARLIN_ASSIGN_OR_RETURN(
        bias_, DeviceImage::Make(device_, RepeatRows(row, problem.n, c.gated ? 2 : 1, offset)));
    options_.bias = TensorView(bias_.data(), c.bias_type, {problem.n});
  }
  return Status();
}

Status ProductRun::PlaceOutput(const Case& c) {
  const int64_t bytes = DTypeBytes(type_);
  const int64_t count = rows_ == 0 ? 0 : (rows_ - 1) * stride_ + columns_;
  MARLIN_ASSIGN_OR_RETURN(
      output_, DeviceImage::Make(device_, GuardedBuffer(count * bytes, c.misaligned ? bytes : 0)));
  out_view_ = MutableTensorView(output_.data(), type_, {rows_, columns_}, {stride_, 1});
  return Status();
}

// Half of the problems force a kernel variant, so that together they cover all variants.
void ProductRun::TakeVariant(uint64_t seed) {
  if (options_.kernel.empty() || seed % 2 == 0) return;
  const Result<std::vector<GemmCandidate>> candidates =
      ListCandidates(device_, a_view_, prepared_, out_view_, options_);
  if (!candidates.ok()) return;  // PlanGemm reports the error.
  std::vector<std::string> variants;
  for (const GemmCandidate& candidate : *candidates) {
    if (candidate.name.starts_with(options_.kernel + "@")) variants.push_back(candidate.name);
  }
  if (!variants.empty()) options_.kernel = variants[seed / 2 % variants.size()];
}

Status ProductRun::Plan() {
  MARLIN_ASSIGN_OR_RETURN(const GemmPlan plan,
                          PlanGemm(device_, a_view_, prepared_, out_view_, options_));
  kernel_ = plan.kernel();
  if (plan.workspace_bytes() == 0) return Status();
  MARLIN_ASSIGN_OR_RETURN(workspace_,
                          DeviceImage::Make(device_, GuardedBuffer(plan.workspace_bytes())));
  options_.workspace = workspace_.data();
  options_.workspace_bytes = plan.workspace_bytes();
  return Status();
}

Result<ProductRun> ProductRun::Make(const Device& device, const PreparedWeights& prepared,
                                    const Problem& problem, GemmOptions options,
                                    const std::vector<int64_t>& rows) {
  const Case& c = problem.c;
  ProductRun run(device, prepared, std::move(options));
  run.rows_ = static_cast<int64_t>(rows.size());
  run.columns_ = prepared.spec().n / (c.gated ? 2 : 1);
  run.stride_ = run.columns_ + (c.padded ? kRowPadding : 0);
  run.type_ = c.c_type;
  run.as_vector_ = run.rows_ == 1 && c.seed % 2 == 1;
  MARLIN_RETURN_IF_ERROR(run.PlaceInputs(problem, rows));
  MARLIN_RETURN_IF_ERROR(run.PlaceOutput(c));
  run.TakeVariant(c.seed);
  MARLIN_RETURN_IF_ERROR(run.Plan());
  return run;
}

Status ProductRun::Launch() const {
  if (!as_vector_) return Gemm(device_, a_view_, prepared_, out_view_, options_);
  const TensorView vector(a_view_.data(), a_view_.dtype(), {a_view_.dim(1)});
  const MutableTensorView out(out_view_.data(), type_, {columns_});
  return Gemv(device_, vector, prepared_, out, options_);
}

Status ProductRun::Collect() {
  MARLIN_RETURN_IF_ERROR(device_.Synchronize(options_.stream));
  MARLIN_RETURN_IF_ERROR(output_.Download());
  if (workspace_.data() != nullptr) MARLIN_RETURN_IF_ERROR(workspace_.DownloadGuards());
  inputs_changed_ = false;
  for (const DeviceImage* input : {&a_, &bias_, &row_weight_}) {
    MARLIN_ASSIGN_OR_RETURN(const bool changed, input->Changed());
    inputs_changed_ |= changed;
  }
  return Status();
}

Status ProductRun::Reset() {
  MARLIN_RETURN_IF_ERROR(output_.Poison());
  return workspace_.data() == nullptr ? Status() : workspace_.Poison();
}

void ProductRun::ReadFrom(const ProductRun& other) { a_view_ = other.out_view_; }

double ProductRun::Output(int64_t m, int64_t n) const {
  return reference::LoadElement(output_.host().data(), type_, m * stride_ + n);
}

PeriodicOutput ProductRun::Repeated(int64_t rows, int64_t columns) const {
  return {output_.host().data(), type_, rows_, columns_, stride_, rows, columns};
}

uint32_t ProductRun::Bits(int64_t m, int64_t n) const {
  const int64_t bytes = DTypeBytes(type_);
  uint32_t bits = 0;
  std::memcpy(&bits, output_.host().data() + (m * stride_ + n) * bytes, static_cast<size_t>(bytes));
  return bits;
}

uint64_t ProductRun::Hash() const { return output_.host().Hash(); }

std::string ProductRun::Damage() const {
  if (!output_.host().Intact()) return "output: wrote outside of it";
  if (workspace_.data() != nullptr && !workspace_.host().Intact()) {
    return "workspace: wrote outside of it";
  }
  if (inputs_changed_) return "inputs: a guard or an operand was written to";
  const int64_t bytes = DTypeBytes(type_);
  for (int64_t m = 0; m + 1 < rows_; ++m) {
    if (!output_.host().Untouched((m * stride_ + columns_) * bytes, (m + 1) * stride_ * bytes)) {
      return fmt::format("output: wrote between rows {} and {}", m, m + 1);
    }
  }
  return {};
}

GemmOptions ProductOptions(const Problem& problem) {
  GemmOptions options;
  options.activation = problem.c.activation;
  options.gated = problem.c.gated;
  options.allow_bf16_activations = problem.c.allow_bf16_activations;
  options.expert = problem.expert;
  return options;
}

std::vector<int64_t> AllRows(const Problem& problem) {
  std::vector<int64_t> rows(static_cast<size_t>(problem.m));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i) % problem.c.m;
  return rows;
}

Result<ProductRun> RunProduct(const Device& device, const PreparedWeights& prepared,
                              const Problem& problem, const GemmOptions& options) {
  return RunProductRows(device, prepared, problem, options, AllRows(problem));
}

Result<ProductRun> RunProductRows(const Device& device, const PreparedWeights& prepared,
                                  const Problem& problem, const GemmOptions& options,
                                  const std::vector<int64_t>& rows) {
  MARLIN_ASSIGN_OR_RETURN(ProductRun run,
                          ProductRun::Make(device, prepared, problem, options, rows));
  MARLIN_RETURN_IF_ERROR(run.Launch());
  MARLIN_RETURN_IF_ERROR(run.Collect());
  return run;
}

}  // namespace marlin::conformance
