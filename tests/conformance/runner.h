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

/// One kernel of a backend's table and the device that it is judged on.
struct Row {
  std::string name;
  std::string backend;
  std::string op;  ///< "gemm" or "dequantize".
  Isa level = Isa::kScalar;
  const KernelDesc* desc = nullptr;  ///< Null for the planned row and for dequantize.
  std::string unavailable;           ///< Why this machine cannot run it; empty when it can.
};

/// The rows of one or all backends, and the devices that run them: the CPU at every
/// instruction-set level that this machine has, and the GPU.
class Machine {
 public:
  /// `backend` is "cpu", "cuda", "metal" or "all". Errors: kUnsupported when the CPU is asked for
  /// and not even the scalar level opens. A GPU that does not open leaves its rows unavailable.
  /// `only` leaves of the CPU's rows those of one level. Errors: kUnsupported when this machine or
  /// MARLIN_CPU does not offer that level.
  static Result<Machine> Open(std::string_view backend, std::optional<Isa> only = {});
  /// Of one device alone, whose kernels at `level` are judged.
  static Machine Of(std::string_view backend, Isa level, const Device& device,
                    std::span<const KernelDesc> kernels);

  const std::vector<Row>& rows() const { return rows_; }
  /// Those that have rows.
  const std::vector<std::string>& backends() const { return backends_; }
  const Row* Find(std::string_view backend, std::string_view name) const;
  /// A backend's kernel, also where its row is not judged: a level's plans may choose a kernel of a
  /// lower level.
  const KernelDesc* FindKernel(std::string_view backend, std::string_view name) const;
  /// Where a row of rows() is.
  size_t IndexOf(const Row& row) const { return static_cast<size_t>(&row - rows_.data()); }
  /// The device to run a row on; a CPU has kCpuThreads.
  const Device& DeviceFor(const Row& row) const;
  /// A CPU of the row's level with a number of threads; made on first use.
  Result<Device> DeviceWithThreads(const Row& row, int threads) const;

 private:
  Status AddCpu(std::optional<Isa> only);
  void AddDevice(std::string_view backend, Isa level, const Result<Device>& device,
                 std::span<const KernelDesc> kernels);

  std::vector<Row> rows_;
  std::vector<std::string> backends_;
  std::map<Isa, Device> devices_;
};

/// The kernel table of a backend, the same on every machine.
std::span<const KernelDesc> KernelTable(std::string_view backend);

/// How often a repeat check runs its product unless told otherwise.
inline constexpr int kRepetitions = 20;

/// Runs one case on a row; `problem` is the case's. Thread-safe for different problems.
CaseResult RunCase(const Machine& machine, const Row& row, const Problem& problem,
                   int repetitions = kRepetitions);

}  // namespace marlin::conformance
