#include "case_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace marlin::conformance {
namespace {

template <typename T>
T Pick(Random& random, const std::vector<T>& values) {
  return values[static_cast<size_t>(random.Integer(0, static_cast<int64_t>(values.size()) - 1))];
}

}  // namespace

Case CaseSource::Draw(Check check) {
  Case c;
  c.check = check;
  c.backend = sizes_.backend;
  c.format = AllFormats()[static_cast<size_t>(
                              random_.Integer(0, static_cast<int64_t>(AllFormats().size()) - 1))]
                 .format;
  c.data = static_cast<DataClass>(random_.Integer(0, 8));
  if (random_.OneIn(3)) c.data = DataClass::kLattice;
  if (c.data == DataClass::kLatticeInt8 && !sizes_.int8) c.data = DataClass::kLattice;
  c.a_type = DrawType();
  c.c_type = DrawType();
  DrawShape(c);
  DrawWeights(c);
  DrawEpilogue(c);
  c.padded = random_.OneIn(4);
  c.misaligned = random_.OneIn(4);
  c.experts = random_.OneIn(10) ? 3 : 1;
  c.seed = static_cast<uint64_t>(random_.Integer(1, 99));
  if (c.data == DataClass::kLatticeWide && c.a_type == DType::kBf16) c.a_type = DType::kF16;
  const bool fp8 = c.format == Format::kFp8E4M3 || c.format == Format::kFp8E5M2;
  if (IsLattice(c.data) && fp8) {
    // The fp8 exponents already need most of the 24 bits; a bias of another magnitude does not fit.
    c.bias = false;
    c.bias_type = DType::kF32;
    c.weight_biases = false;
  }
  return c;
}

DType CaseSource::DrawType() {
  constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16};
  return kTypes[random_.Integer(0, 2)];
}

void CaseSource::DrawShape(Case& c) {
  do {
    c.m = Pick(random_, sizes_.m);
    c.n = Pick(random_, sizes_.n);
    c.k = Pick(random_, sizes_.k);
    const bool grouped = GetFormatInfo(c.format).quantized;
    const int64_t group = grouped ? Pick(random_, sizes_.groups) : 0;
    c.group_size = group == 0 ? c.k : group;
  } while (c.m * c.n * c.k > sizes_.max_work || (IsLattice(c.data) && c.k > sizes_.max_lattice_k));
}

void CaseSource::DrawWeights(Case& c) {
  const FormatInfo& info = GetFormatInfo(c.format);
  if (!info.quantized) return;
  c.scale_type = static_cast<ScaleType>(random_.Integer(0, 4));
  if (random_.OneIn(3)) c.scale_type = ScaleType::kF16;
  const bool takes_zero = info.zero_point != ZeroPoint::kNone;
  if (info.zero_point == ZeroPoint::kRequired || (takes_zero && random_.OneIn(2))) {
    c.zero = random_.OneIn(2) ? ZeroKind::kInteger : ZeroKind::kFractional;
  }
  if (!c.user_codebook && random_.OneIn(6)) {
    c.weight_biases = true;
    c.zero = ZeroKind::kNone;
  }
  if (info.has_codebook) {
    // The built-in quantiles are not lattice values.
    const bool integers = c.format == Format::kCodebook4;
    c.user_codebook = (IsLattice(c.data) && !integers) || random_.OneIn(3);
  }
  c.global_divides = c.scale_type == ScaleType::kE4M3 && random_.OneIn(3);
  if (c.zero == ZeroKind::kNone) return;
  // Fractions of 8-bit codes would need more bits than bf16 has.
  if (IsLattice(c.data) && info.bits == 8) c.zero = ZeroKind::kInteger;
  if (random_.OneIn(3)) c.zero_type = random_.OneIn(2) ? ScaleType::kBf16 : ScaleType::kF32;
}

void CaseSource::DrawEpilogue(Case& c) {
  if (c.check == Check::kDequantize) {
    c.a_type = DType::kF32;
    c.m = 1;
    return;
  }
  c.bias = random_.OneIn(3);
  if (c.bias) c.bias_type = DrawType();
  if (random_.OneIn(2)) c.activation = static_cast<Activation>(random_.Integer(0, 3));
  c.gated = c.n % 2 == 0 && random_.OneIn(4);
  c.row_weight = random_.OneIn(5);
  c.allow_bf16_activations = c.a_type != DType::kBf16 && random_.OneIn(6);
  if (c.data == DataClass::kNonFinite) c.m = std::max<int64_t>(c.m, 3);
}

void SelectByPairs(CaseSource& source, Check check, int count, std::vector<Case>* selected) {
  constexpr int kCandidates = 12;
  std::unordered_set<std::string> seen;
  const auto pairs_of = [](const Case& c) {
    const std::vector<std::string> properties = Properties(c);
    std::vector<std::string> pairs;
    for (size_t i = 0; i < properties.size(); ++i) {
      for (size_t j = i + 1; j < properties.size(); ++j) {
        pairs.push_back(properties[i] + "," + properties[j]);
      }
    }
    return pairs;
  };
  for (int i = 0; i < count; ++i) {
    Case best;
    int64_t best_new = -1;
    for (int candidate = 0; candidate < kCandidates; ++candidate) {
      const Case c = source.Draw(check);
      const std::vector<std::string> pairs = pairs_of(c);
      const int64_t fresh = std::count_if(pairs.begin(), pairs.end(), [&](const std::string& pair) {
        return !seen.contains(pair);
      });
      if (fresh > best_new) {
        best = c;
        best_new = fresh;
      }
    }
    for (const std::string& pair : pairs_of(best)) seen.insert(pair);
    selected->push_back(best);
  }
}

std::vector<std::string> Properties(const Case& c) {
  const auto group = c.group_size == c.k ? std::string("k") : std::to_string(c.group_size);
  return {
      fmt::format("format={}", FormatName(c.format)),
      fmt::format("m={}", c.m),
      fmt::format("n={}", c.n),
      fmt::format("k={}", c.k),
      fmt::format("group={}", group),
      fmt::format("scale={}", ScaleTypeName(c.scale_type)),
      fmt::format("zero={}{}", static_cast<int>(c.zero), c.weight_biases ? "b" : ""),
      fmt::format("zero_type={}", ScaleTypeName(c.zero_type)),
      fmt::format("divides={}", c.global_divides),
      fmt::format("a={}", DTypeName(c.a_type)),
      fmt::format("c={}", DTypeName(c.c_type)),
      fmt::format("activation={}", static_cast<int>(c.activation)),
      fmt::format("gated={}", c.gated),
      fmt::format("bias={}", c.bias),
      fmt::format("row_weight={}", c.row_weight),
      fmt::format("memory={}{}{}", c.padded, c.misaligned, c.experts > 1),
      fmt::format("data={}", static_cast<int>(c.data)),
  };
}

}  // namespace marlin::conformance
