// The log-probabilities of tokens, and the most likely tokens of a row.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/cpu/decoder/cpu_decoder.h"
#include "plan/step/indices.h"

namespace marlin::cpu {
namespace {

/// One row of logits.
class LogSoftmax {
 public:
  LogSoftmax(const float* logits, int64_t vocab) : logits_(logits), vocab_(vocab) {
    largest_ = logits[0];
    for (int64_t i = 0; i < vocab; ++i) {
      if (!(logits[i] < std::numeric_limits<float>::infinity())) return;
      largest_ = std::max(largest_, logits[i]);
    }
    if (std::isinf(largest_)) return;
    double sum = 0;
    for (int64_t i = 0; i < vocab; ++i) {
      sum += std::exp(static_cast<double>(logits[i]) - static_cast<double>(largest_));
    }
    log_sum_ = std::log(sum);
    valid_ = true;
  }

  /// NaN for a negative id.
  float At(int64_t id) const {
    if (!valid_ || id < 0) return std::numeric_limits<float>::quiet_NaN();
    const double difference = static_cast<double>(logits_[id]) - static_cast<double>(largest_);
    return static_cast<float>(difference - log_sum_);
  }

  /// The most likely ids in order; of a row without probabilities, -1.
  void FindLikely(int32_t* ids, int64_t count) const {
    std::fill_n(ids, count, -1);
    if (!valid_) return;
    int64_t found = 0;
    for (int64_t i = 0; i < vocab_ && count > 0; ++i) {
      if (found == count && logits_[i] <= logits_[ids[count - 1]]) continue;
      if (found < count) ++found;
      int64_t place = found - 1;
      for (; place > 0 && logits_[i] > logits_[ids[place - 1]]; --place) {
        ids[place] = ids[place - 1];
      }
      ids[place] = static_cast<int32_t>(i);
    }
  }

 private:
  const float* logits_;
  int64_t vocab_;
  float largest_;
  double log_sum_ = 0;
  bool valid_ = false;
};

}  // namespace

Status CpuDecoder::Run(const LogProbabilitiesCall& call,
                       const OperationContext& /*context*/) const {
  const int64_t rows = call.logits.dim(0);
  const int64_t vocab = call.logits.dim(1);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t id = IndexAt(call.ids, row);
    if (id < vocab) continue;
    return Status(Code::kInvalidArgument,
                  fmt::format("ids: expected 0..{}, got {} at {}", vocab - 1, id, row));
  }
  const int64_t likely = call.out.likely_ids.dim(1);
  pool_.Run(rows, [&](int64_t row, int /*worker*/) {
    const LogSoftmax values(call.logits.As<float>() + row * call.logits.stride(0), vocab);
    call.out.of_ids.As<float>()[row] = values.At(IndexAt(call.ids, row));
    int32_t* const ids = call.out.likely_ids.As<int32_t>() + row * likely;
    values.FindLikely(ids, likely);
    for (int64_t i = 0; i < likely; ++i) {
      call.out.of_likely.As<float>()[row * likely + i] = values.At(ids[i]);
    }
  });
  return {};
}

}  // namespace marlin::cpu
