#include "plan/step/sample_marks.h"

#include <fmt/core.h>

#include <algorithm>

namespace marlin {

Status SampleError(int32_t token) {
  if (token >= 0) return {};
  const auto error = [](const std::string& message) {
    return Status(Code::kNonFiniteInput, message);
  };
  if (token == kNoToken) return error("logits: cannot be sampled");
  if (token > kLogitMark) return error("logits: minus infinity for every token");
  const int32_t of_logit = kLogitMark - token;
  return error(
      fmt::format("logits: {} for token {}", of_logit % 2 == 0 ? "nan" : "inf", of_logit / 2));
}

Status FirstSampleError(std::span<const int32_t> tokens, int64_t rows) {
  const auto mark = std::find_if(tokens.begin(), tokens.end(), [](int32_t t) { return t < 0; });
  if (mark == tokens.end()) return {};
  const Status error = SampleError(*mark);
  if (rows == 1) return error;
  return error.WithContext(
      fmt::format("row {}", (mark - tokens.begin()) * rows / std::ssize(tokens)));
}

}  // namespace marlin
