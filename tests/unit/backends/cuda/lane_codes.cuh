// A lane's codes and words in a fragment block, for every code kind.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "backends/cuda/common/decode_fragment.cuh"
#include "backends/cuda/plan/kernel_instances.h"

namespace marlin::cuda {

inline constexpr int kCodes = 32;     ///< Codes per lane of a fragment block.
inline constexpr int kMaxWords = 16;  ///< Words of those codes.
inline constexpr int kSteps = 4;
inline constexpr int kPairs = 4;  ///< Registers per fragment.

inline constexpr uint32_t kUntouched = 0xdeadbeefu;  ///< Canary beyond the words.

using LaneCodes = std::array<uint8_t, kCodes>;
using LaneWords = std::array<uint32_t, kMaxWords>;

template <CodeKind kKind>
LaneWords Encode(const LaneCodes& codes) {
  uint8_t plain[kCodes];
  std::copy(codes.begin(), codes.end(), plain);
  LaneWords words;
  words.fill(kUntouched);
  EncodeWords<kKind>(plain, words.data());
  return words;
}

inline LaneWords Encode(CodeKind kind, const LaneCodes& codes) {
  return VisitKind(kind, [&](auto of) { return Encode<of>(codes); });
}

inline std::vector<CodeKind> CodedKinds() {
  std::vector<CodeKind> kinds;
  for (int kind = 0; kind < static_cast<int>(CodeKind::kDense16); ++kind) {
    kinds.push_back(static_cast<CodeKind>(kind));
  }
  return kinds;
}

inline int CountOf(CodeKind kind) { return 1 << CodeBits(kind); }

/// Codes that differ between neighbours; over all `first`, every code is in every position.
inline LaneCodes Ascending(CodeKind kind, int first) {
  LaneCodes codes;
  for (int i = 0; i < kCodes; ++i) {
    codes[static_cast<size_t>(i)] = static_cast<uint8_t>((first + 7 * i) % CountOf(kind));
  }
  return codes;
}

}  // namespace marlin::cuda
