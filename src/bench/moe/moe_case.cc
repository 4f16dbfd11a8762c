#include "bench/moe/moe_case.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#include "base/macros.h"
#include "base/scalars.h"
#include "bench/gemm_report.h"

namespace marlin::bench {
namespace {

Result<PreparedWeights> Prepared(const Device& device, const WeightsSpec& spec) {
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights, RandomWeights(spec));
  return Prepare(weights, device);
}

WeightsSpec SpecOf(const MoeCase& bench, const WeightsSpec& format, int64_t k, int64_t n) {
  WeightsSpec spec = format;
  spec.experts = bench.layers * bench.experts;
  spec.k = k;
  spec.n = n;
  return spec;
}

/// Normally distributed activations [tokens, hidden] of the case's type.
std::vector<std::byte> RandomRows(const MoeCase& bench) {
  const DType type = bench.gemm.activation_type;
  const auto count = static_cast<size_t>(bench.tokens() * bench.hidden());
  const auto size = static_cast<size_t>(DTypeBytes(type));
  std::vector<std::byte> rows(count * size);
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < count; ++i) {
    const float value = normal(random);
    const uint16_t half = type == DType::kBf16 ? FloatToBf16(value) : FloatToHalf(value);
    std::memcpy(rows.data() + i * size,
                type == DType::kF32 ? static_cast<const void*>(&value) : &half, size);
  }
  return rows;
}

template <typename T>
Result<DeviceBuffer> Uploaded(const Device& device, const std::vector<T>& values) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  MARLIN_ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Allocate(device, bytes));
  MARLIN_RETURN_IF_ERROR(buffer.CopyFrom(values.data(), bytes));
  return buffer;
}

}  // namespace

WeightsSpec MoeCase::GateUpOf(const WeightsSpec& format) const {
  return SpecOf(*this, format, hidden(), 2 * inner());
}
WeightsSpec MoeCase::DownOf(const WeightsSpec& format) const {
  return SpecOf(*this, format, inner(), hidden());
}

nlohmann::ordered_json MoeCase::ToJson() const {
  nlohmann::ordered_json row = CaseJson(gemm);
  row["format"] = FormatText();
  row["experts"] = experts;
  row["top_k"] = top_k;
  return row;
}

std::string MoeCase::FormatText() const {
  std::string text(FormatName(gemm.spec.format));
  if (mixed) text.append(" and ").append(FormatName(mixed->format));
  return text;
}

std::string MoeCase::WeightsText() const {
  std::string text = bench::WeightsText(gemm.spec);
  if (mixed) text.append(" and ").append(FormatName(mixed->format));
  return text;
}

double MoeCase::ExpertBytes() const {
  const auto bytes = [this](const WeightsSpec& format) {
    return static_cast<double>(StoredBytes(GateUpOf(format)) + StoredBytes(DownOf(format))) /
           static_cast<double>(layers * experts);
  };
  const double first = bytes(gemm.spec);
  return mixed ? (first + bytes(*mixed)) / 2 : first;
}

Routing RandomRouting(const MoeCase& bench) {
  constexpr int64_t kBatches = 32;
  std::mt19937 random(5);
  std::vector<int32_t> order(static_cast<size_t>(bench.experts));
  Routing routing;
  for (int64_t batch = 0; batch < std::max(bench.layers, kBatches); ++batch) {
    std::vector<int32_t> ids;
    for (int64_t token = 0; token < bench.tokens(); ++token) {
      std::iota(order.begin(), order.end(), 0);
      // The first top_k of a shuffle.
      for (int64_t i = 0; i < bench.top_k; ++i) {
        const auto left = static_cast<uint32_t>(bench.experts - i);
        std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(i) + random() % left]);
        ids.push_back(order[static_cast<size_t>(i)]);
      }
    }
    routing.active_experts += static_cast<double>(std::set<int32_t>(ids.begin(), ids.end()).size());
    routing.ids.push_back(std::move(ids));
  }
  routing.active_experts /= static_cast<double>(routing.ids.size());
  routing.weights.assign(static_cast<size_t>(bench.tokens() * bench.top_k),
                         1.0F / static_cast<float>(bench.top_k));
  return routing;
}

ExpertsProblem ProblemOf(const MoeCase& bench) {
  ExpertsProblem problem;
  problem.tokens = bench.tokens();
  problem.top_k = bench.top_k;
  problem.x_type = bench.gemm.activation_type;
  problem.out_type = bench.gemm.activation_type;
  problem.accuracy = bench.gemm.options.accuracy;
  problem.determinism = bench.gemm.options.determinism;
  return problem;
}

Result<std::vector<Expert>> PrepareExperts(const Device& device, const MoeCase& bench) {
  std::vector<WeightsSpec> formats = {bench.gemm.spec};
  if (bench.mixed) formats.push_back(*bench.mixed);
  std::vector<std::pair<PreparedWeights, PreparedWeights>> stacks;
  for (const WeightsSpec& format : formats) {
    MARLIN_ASSIGN_OR_RETURN(PreparedWeights gate_up, Prepared(device, bench.GateUpOf(format)));
    MARLIN_ASSIGN_OR_RETURN(PreparedWeights down, Prepared(device, bench.DownOf(format)));
    stacks.emplace_back(std::move(gate_up), std::move(down));
  }
  std::vector<Expert> experts;
  for (int64_t i = 0; i < bench.layers * bench.experts; ++i) {
    const auto& [gate_up, down] = stacks[static_cast<size_t>(i) % stacks.size()];
    experts.push_back({{gate_up, i, {}}, {}, {down, i, {}}});
  }
  return experts;
}

Result<MoeOperands> MoeOperands::Make(const Device& device, const MoeCase& bench,
                                      const Routing& routing) {
  MoeOperands made(bench);
  MARLIN_ASSIGN_OR_RETURN(made.x_, Uploaded(device, RandomRows(bench)));
  MARLIN_ASSIGN_OR_RETURN(made.out_, DeviceBuffer::Allocate(device, made.x_.bytes()));
  MARLIN_ASSIGN_OR_RETURN(made.weights_, Uploaded(device, routing.weights));
  for (const std::vector<int32_t>& batch : routing.ids) {
    MARLIN_ASSIGN_OR_RETURN(DeviceBuffer ids, Uploaded(device, batch));
    made.ids_.push_back(std::move(ids));
  }
  return made;
}

Status MoeOperands::Run(const ExpertsPlan& plan, size_t batch,
                        const ExpertsArguments& arguments) const {
  return plan.Run({x_.data(), type_, rows_}, {ids_[batch].data(), DType::kI32, selections_},
                  {weights_.data(), DType::kF32, selections_}, {out_.data(), type_, rows_},
                  arguments);
}

}  // namespace marlin::bench
