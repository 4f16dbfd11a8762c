// Runs cases on kernels and judges the results.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "case.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/weights.h"
#include "plan/kernel_desc.h"
#include "problem.h"

namespace marlin::conformance {

/// The name that stands for "the plan chooses the kernel".
inline constexpr std::string_view kPlanned = "planned";

enum class Outcome : uint8_t {
  kPassed,
  kFailed,
  kUnsupported,  ///< The kernel declines the problem, with a reason.
  kMistrusted,   ///< More than half of the reference is zero: nothing was really compared.
};

struct CaseResult {
  Outcome outcome = Outcome::kPassed;
  std::string message;     ///< Why it failed or is unsupported.
  double worst_ratio = 0;  ///< Largest error over tight bound among the outputs.
};

/// One kernel of the table and the device that it is judged on.
struct Row {
  std::string name;
  std::string op;  ///< "gemm" or "dequantize".
  Isa level = Isa::kScalar;
  const KernelDesc* desc = nullptr;  ///< Null for the planned row and for dequantize.
  std::string unavailable;           ///< Why this machine cannot run it; empty when it can.
};

/// The devices of all instruction-set levels that this machine has, and their kernels.
class Machine {
 public:
  /// Errors: kUnsupported when not even the scalar level opens.
  static Result<Machine> Open();

  const std::vector<Row>& rows() const { return rows_; }
  /// The rows of the kernel table, whether this machine runs them or not.
  std::span<const KernelDesc> Kernels() const;
  const Row* Find(std::string_view name) const;
  /// The device to run a row on, with 2 threads.
  const Device& DeviceFor(const Row& row) const;
  /// A device of the row's level with a number of threads; made on first use.
  Result<Device> DeviceWithThreads(const Row& row, int threads) const;
  /// The declared model of a kernel by name; null when the table does not have it.
  const KernelDesc* Kernel(std::string_view name) const;

 private:
  std::vector<Row> rows_;
  std::map<Isa, Device> devices_;
  Isa best_ = Isa::kScalar;
};

/// Runs one case. The problem is the one of the case; weights are prepared here.
CaseResult RunCase(const Machine& machine, const Row& row, const Case& c, const Problem& problem);

}  // namespace marlin::conformance
