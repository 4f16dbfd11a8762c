#include "cli/bench/baseline_argument.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/errors.h"
#include "base/macros.h"
#include "bench/baselines/baseline_openblas.h"

namespace marlin::cli {

void BaselineArgument::Declare(ArgumentList& arguments) {
  arguments.Option("--against", &names_, "BASELINE",
                   "Dense GEMM of the same run: openblas; on a GPU cublas or torch");
  arguments.Choices({"openblas", "cublas", "torch"});
}

Status BaselineArgument::Check(const BenchDevice& device,
                               std::span<const bench::GemmShape> shapes) const {
  if (names_.empty()) return {};
  const std::string& on = device.name();
  if (on.starts_with("metal")) {
    return Status(Code::kUnsupported, "--against: there are no baselines on " + on);
  }
  // PyTorch's bf16 matmul is cuBLAS's.
  const std::vector<std::string> known = device.is_cuda()
                                             ? std::vector<std::string>{"cublas", "torch"}
                                             : std::vector<std::string>{"openblas"};
  for (const std::string& name : names_) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    return Invalid(fmt::format("--against: unknown baseline '{}' on {}; known: {}", name, on,
                               fmt::join(known, ", ")));
  }
  if (device.is_cuda()) return {};
  for (const bench::GemmShape& shape : shapes) {
    MARLIN_RETURN_IF_ERROR(bench::OpenBlas::CheckSizes(shape.m, shape.n, shape.k));
  }
  return {};
}

}  // namespace marlin::cli
