#include "product_run.h"

#include <fmt/format.h>

#include <cstring>
#include <numeric>
#include <utility>

#include "base/macros.h"
#include "random.h"
#include "reference/elements.h"

namespace marlin::conformance {
namespace {

constexpr int64_t kRowPadding = 11;

}  // namespace

double ProductRun::Output(int64_t m, int64_t n) const {
  return reference::LoadElement(output_.data(), type_, m * stride_ + n);
}

uint32_t ProductRun::Bits(int64_t m, int64_t n) const {
  const int64_t bytes = DTypeBytes(type_);
  uint32_t bits = 0;
  std::memcpy(&bits, output_.data() + (m * stride_ + n) * bytes, static_cast<size_t>(bytes));
  return bits;
}

uint64_t ProductRun::Hash() const {
  return HashText(
      {reinterpret_cast<const char*>(output_.data()), static_cast<size_t>(output_.bytes())});
}

std::string ProductRun::Damage() const {
  if (!output_.Intact()) return "output: wrote outside of it";
  if (workspace_.data() != nullptr && !workspace_.Intact()) return "workspace: wrote outside of it";
  if (inputs_changed_) return "inputs: a guard or an operand was written to";
  const int64_t bytes = DTypeBytes(type_);
  for (int64_t m = 0; m + 1 < rows_; ++m) {
    if (!output_.Untouched((m * stride_ + columns_) * bytes, (m + 1) * stride_ * bytes)) {
      return fmt::format("output: wrote between rows {} and {}", m, m + 1);
    }
  }
  return {};
}

GemmOptions ProductOptions(const Problem& problem) {
  GemmOptions options;
  options.bias = problem.epilogue.bias;
  options.activation = problem.c.activation;
  options.gated = problem.c.gated;
  options.row_weight = problem.epilogue.row_weight;
  options.allow_bf16_activations = problem.c.allow_bf16_activations;
  options.expert = problem.expert;
  return options;
}

Result<ProductRun> RunProduct(const Device& device, const PreparedWeights& prepared,
                              const Problem& problem, const GemmOptions& options) {
  std::vector<int64_t> rows(static_cast<size_t>(problem.c.m));
  std::iota(rows.begin(), rows.end(), int64_t{0});
  return RunProductRows(device, prepared, problem, options, rows);
}

Result<ProductRun> RunProductRows(const Device& device, const PreparedWeights& prepared,
                                  const Problem& problem, GemmOptions options,
                                  const std::vector<int64_t>& rows) {
  const Case& c = problem.c;
  ProductRun run;
  run.rows_ = static_cast<int64_t>(rows.size());
  run.columns_ = problem.out_n();
  run.stride_ = run.columns_ + (c.padded ? kRowPadding : 0);
  run.type_ = c.c_type;

  // Operands are copied into fresh guarded memory: the copy is also what shows a write to them.
  const int64_t a_bytes = DTypeBytes(c.a_type);
  const int64_t a_stride = problem.a.stride(0);
  GuardedBuffer a(rows.empty() ? 0 : ((run.rows_ - 1) * a_stride + c.k) * a_bytes,
                  c.misaligned ? a_bytes : 0);
  std::vector<float> row_weight;
  for (size_t i = 0; i < rows.size(); ++i) {
    std::memcpy(a.data() + static_cast<int64_t>(i) * a_stride * a_bytes,
                problem.a_memory.data() + rows[i] * a_stride * a_bytes,
                static_cast<size_t>(c.k * a_bytes));
    if (c.row_weight) {
      row_weight.push_back(static_cast<float>(
          reference::LoadElement(problem.row_weight_memory.data(), DType::kF32, rows[i])));
    }
  }
  if (c.row_weight) options.row_weight = TensorView(row_weight.data(), DType::kF32, {run.rows_});
  const TensorView a_view(a.data(), c.a_type, {run.rows_, c.k}, {a_stride, 1});
  const uint64_t a_hash =
      HashText({reinterpret_cast<const char*>(a.data()), static_cast<size_t>(a.bytes())});

  const int64_t c_bytes = DTypeBytes(c.c_type);
  const int64_t count = rows.empty() ? 0 : (run.rows_ - 1) * run.stride_ + run.columns_;
  run.output_ = GuardedBuffer(count * c_bytes, c.misaligned ? c_bytes : 0);
  const MutableTensorView out(run.output_.data(), c.c_type, {run.rows_, run.columns_},
                              {run.stride_, 1});

  MARLIN_ASSIGN_OR_RETURN(const GemmPlan plan, PlanGemm(device, a_view, prepared, out, options));
  run.kernel_ = plan.kernel;
  if (plan.workspace_bytes > 0) {
    run.workspace_ = GuardedBuffer(plan.workspace_bytes);
    options.workspace = run.workspace_.data();
    options.workspace_bytes = plan.workspace_bytes;
  }
  if (run.rows_ == 1 && c.seed % 2 == 1) {
    const TensorView vector(a.data(), c.a_type, {c.k});
    const MutableTensorView out_vector(run.output_.data(), c.c_type, {run.columns_});
    MARLIN_RETURN_IF_ERROR(Gemv(device, vector, prepared, out_vector, options));
  } else {
    MARLIN_RETURN_IF_ERROR(Gemm(device, a_view, prepared, out, options));
  }
  run.inputs_changed_ = !a.Intact() || a_hash != HashText({reinterpret_cast<const char*>(a.data()),
                                                           static_cast<size_t>(a.bytes())});
  return run;
}

}  // namespace marlin::conformance
