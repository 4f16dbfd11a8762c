#include "plan/step/sample_marks.h"

#include <fmt/core.h>

#include <algorithm>

namespace marlin {

Status SampleError(int32_t token) {
  if (token >= 0 || token == kSkippedMark) return {};
  const auto error = [](const std::string& message) {
    return Status(Code::kNonFiniteInput, message);
  };
  if (token == kNoToken) return error("logits: cannot be sampled");
  if (token == kNoLogitMark) return error("logits: minus infinity for every token");
  if (token == kMaskMark) {
    return Status(Code::kInvalidArgument, "allowed: no token whose logit is a number");
  }
  if (token == kMaskRowMark) {
    return Status(Code::kInvalidArgument, "allowed_rows: expected less than the number of masks");
  }
  const int32_t of_logit = kLogitMark - token;
  return error(
      fmt::format("logits: {} for token {}", of_logit % 2 == 0 ? "nan" : "inf", of_logit / 2));
}

int64_t CountSampled(std::span<const int32_t> tokens) {
  const auto is_mark = [](int32_t token) { return token < 0; };
  return std::find_if(tokens.begin(), tokens.end(), is_mark) - tokens.begin();
}

Status FirstSampleError(std::span<const int32_t> tokens, int64_t rows) {
  const auto is_error = [](int32_t token) { return !SampleError(token).ok(); };
  const auto mark = std::find_if(tokens.begin(), tokens.end(), is_error);
  if (mark == tokens.end()) return {};
  Status error = SampleError(*mark);
  if (rows == 1) return error;
  return error.WithContext(
      fmt::format("row {}", (mark - tokens.begin()) * rows / std::ssize(tokens)));
}

}  // namespace marlin
