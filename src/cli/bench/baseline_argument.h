// --against: the dense GEMMs that kernels are compared with.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "bench/gemm.h"
#include "cli/arguments/arguments.h"
#include "cli/bench/bench_device.h"

namespace marlin::cli {

class BaselineArgument {
 public:
  void Declare(ArgumentList& arguments);
  bool given() const { return !names_.empty(); }
  /// Errors: kInvalidArgument for a baseline that the device has not, kUnsupported for a shape that
  /// it does not take.
  Status Check(const BenchDevice& device, std::span<const bench::GemmShape> shapes) const;

 private:
  std::vector<std::string> names_;
};

}  // namespace marlin::cli
