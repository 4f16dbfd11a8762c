// A layer of experts to be timed: its weights, and the selections of its tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

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
  /// The specs of the stacked matrices of all layers, if all experts had one format.
  WeightsSpec GateUpOf(const WeightsSpec& format) const;
  WeightsSpec DownOf(const WeightsSpec& format) const;
  /// "fp4_e2m1", or both formats.
  std::string FormatText() const;
  /// "fp4_e2m1", "fp4_e2m1 2:4", "fp4_e2m1 2:4 and u4".
  std::string WeightsText() const;
  /// The keys of the case: CaseJson of `gemm` with "experts" and "top_k".
  nlohmann::ordered_json ToJson() const;
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
/// the same on every device. Errors: from Prepare.
Result<std::vector<Expert>> PrepareExperts(const Device& device, const MoeCase& bench);

/// Rows, selections and a result in one device's memory.
class MoeOperands {
 public:
  /// Errors: kOutOfMemory, kDeviceLost.
  static Result<MoeOperands> Make(const Device& device, const MoeCase& bench,
                                  const Routing& routing);

  Status Run(const ExpertsPlan& plan, size_t batch, const ExpertsArguments& arguments = {}) const;
  const DeviceBuffer& ids(size_t batch) const { return ids_[batch]; }

 private:
  explicit MoeOperands(const MoeCase& bench)
      : type_(bench.gemm.activation_type),
        rows_{bench.tokens(), bench.hidden()},
        selections_{bench.tokens(), bench.top_k} {}

  DType type_;
  Shape rows_;
  Shape selections_;
  DeviceBuffer x_;
  DeviceBuffer out_;
  DeviceBuffer weights_;
  std::vector<DeviceBuffer> ids_;
};

}  // namespace marlin::bench
