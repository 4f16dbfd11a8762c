// Experts on poisoned, guarded device memory, and their results.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device_image.h"
#include "experts_problem.h"
#include "marlin/moe.h"

namespace marlin::conformance {

/// The experts of a case on a device: prepared weights, and biases in device memory.
class PreparedExperts {
 public:
  /// Errors: those of Prepare, DeviceBuffer and ExpertSet::Make.
  static Result<std::shared_ptr<const PreparedExperts>> Make(const Device& device,
                                                             const ExpertsData& data);

  const ExpertSet& set() const { return set_; }
  /// Whether a bias was written to.
  Result<bool> Changed() const;

 private:
  Result<ExpertMatrix> Place(const Device& device, const MatrixData& matrix);
  Result<Expert> Place(const Device& device, const ExpertData& expert);

  std::map<const QuantizedWeights*, PreparedWeights> weights_;  ///< A stack is prepared once.
  std::vector<DeviceImage> biases_;
  ExpertSet set_;
};

/// One run of the experts for some of the tokens of a case.
class ExpertsRun {
 public:
  /// Plans and places the operands; a workspace has exactly the planned size. Errors: those of
  /// PlanExperts and DeviceBuffer.
  static Result<ExpertsRun> Make(const Device& device, std::string_view backend,
                                 std::shared_ptr<const PreparedExperts> experts,
                                 const ExpertsData& data, const std::vector<int64_t>& tokens);

  /// Poisons output and workspace, runs, waits and downloads. Errors: those of ExpertsPlan::Run and
  /// Device::Synchronize; kInternal for memory that was written and must not be.
  Status Run();

  double Output(int64_t token, int64_t n) const;
  /// The stored bits of an output element.
  uint32_t Bits(int64_t token, int64_t n) const;
  /// A hash of all outputs.
  uint64_t Hash() const { return out_.host().Hash(); }

 private:
  ExpertsRun(const Device& device, std::shared_ptr<const PreparedExperts> experts,
             const ExpertsData& data)
      : device_(device), experts_(std::move(experts)), c_(data.c) {}

  Status PlaceOperands(const ExpertsData& data, const std::vector<int64_t>& tokens);
  Status Plan();
  Status CheckDamage();

  Device device_;
  std::shared_ptr<void> stream_;
  std::shared_ptr<const PreparedExperts> experts_;
  ExpertsCase c_;
  int64_t tokens_ = 0;
  int64_t x_stride_ = 0;
  int64_t out_stride_ = 0;
  DeviceImage x_;
  DeviceImage ids_;
  DeviceImage weights_;
  DeviceImage out_;
  DeviceImage workspace_;
  ExpertsPlan plan_;
};

/// All tokens of a case.
std::vector<int64_t> AllTokens(const ExpertsData& data);

}  // namespace marlin::conformance
