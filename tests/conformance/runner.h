// Runs cases on kernels and checks the results.
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
#include "plan/gemm/kernel_desc.h"
#include "problem.h"

namespace marlin::conformance {

/// The name that stands for "kernel selection picks the kernel".
inline constexpr std::string_view kPlanned = "planned";

enum class Outcome : uint8_t {
  kPassed,
  kFailed,
  kUnsupported,  ///< The kernel rejects the problem, with a reason.
  kMistrusted,   ///< More than half of the reference is zero: the comparison proves little.
};

struct CaseResult {
  Outcome outcome = Outcome::kPassed;
  std::string message;     ///< Why it failed or is unsupported.
  double worst_ratio = 0;  ///< Largest error over the tight bound among the outputs.
};

/// One kernel of a backend's table and the device that runs it.
struct Row {
  std::string name;
  std::string backend;
  std::string op;  ///< "gemm", "dequantize", "router" or "experts".
  Isa level = Isa::kScalar;
  const KernelDesc* desc = nullptr;  ///< Null for the planned row and for what is no GEMM.
  std::string unavailable;           ///< Why this machine cannot run it; empty if it can.
};

/// The rows of one or all backends and the devices that run them: the CPU at every ISA level of
/// this machine, and the GPU.
class Machine {
 public:
  /// `backend` is "cpu", "cuda", "metal" or "all". A GPU that does not open leaves its rows
  /// unavailable. `only` restricts the CPU's rows to one level. Errors: kUnsupported when the CPU
  /// is requested and not even the scalar level opens, or when this machine or MARLIN_CPU does not
  /// offer the level `only`.
  static Result<Machine> Open(std::string_view backend, std::optional<Isa> only = {});
  /// A machine with one device, whose kernels at `level` are tested.
  static Machine Of(std::string_view backend, Isa level, const Device& device,
                    std::span<const KernelDesc> kernels);

  const std::vector<Row>& rows() const { return rows_; }
  /// The backends that have rows.
  const std::vector<std::string>& backends() const { return backends_; }
  const Row* Find(std::string_view backend, std::string_view name) const;
  /// Finds a backend's kernel, even if its row is not tested: kernel selection at one level may
  /// pick a kernel of a lower level.
  const KernelDesc* FindKernel(std::string_view backend, std::string_view name) const;
  /// The index of a row in rows().
  size_t IndexOf(const Row& row) const { return static_cast<size_t>(&row - rows_.data()); }
  /// The device that runs a row; a CPU has kCpuThreads.
  const Device& DeviceFor(const Row& row) const;
  /// The properties of the CUDA device; empty if none opened.
  std::optional<DeviceProperties> CudaProperties() const;
  /// A CPU device of the row's level with the given number of threads, created on first use.
  Result<Device> DeviceWithThreads(const Row& row, int threads) const;

 private:
  Status AddCpu(std::optional<Isa> only);
  void AddDevice(std::string_view backend, Isa level, const Result<Device>& device,
                 std::span<const KernelDesc> kernels);
  void AddOperations(const std::string& suffix, const std::string& backend, Isa level,
                     const std::string& missing);

  std::vector<Row> rows_;
  std::vector<std::string> backends_;
  std::map<Isa, Device> devices_;
};

/// The kernel table of a backend, the same on every machine.
std::span<const KernelDesc> KernelTable(std::string_view backend);

/// Default number of runs of a repeat check.
inline constexpr int kRepetitions = 20;

/// Runs one case on a row; `problem` is the case's problem. Thread-safe for different problems.
CaseResult RunCase(const Machine& machine, const Row& row, const Problem& problem,
                   int repetitions = kRepetitions);

}  // namespace marlin::conformance
