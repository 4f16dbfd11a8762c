#include "calibrate/gptq_input.h"

#include <fmt/core.h>

#include <utility>

#include "base/host_cholesky.h"
#include "base/macros.h"
#include "plan/gemm/backend.h"
#include "quantize/rotate.h"

namespace marlin {

Status InputSums::Add(const HostRows& original, const HostRows& quantized) {
  return GramSums::AddBoth(original.values.data(), quantized.values.data(), quantized.rows(), &gram,
                           &cross);
}

Status GptqInputs::Open(const Device& device) {
  auto of_device = Internals::Impl(device).backend().MakeCholesky();
  if (!of_device.ok()) {
    return of_device.status().WithContext("calibration on " + device.info().name +
                                          " (the CPU needs no library)");
  }
  cholesky_ = *std::move(of_device);
  if (cholesky_ == nullptr) cholesky_ = std::make_unique<HostCholesky>(pool_);
  return {};
}

// Measured on the sample models, where gptq loses against mse with fewer tokens.
int64_t GptqInputs::LeastTokens(int64_t k) { return 1024 + 2 * k; }

GptqInput GptqInputs::TooShort(int64_t k) const {
  GptqInput input;
  input.obstacle = fmt::format("mse: {} tokens are too few for {} inputs; at least {}", tokens_, k,
                               LeastTokens(k));
  return input;
}

Result<GptqInput> GptqInputs::FromGram(const std::vector<double>& gram, int64_t k) const {
  GptqInput input;
  Result<InputCurvature> curvature = MakeCurvature(pool_, *cholesky_, gram, k);
  if (curvature.ok()) {
    input.curvature = *std::move(curvature);
  } else if (curvature.status().code() == Code::kUnsupported) {
    input.obstacle = "mse: " + curvature.status().message();
  } else {
    return curvature.status();
  }
  return input;
}

Result<GptqInput> GptqInputs::Make(const InputSums& sums) const {
  const int64_t k = sums.gram.k();
  if (!Enough(k)) return TooShort(k);
  return Make(sums.gram.Mean(), sums.cross.Mean(), k);
}

Result<GptqInput> GptqInputs::Make(std::vector<double> gram, std::vector<double> cross,
                                   int64_t k) const {
  MARLIN_ASSIGN_OR_RETURN(GptqInput input, FromGram(gram, k));
  if (!input.curvature) return input;
  MARLIN_ASSIGN_OR_RETURN(input.correction, MakeCorrection(pool_, *cholesky_, gram, cross, k));
  if (!rotates_) return input;
  input.gram = std::move(gram);
  input.cross = std::move(cross);
  return input;
}

Result<GptqInput> GptqInputs::MakeMixed(const GramSums& own, const std::vector<double>& all) const {
  const int64_t k = own.k();
  if (!Enough(k)) return TooShort(k);
  return FromGram(own.MeanWith(all, static_cast<double>(k)), k);
}

Result<const GptqInput*> GptqInputs::Rotated(const GptqInput& input, int64_t size) const {
  const auto known = input.rotated.find(size);
  if (known != input.rotated.end()) return &known->second;
  const int64_t k = input.curvature->k;
  std::vector<double> gram = input.gram;
  std::vector<double> cross = input.cross;
  RotateGram(pool_, k, size, &gram);
  RotateGram(pool_, k, size, &cross);
  MARLIN_ASSIGN_OR_RETURN(GptqInput rotated, Make(std::move(gram), std::move(cross), k));
  return &input.rotated.emplace(size, std::move(rotated)).first->second;
}

}  // namespace marlin
