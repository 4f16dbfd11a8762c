#include "runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "base/macros.h"
#include "base/scalars.h"
#include "bounds.h"
#include "device_image.h"
#include "device_runtime.h"
#include "periodic.h"
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

// Whether more than half of the sums are zero although k > 0.
bool IsMistrusted(const Problem& problem) {
  const Case& c = problem.c;
  if (c.k == 0 || problem.product.sum.empty()) return false;
  const auto zeros = std::count(problem.product.sum.begin(), problem.product.sum.end(), 0.0);
  return 2 * zeros > static_cast<int64_t>(problem.product.sum.size());
}

CaseResult JudgeProduct(const Problem& problem, const ProductRun& run, const KernelDesc& kernel) {
  const Case& c = problem.c;
  const std::vector<Allowance> allowances = Allowances(problem, kernel.error, kernel.grade);
  // int8 activations have no Inf, and a smooth activation function of Inf may compute Inf / Inf.
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

// The weight layout that a row's kernel reads.
PrepareOptions LayoutFor(const Row& row) {
  PrepareOptions options;
  options.marlin_w4 = row.desc != nullptr && row.desc->reads_marlin_w4;
  return options;
}

CaseResult RunGemmCase(const Machine& machine, const Row& row, const Problem& problem) {
  const Device& device = machine.DeviceFor(row);
  const Result<PreparedWeights> prepared = problem.PreparedFor(device, LayoutFor(row));
  if (!prepared.ok()) return FromStatus(prepared.status());
  const Result<ProductRun> run = RunProduct(device, *prepared, problem, OptionsFor(row, problem));
  if (!run.ok()) return FromStatus(run.status());
  if (row.desc != nullptr && run->kernel() != row.name) {
    return Failed(fmt::format("kernel: asked for {}, the plan says {}", row.name, run->kernel()));
  }
  const KernelDesc* chosen = machine.FindKernel(row.backend, run->kernel());
  if (chosen == nullptr) return Failed(fmt::format("kernel: no row named {}", run->kernel()));
  const KernelDesc& kernel = *chosen;
  const bool exact = LatticeIsExactFor(problem, kernel.error, kernel.grade);
  if (exact && !problem.broken_precondition.empty()) return Failed(problem.broken_precondition);
  const std::string damage = run->Damage();
  if (!damage.empty()) return Failed(damage);
  if (problem.c.check == Check::kPeriodic) {
    if (!exact) return Failed("periodic: the sums of this kernel may differ from tile to tile");
    const std::string aperiodic = FindAperiodic(run->Repeated(problem.c.m, problem.out_n()));
    if (!aperiodic.empty()) return Failed(aperiodic);
  }
  CaseResult result = JudgeProduct(problem, *run, kernel);
  if (result.outcome == Outcome::kPassed && IsMistrusted(problem)) {
    result.outcome = Outcome::kMistrusted;
  }
  return result;
}

// Compares dequantized weights, rows `stride` elements apart, with the reference.
CaseResult JudgeWeights(const Problem& problem, const GuardedBuffer& memory, int64_t stride) {
  const Case& c = problem.c;
  CaseResult result;
  for (int64_t k = 0; k < c.k; ++k) {
    for (int64_t n = 0; n < c.n; ++n) {
      const auto at = static_cast<size_t>(k * c.n + n);
      const double got = reference::LoadElement(memory.data(), c.c_type, k * stride + n);
      // Intermediate results in fp32: value - zero, times scale, plus bias, and the global scale.
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

// Strides in elements.
struct Strides {
  int64_t rows;
  int64_t columns;
};

// Dequantizes into poisoned device memory and downloads it.
Result<DeviceImage> DecodeWeights(const Device& device, const Problem& problem,
                                  const Strides& strides) {
  const Case& c = problem.c;
  const int64_t bytes = DTypeBytes(c.c_type);
  const bool any = c.k > 0 && problem.n > 0;
  const int64_t count = any ? (c.k - 1) * strides.rows + (problem.n - 1) * strides.columns + 1 : 0;
  MARLIN_ASSIGN_OR_RETURN(const PreparedWeights prepared, problem.PreparedFor(device));
  MARLIN_ASSIGN_OR_RETURN(
      DeviceImage image,
      DeviceImage::Make(device, GuardedBuffer(count * bytes, c.misaligned ? bytes : 0)));
  const MutableTensorView out(image.data(), c.c_type, {c.k, problem.n},
                              {strides.rows, strides.columns});
  MARLIN_RETURN_IF_ERROR(Dequantize(device, prepared, out, problem.expert));
  MARLIN_RETURN_IF_ERROR(device.Synchronize());
  MARLIN_RETURN_IF_ERROR(image.Download());
  return image;
}

// Dequantizes into a transposed view, which must give the same values.
CaseResult CompareTransposed(const Device& device, const Problem& problem,
                             const GuardedBuffer& rows, int64_t stride) {
  const Case& c = problem.c;
  const int64_t bytes = DTypeBytes(c.c_type);
  const Result<DeviceImage> image = DecodeWeights(device, problem, {1, c.k});
  if (!image.ok()) return FromStatus(image.status());
  if (!image->host().Intact()) return Failed("transposed output: wrote outside of it");
  const std::byte* const straight = rows.data();
  const std::byte* const turned = image->host().data();
  for (int64_t k = 0; k < c.k; ++k) {
    for (int64_t n = 0; n < problem.n; ++n) {
      const bool same =
          std::memcmp(straight + (k * stride + n) * bytes, turned + (n * c.k + k) * bytes,
                      static_cast<size_t>(bytes)) == 0;
      if (!same) {
        return Failed(fmt::format("transposed output: [{}, {}] differs", k, n));
      }
    }
  }
  return {};
}

// Dequantize takes no kernel option: the device's level selects the kernel.
CaseResult RunDequantizeCase(const Machine& machine, const Row& row, const Problem& problem) {
  const Case& c = problem.c;
  const int64_t bytes = DTypeBytes(c.c_type);
  const int64_t stride = problem.n + (c.padded ? 7 : 0);
  const Device& device = machine.DeviceFor(row);
  const Result<DeviceImage> image = DecodeWeights(device, problem, {stride, 1});
  if (!image.ok()) return FromStatus(image.status());
  const GuardedBuffer& memory = image->host();
  if (!memory.Intact()) return Failed("output: wrote outside of it");
  for (int64_t k = 0; k + 1 < c.k; ++k) {
    if (!memory.Untouched((k * stride + problem.n) * bytes, (k + 1) * stride * bytes)) {
      return Failed(fmt::format("output: wrote between rows {} and {}", k, k + 1));
    }
  }
  if (c.check == Check::kPeriodic && !c.gated) {
    const std::string aperiodic =
        FindAperiodic({memory.data(), c.c_type, c.k, problem.n, stride, c.k, c.n});
    if (!aperiodic.empty()) return Failed(aperiodic);
  }
  // Periodic problems may be too large to dequantize twice.
  if (c.check != Check::kPeriodic) {
    const CaseResult transposed = CompareTransposed(device, problem, memory, stride);
    if (transposed.outcome != Outcome::kPassed) return transposed;
  }
  return JudgeWeights(problem, memory, stride);
}

// Runs the GEMM with `rows` of A instead of all of them and compares the outputs with the same rows
// of `whole`, bit for bit.
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
  const Result<PreparedWeights> prepared = problem.PreparedFor(device, LayoutFor(row));
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
    std::vector<int64_t> window;  // A different position for every size.
    for (int64_t i = 0; i < count; ++i) window.push_back((count * 5) % (c.m - count + 1) + i);
    const Status same = SameRows(device, *prepared, problem, options, window, *whole);
    if (!same.ok()) return Failed(same.message());
  }
  return {};
}

CaseResult RunThreads(const Machine& machine, const Row& row, const Problem& problem) {
  uint64_t first = 0;
  for (int threads : {1, 2, 3, 5}) {
    const Result<Device> device = machine.DeviceWithThreads(row, threads);
    if (!device.ok()) return FromStatus(device.status());
    const Result<PreparedWeights> prepared = Prepare(problem.weights, *device, LayoutFor(row));
    if (!prepared.ok()) return FromStatus(prepared.status());
    const Result<ProductRun> run =
        RunProduct(*device, *prepared, problem, OptionsFor(row, problem));
    if (!run.ok()) return FromStatus(run.status());
    if (threads == 1) first = run->Hash();
    if (run->Hash() != first) return Failed(fmt::format("{} threads differ from 1", threads));
  }
  return {};
}

// Launches and collects a GEMM again and returns its hash. Errors: kInternal if memory was damaged.
Result<uint64_t> HashAgain(ProductRun& run) {
  MARLIN_RETURN_IF_ERROR(run.Reset());
  MARLIN_RETURN_IF_ERROR(run.Launch());
  MARLIN_RETURN_IF_ERROR(run.Collect());
  const std::string damage = run.Damage();
  if (!damage.empty()) return Status(Code::kInternal, damage);
  return run.Hash();
}

// Checks that all runs produce the same hash; `run(i)` returns the hash of run i.
CaseResult CompareRuns(int repetitions, const std::function<Result<uint64_t>(int)>& run) {
  uint64_t first = 0;
  for (int i = 0; i < repetitions; ++i) {
    const Result<uint64_t> hash = run(i);
    if (!hash.ok()) return FromStatus(hash.status());
    if (i == 0) first = *hash;
    if (*hash != first) return Failed(fmt::format("run {} differs from the first", i + 1));
  }
  return {};
}

CaseResult RunRepetitions(const Machine& machine, const Row& row, const Problem& problem,
                          int repetitions) {
  // The first runs prepare weights and allocate memory anew; the rest reuse them.
  constexpr int kPreparations = 20;
  const Device& device = machine.DeviceFor(row);
  std::optional<ProductRun> run;
  return CompareRuns(repetitions, [&](int i) -> Result<uint64_t> {
    if (i < kPreparations) {
      MARLIN_ASSIGN_OR_RETURN(const PreparedWeights prepared,
                              Prepare(problem.weights, device, LayoutFor(row)));
      MARLIN_ASSIGN_OR_RETURN(run, ProductRun::Make(device, prepared, problem,
                                                    OptionsFor(row, problem), AllRows(problem)));
    }
    return HashAgain(*run);
  });
}

CaseResult RunDequantizeRepetitions(const Machine& machine, const Row& row, const Problem& problem,
                                    int repetitions) {
  return CompareRuns(repetitions, [&](int) -> Result<uint64_t> {
    MARLIN_ASSIGN_OR_RETURN(const DeviceImage image,
                            DecodeWeights(machine.DeviceFor(row), problem, {problem.n, 1}));
    if (!image.host().Intact()) return Status(Code::kInternal, "output: wrote outside of it");
    return image.host().Hash();
  });
}

CaseResult RunStreams(const Machine& machine, const Row& row, const Problem& problem) {
  constexpr size_t kStreams = 16;
  constexpr int kLaunches = 8;
  const Device& device = machine.DeviceFor(row);
  const Result<PreparedWeights> prepared = problem.PreparedFor(device, LayoutFor(row));
  if (!prepared.ok()) return FromStatus(prepared.status());
  GemmOptions options = OptionsFor(row, problem);
  const Result<ProductRun> alone = RunProduct(device, *prepared, problem, options);
  if (!alone.ok()) return FromStatus(alone.status());

  std::vector<std::shared_ptr<void>> streams;
  std::vector<ProductRun> runs;
  for (size_t i = 0; i < kStreams; ++i) {
    Result<std::shared_ptr<void>> stream = MakeStream(row.backend);
    if (!stream.ok()) return FromStatus(stream.status());
    streams.push_back(*stream);
    options.stream = stream->get();
    Result<ProductRun> run =
        ProductRun::Make(device, *prepared, problem, options, AllRows(problem));
    if (!run.ok()) return FromStatus(run.status());
    runs.push_back(std::move(*run));
    if (i % 2 == 1) runs[i].OverlapPrevious();
  }
  std::vector<Status> statuses(kStreams);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kStreams; ++i) {
    threads.emplace_back([&, i] {
      for (int launch = 0; launch < kLaunches && statuses[i].ok(); ++launch) {
        statuses[i] = runs[i].Launch();
      }
      if (statuses[i].ok()) statuses[i] = runs[i].Collect();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < kStreams; ++i) {
    if (!statuses[i].ok()) return FromStatus(statuses[i]);
    const std::string damage = runs[i].Damage();
    if (!damage.empty()) return Failed(fmt::format("stream {}: {}", i + 1, damage));
    if (runs[i].Hash() == alone->Hash()) continue;
    return Failed(fmt::format("stream {} of {} differs from one alone", i + 1, kStreams));
  }
  return {};
}

// Back-to-back GEMMs, each reading the output of the previous one.
CaseResult RunChain(const Machine& machine, const Row& row, const Problem& problem) {
  constexpr size_t kLinks = 4;
  constexpr int kRounds = 20;
  const Device& device = machine.DeviceFor(row);
  const Result<PreparedWeights> prepared = problem.PreparedFor(device, LayoutFor(row));
  if (!prepared.ok()) return FromStatus(prepared.status());
  std::vector<ProductRun> links;
  for (size_t i = 0; i < kLinks; ++i) {
    Result<ProductRun> run =
        ProductRun::Make(device, *prepared, problem, OptionsFor(row, problem), AllRows(problem));
    if (!run.ok()) return FromStatus(run.status());
    links.push_back(std::move(*run));
    if (i > 0) links[i].ReadFrom(links[i - 1]);
  }
  const auto poison = [&]() -> Status {
    for (ProductRun& link : links) MARLIN_RETURN_IF_ERROR(link.Reset());
    return Status();
  };
  const auto launch = [&](bool wait) -> Status {
    for (const ProductRun& link : links) {
      MARLIN_RETURN_IF_ERROR(link.Launch());
      if (wait) MARLIN_RETURN_IF_ERROR(device.Synchronize());
    }
    return links.back().Collect();
  };
  Status status = launch(true);
  if (!status.ok()) return FromStatus(status);
  const uint64_t expected = links.back().Hash();
  for (ProductRun& link : links) link.OverlapPrevious();
  for (int round = 0; round < kRounds; ++round) {
    status = poison();
    if (status.ok()) status = launch(false);
    if (!status.ok()) return FromStatus(status);
    const std::string damage = links.back().Damage();
    if (!damage.empty()) return Failed(damage);
    if (links.back().Hash() != expected) {
      return Failed(fmt::format("round {} differs from one product at a time", round + 1));
    }
  }
  return {};
}

}  // namespace

CaseResult RunCase(const Machine& machine, const Row& row, const Problem& problem,
                   int repetitions) {
  switch (problem.c.check) {
    case Check::kGemm:
      return RunGemmCase(machine, row, problem);
    case Check::kDequantize:
      return RunDequantizeCase(machine, row, problem);
    case Check::kPeriodic:
      return row.op == "gemm" ? RunGemmCase(machine, row, problem)
                              : RunDequantizeCase(machine, row, problem);
    case Check::kBatchInvariant:
    case Check::kRowPermutation:
      return RunRowsCase(machine, row, problem);
    case Check::kThreads:
      return RunThreads(machine, row, problem);
    case Check::kRepeat:
      return row.op == "gemm" ? RunRepetitions(machine, row, problem, repetitions)
                              : RunDequantizeRepetitions(machine, row, problem, repetitions);
    case Check::kStreams:
      return RunStreams(machine, row, problem);
    case Check::kChain:
      return RunChain(machine, row, problem);
  }
  return Failed("check: unknown");
}

}  // namespace marlin::conformance
