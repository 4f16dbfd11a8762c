// A layer of experts to be timed: its weights, and the selections of its tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/macros.h"
#include "bench/gemm.h"
#include "marlin/device.h"
#include "marlin/moe.h"

namespace marlin::bench {

/// A layer and a number of tokens, each of which selects top_k of the experts at random.
struct MoeCase {
  BenchCase gemm;  ///< m tokens, n inner features, k hidden features; the experts of all layers.
  int64_t experts = 128;  ///< Number in a layer.
  int64_t top_k = 8;
  int64_t layers = 1;                ///< To rotate through.
  std::optional<WeightsSpec> mixed;  ///< Format of every second expert, if another.

  int64_t tokens() const { return gemm.shape.m; }
  int64_t inner() const { return gemm.shape.n; }
  int64_t hidden() const { return gemm.shape.k; }
  /// The specs of the stacked matrices of all layers, as if all experts had one format.
  WeightsSpec GateUpSpec() const { return GateUpOf(gemm.spec); }
  WeightsSpec DownSpec() const { return DownOf(gemm.spec); }
  WeightsSpec GateUpOf(const WeightsSpec& format) const;
  WeightsSpec DownOf(const WeightsSpec& format) const;
  /// "fp4_e2m1", or both formats.
  std::string FormatText() const;
  /// "fp4_e2m1", "fp4_e2m1 2:4", "fp4_e2m1 2:4 and u4".
  std::string WeightsText() const;
  /// Mean bytes of the weights of an expert.
  double ExpertBytes() const;
};

/// Selections of some batches of tokens; batch i is for layer i modulo the layers.
struct Routing {
  std::vector<std::vector<int32_t>> ids;
  std::vector<float> weights;
  double active_experts = 0;  ///< Mean per batch.
};

Routing RandomRouting(const MoeCase& bench);

/// The problem of one batch.
ExpertsProblem ProblemOf(const MoeCase& bench);

/// The experts of all layers, prepared for a device: layer after layer. The weights of a case are
/// the same on every device. Errors: those of Prepare.
Result<std::vector<Expert>> PrepareExperts(const Device& device, const MoeCase& bench);

/// Normally distributed activations [tokens, hidden] of the case's type.
std::vector<std::byte> RandomRows(const MoeCase& bench);

/// Values in device memory. Errors: kOutOfMemory, kDeviceLost.
template <typename T>
Result<DeviceBuffer> Uploaded(const Device& device, const std::vector<T>& values) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  MARLIN_ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Allocate(device, bytes));
  MARLIN_RETURN_IF_ERROR(buffer.CopyFrom(values.data(), bytes));
  return buffer;
}

}  // namespace marlin::bench
