// Statistics of inputs, and the factors that gptq makes of them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/cholesky.h"
#include "base/thread_pool.h"
#include "calibrate/gram_sums.h"
#include "calibrate/layer_run.h"
#include "marlin/device.h"
#include "quantize/layer_inputs.h"

namespace marlin {

/// The statistics of one input: of the quantized model, and its products with the original's.
struct InputSums {
  InputSums(GramProducts& products, int64_t k) : gram(products, k), cross(products, k) {}
  Status Add(const HostRows& original, const HostRows& quantized);
  GramSums gram;
  GramSums cross;
};

/// The factors with which matrices of one input are quantized.
struct GptqInput {
  std::optional<InputCurvature> curvature;  ///< Empty: the fallback.
  std::optional<InputCorrection> correction;
  std::string obstacle;  ///< Why there is no curvature.
  /// The statistics, while matrices are rotated by Hadamard blocks; and the inputs rotated by
  /// blocks of each size.
  std::vector<double> gram;
  std::vector<double> cross;
  mutable std::map<int64_t, GptqInput> rotated;
};

/// Makes the factors. Errors: as MakeCurvature and MakeCorrection, except that a Gram matrix that
/// cannot be factorized and a text that is too short are obstacles.
class GptqInputs {
 public:
  /// `pool` must outlive this.
  explicit GptqInputs(ThreadPool& pool) : pool_(pool) {}

  /// Opens the device's factorizations. Errors: as Backend::MakeCholesky.
  Status Open(const Device& device);
  /// Before any input is made: the tokens of the text, and whether inputs will be rotated.
  void SetTokens(int64_t tokens) { tokens_ = tokens; }
  void KeepForRotation() { rotates_ = true; }

  /// The least tokens for k inputs: with fewer a Gram matrix fits the text rather than the model.
  static int64_t LeastTokens(int64_t k);
  bool Enough(int64_t k) const { return tokens_ >= LeastTokens(k); }

  Result<GptqInput> Make(const InputSums& sums) const;
  /// For the few tokens that select an expert: `all`, the mean Gram matrix over all tokens, counts
  /// as much as one token per input. Without a correction.
  Result<GptqInput> MakeMixed(const GramSums& own, const std::vector<double>& all) const;
  /// The input rotated by Hadamard blocks of a size, which `input` keeps.
  Result<const GptqInput*> Rotated(const GptqInput& input, int64_t size) const;

 private:
  Result<GptqInput> Make(std::vector<double> gram, std::vector<double> cross, int64_t k) const;
  Result<GptqInput> FromGram(const std::vector<double>& gram, int64_t k) const;
  GptqInput TooShort(int64_t k) const;

  ThreadPool& pool_;
  std::unique_ptr<Cholesky> cholesky_;  ///< The device's, or the host's.
  int64_t tokens_ = 0;
  bool rotates_ = false;
};

}  // namespace marlin
