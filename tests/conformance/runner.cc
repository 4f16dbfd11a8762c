#include "runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/macros.h"
#include "base/scalars.h"
#include "bounds.h"
#include "guarded_buffer.h"
#include "product_run.h"
#include "reference/elements.h"

namespace marlin::conformance {
namespace {

CaseResult Failed(std::string message) { return {Outcome::kFailed, std::move(message), 0}; }

CaseResult FromStatus(const Status& status) {
  if (status.code() == Code::kUnsupported) {
    return {Outcome::kUnsupported, status.message(), 0};
  }
  return Failed(fmt::format("{}: {}", CodeName(status.code()), status.message()));
}

// More than half of the sums are zero although there is something to sum.
bool IsMistrusted(const Problem& problem) {
  const Case& c = problem.c;
  if (c.k == 0 || problem.product.sum.empty()) return false;
  const auto zeros = std::count(problem.product.sum.begin(), problem.product.sum.end(), 0.0);
  return 2 * zeros > static_cast<int64_t>(problem.product.sum.size());
}

CaseResult JudgeProduct(const Problem& problem, const ProductRun& run, const KernelDesc& kernel) {
  const Case& c = problem.c;
  const std::vector<Allowance> allowances = Allowances(problem, kernel.error, kernel.grade);
  // int8 activations have no Inf, and a smooth activation of Inf may go through Inf / Inf.
  const bool lenient = kernel.grade == Grade::kW4A8 || c.activation == Activation::kSilu ||
                       c.activation == Activation::kGeluTanh || c.gated;
  CaseResult result;
  const int64_t out_n = problem.out_n();
  for (int64_t m = 0; m < c.m; ++m) {
    for (int64_t n = 0; n < out_n; ++n) {
      const auto at = static_cast<size_t>(m * out_n + n);
      const double got = run.Output(m, n);
      const Verdict verdict = Judge(got, problem.expected[at], allowances[at], c.c_type, lenient);
      result.worst_ratio = std::max(result.worst_ratio, verdict.ratio);
      if (verdict.passed) continue;
      return Failed(fmt::format(
          "[{}, {}]: got {:.9g}, expected {:.9g} ({}), error {:.3g}, bound {:.3g} hard {:.3g} "
          "tight",
          m, n, got, reference::RoundTo(problem.expected[at], c.c_type),
          allowances[at].exact ? "exactly" : "within the bound",
          std::abs(got - problem.expected[at]), allowances[at].hard, allowances[at].tight));
    }
  }
  return result;
}

GemmOptions OptionsFor(const Row& row, const Problem& problem) {
  GemmOptions options = ProductOptions(problem);
  if (row.desc != nullptr) {
    options.kernel = row.name;
    if (row.desc->grade == Grade::kW4A8) options.accuracy = Accuracy::kW4A8;
    if (row.desc->grade == Grade::kExact) options.accuracy = Accuracy::kExact;
  }
  return options;
}

CaseResult RunGemmCase(const Machine& machine, const Row& row, const Problem& problem) {
  const Device& device = machine.DeviceFor(row);
  Result<PreparedWeights> prepared = Prepare(problem.weights, device);
  if (!prepared.ok()) return FromStatus(prepared.status());
  Result<ProductRun> run = RunProduct(device, *prepared, problem, OptionsFor(row, problem));
  if (!run.ok()) return FromStatus(run.status());
  if (row.desc != nullptr && run->kernel() != row.name) {
    return Failed(fmt::format("kernel: asked for {}, the plan says {}", row.name, run->kernel()));
  }
  const KernelDesc* kernel = machine.Kernel(run->kernel());
  if (kernel == nullptr) return Failed(fmt::format("kernel: no row named {}", run->kernel()));
  if (LatticeIsExactFor(problem, kernel->grade) && !problem.broken_precondition.empty()) {
    return Failed(problem.broken_precondition);
  }
  const std::string damage = run->Damage();
  if (!damage.empty()) return Failed(damage);
  CaseResult result = JudgeProduct(problem, *run, *kernel);
  if (result.outcome == Outcome::kPassed && IsMistrusted(problem)) {
    result.outcome = Outcome::kMistrusted;
  }
  return result;
}

// Dequantize has no options: the level of the device decides the kernel.
CaseResult RunDequantizeCase(const Machine& machine, const Row& row, const Problem& problem) {
  const Case& c = problem.c;
  const Device& device = machine.DeviceFor(row);
  Result<PreparedWeights> prepared = Prepare(problem.weights, device);
  if (!prepared.ok()) return FromStatus(prepared.status());
  const int64_t bytes = DTypeBytes(c.c_type);
  const int64_t stride = c.n + (c.padded ? 7 : 0);
  const int64_t count = c.k == 0 ? 0 : (c.k - 1) * stride + c.n;
  GuardedBuffer memory(count * bytes, c.misaligned ? bytes : 0);
  const MutableTensorView out(memory.data(), c.c_type, {c.k, c.n}, {stride, 1});
  const Status status = Dequantize(device, *prepared, out, problem.expert);
  if (!status.ok()) return FromStatus(status);
  if (!memory.Intact()) return Failed("output: wrote outside of it");

  CaseResult result;
  for (int64_t k = 0; k < c.k; ++k) {
    if (k + 1 < c.k && !memory.Untouched((k * stride + c.n) * bytes, (k + 1) * stride * bytes)) {
      return Failed(fmt::format("output: wrote between rows {} and {}", k, k + 1));
    }
    for (int64_t n = 0; n < c.n; ++n) {
      const auto at = static_cast<size_t>(k * c.n + n);
      const double got = reference::LoadElement(memory.data(), c.c_type, k * stride + n);
      // fp32 on the way: value - zero, times scale, plus bias, and the global scale.
      Allowance allowance;
      allowance.tight = 3.0 * 0x1p-24 * problem.dense.magnitude[at] + 0x1p-149;
      allowance.hard = allowance.tight;
      allowance.exact = IsLattice(c.data);
      const Verdict verdict = Judge(got, problem.dense.value[at], allowance, c.c_type, false);
      result.worst_ratio = std::max(result.worst_ratio, verdict.ratio);
      if (!verdict.passed) {
        return Failed(fmt::format("[{}, {}]: got {:.9g}, expected {:.9g}", k, n, got,
                                  reference::RoundTo(problem.dense.value[at], c.c_type)));
      }
    }
  }
  return result;
}

// Runs the product with `rows` of A in place of the problem's own and compares the outputs with
// those of the same rows in `whole`, bit for bit.
Status SameRows(const Device& device, const PreparedWeights& prepared, const Problem& problem,
                const GemmOptions& options, const std::vector<int64_t>& rows,
                const ProductRun& whole) {
  MARLIN_ASSIGN_OR_RETURN(const ProductRun part,
                          RunProductRows(device, prepared, problem, options, rows));
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int64_t n = 0; n < problem.out_n(); ++n) {
      if (part.Bits(static_cast<int64_t>(i), n) == whole.Bits(rows[i], n)) continue;
      return Status(Code::kInternal,
                    fmt::format("row {} column {} of {} rows: {:.9g}; of {} rows: {:.9g}", rows[i],
                                n, rows.size(), part.Output(static_cast<int64_t>(i), n),
                                problem.c.m, whole.Output(rows[i], n)));
    }
  }
  return Status();
}

CaseResult RunRowsCase(const Machine& machine, const Row& row, const Problem& problem) {
  const Case& c = problem.c;
  const Device& device = machine.DeviceFor(row);
  Result<PreparedWeights> prepared = Prepare(problem.weights, device);
  if (!prepared.ok()) return FromStatus(prepared.status());
  GemmOptions options = OptionsFor(row, problem);
  options.determinism = Determinism::kBatchInvariant;
  Result<ProductRun> whole = RunProduct(device, *prepared, problem, options);
  if (!whole.ok()) return FromStatus(whole.status());

  if (c.check == Check::kRowPermutation) {
    std::vector<int64_t> reversed;
    for (int64_t m = c.m - 1; m >= 0; --m) reversed.push_back((m * 7 + 3) % c.m);
    const Status same = SameRows(device, *prepared, problem, options, reversed, *whole);
    return same.ok() ? CaseResult{} : Failed(same.message());
  }
  for (int64_t count = 1; count < c.m; ++count) {
    std::vector<int64_t> window;  // A different place for every size.
    for (int64_t i = 0; i < count; ++i) window.push_back((count * 5) % (c.m - count + 1) + i);
    const Status same = SameRows(device, *prepared, problem, options, window, *whole);
    if (!same.ok()) return Failed(same.message());
  }
  return {};
}

CaseResult RunRepetitions(const Machine& machine, const Row& row, const Problem& problem) {
  const bool vary_threads = problem.c.check == Check::kThreads;
  std::vector<Device> devices;
  for (int threads : {1, 2, 3, 5}) {
    if (!vary_threads) continue;
    Result<Device> device = machine.DeviceWithThreads(row, threads);
    if (!device.ok()) return FromStatus(device.status());
    devices.push_back(*device);
  }
  while (!vary_threads && devices.size() < 20) devices.push_back(machine.DeviceFor(row));

  uint64_t first = 0;
  for (size_t i = 0; i < devices.size(); ++i) {
    Result<PreparedWeights> prepared = Prepare(problem.weights, devices[i]);
    if (!prepared.ok()) return FromStatus(prepared.status());
    Result<ProductRun> run = RunProduct(devices[i], *prepared, problem, OptionsFor(row, problem));
    if (!run.ok()) return FromStatus(run.status());
    if (i == 0) first = run->Hash();
    if (run->Hash() == first) continue;
    return Failed(vary_threads ? fmt::format("{} threads differ from 1", devices[i].info().threads)
                               : fmt::format("run {} differs from the first", i + 1));
  }
  return {};
}

}  // namespace

CaseResult RunCase(const Machine& machine, const Row& row, const Case& c, const Problem& problem) {
  switch (c.check) {
    case Check::kGemm:
      return RunGemmCase(machine, row, problem);
    case Check::kDequantize:
      return RunDequantizeCase(machine, row, problem);
    case Check::kBatchInvariant:
    case Check::kRowPermutation:
      return RunRowsCase(machine, row, problem);
    case Check::kThreads:
    case Check::kRepeat:
      return RunRepetitions(machine, row, problem);
  }
  return Failed("check: unknown");
}

}  // namespace marlin::conformance
