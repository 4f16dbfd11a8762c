#include "cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <unordered_set>

#include "random.h"

namespace marlin::conformance {
namespace {

// Work of one problem, in multiply-adds: keeps the reference cheap.
constexpr int64_t kMaxWork = 600'000;
// The sums of lattice data stay below 2^24 units up to here.
constexpr int64_t kMaxLatticeK = 420;

// Shape classes of one dimension: sizes around every tile size of the rows.
std::vector<int64_t> AroundTiles(std::span<const KernelDesc> rows, int KernelDesc::*tile,
                                 std::initializer_list<int64_t> extra) {
  std::set<int64_t> sizes = {1, 2};
  for (const KernelDesc& row : rows) {
    const int64_t t = row.*tile;
    if (t <= 1) continue;
    for (int64_t size : {t - 1, t, t + 1, 3 * t + 5}) sizes.insert(size);
  }
  sizes.insert(extra.begin(), extra.end());
  return {sizes.begin(), sizes.end()};
}

template <typename T>
T Pick(Random& random, const std::vector<T>& values) {
  return values[static_cast<size_t>(random.Integer(0, static_cast<int64_t>(values.size()) - 1))];
}

// Draws cases that make sense.
class CaseSource {
 public:
  CaseSource(std::span<const KernelDesc> rows, uint64_t seed)
      : random_(seed),
        m_(AroundTiles(rows, &KernelDesc::tile_m, {3, 4, 5, 7, 17})),
        n_(AroundTiles(rows, &KernelDesc::tile_n, {5, 16, 17, 33, 64, 72, 136})),
        k_(AroundTiles(rows, &KernelDesc::tile_k,
                       {16, 31, 32, 33, 48, 80, 112, 128, 144, 240, 256, 288, 389})) {}

  Case Draw(Check check) {
    Case c;
    c.check = check;
    c.format = AllFormats()[static_cast<size_t>(
                                random_.Integer(0, static_cast<int64_t>(AllFormats().size()) - 1))]
                   .format;
    c.data = static_cast<DataClass>(random_.Integer(0, 8));
    if (random_.OneIn(3)) c.data = DataClass::kLattice;
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
      // Their exponents already need most of the 24 bits; a bias of another size does not fit.
      c.bias = false;
      c.bias_type = DType::kF32;
      c.weight_biases = false;
    }
    return c;
  }

 private:
  DType DrawType() {
    constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16};
    return kTypes[random_.Integer(0, 2)];
  }

  void DrawShape(Case& c) {
    do {
      c.m = Pick(random_, m_);
      c.n = Pick(random_, n_);
      c.k = Pick(random_, k_);
      const bool grouped = GetFormatInfo(c.format).quantized;
      c.group_size = grouped ? DrawGroup(c.k) : c.k;
    } while (c.m * c.n * c.k > kMaxWork || (IsLattice(c.data) && c.k > kMaxLatticeK));
  }

  int64_t DrawGroup(int64_t k) {
    constexpr int64_t kGroups[] = {16, 32, 64, 128};
    const int64_t draw = random_.Integer(0, 11);
    if (draw < 8) return kGroups[draw % 4];
    if (draw == 8) return 48;
    if (draw == 9) return 256;
    return k;
  }

  void DrawWeights(Case& c) {
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
      // The built-in quantiles are no lattice.
      const bool integers = c.format == Format::kCodebook4;
      c.user_codebook = (IsLattice(c.data) && !integers) || random_.OneIn(3);
    }
  }

  void DrawEpilogue(Case& c) {
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

  Random random_;
  std::vector<int64_t> m_;
  std::vector<int64_t> n_;
  std::vector<int64_t> k_;
};

// Takes, `count` times, the candidate that brings most pairs of properties not seen before.
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

// Every format on every plain shape class: the systematic part, on lattice data.
void AddEveryFormat(std::vector<Case>* cases) {
  struct Shape {
    int64_t m, n, k, group;
  };
  constexpr Shape kShapes[] = {
      {1, 16, 128, 32},   {1, 33, 144, 16},  {4, 17, 48, 64},   {5, 64, 256, 128},
      {17, 48, 272, 32},  {33, 31, 80, 16},  {64, 16, 128, 64}, {2, 136, 389, 128},
      {16, 20, 112, 112}, {70, 18, 160, 32},
  };
  uint64_t seed = 1;
  for (const FormatInfo& info : AllFormats()) {
    for (const Shape& shape : kShapes) {
      Case c;
      c.format = info.format;
      c.m = shape.m;
      c.n = shape.n;
      c.k = shape.k;
      c.group_size = info.quantized ? shape.group : shape.k;
      c.zero = info.zero_point == ZeroPoint::kRequired ? ZeroKind::kInteger : ZeroKind::kNone;
      c.user_codebook = info.has_codebook && info.format != Format::kCodebook4;
      c.a_type = seed % 3 == 0 ? DType::kF32 : (seed % 3 == 1 ? DType::kBf16 : DType::kF16);
      c.seed = seed++;
      cases->push_back(c);
      c.data = DataClass::kLatticeInt8;
      cases->push_back(c);
    }
  }
}

// Zero sizes, k and m beyond one pass of any kernel, and the 73,448 columns of a real vocabulary
// that once overflowed a 16-bit column count elsewhere.
void AddSpecialShapes(std::vector<Case>* cases) {
  struct Shape {
    int64_t m, n, k, group;
  };
  constexpr Shape kShapes[] = {{0, 16, 32, 32},    {3, 0, 32, 32},     {3, 16, 0, 32},
                               {0, 0, 0, 32},      {1, 73448, 16, 16}, {2, 73448, 32, 32},
                               {5, 73448, 16, 16}, {1, 8, 2064, 128},  {3, 24, 1100, 32},
                               {9, 16, 4112, 64},  {33, 16, 1040, 16}, {515, 20, 48, 32},
                               {1030, 34, 32, 32}};
  uint64_t seed = 1;
  for (const Shape& shape : kShapes) {
    for (Format format :
         {Format::kFp4E2M1, Format::kU4, Format::kNf3, Format::kS8, Format::kBf16}) {
      const FormatInfo& info = GetFormatInfo(format);
      Case c;
      c.format = format;
      c.m = shape.m;
      c.n = shape.n;
      c.k = shape.k;
      c.group_size = info.quantized ? shape.group : std::max<int64_t>(shape.k, 1);
      c.zero = format == Format::kU4 ? ZeroKind::kInteger : ZeroKind::kNone;
      c.data = shape.k > kMaxLatticeK ? DataClass::kGaussian : DataClass::kLattice;
      c.user_codebook = info.has_codebook && IsLattice(c.data);
      c.bias = seed % 2 == 0;
      c.seed = seed++;
      cases->push_back(c);
    }
  }
}

// Gated products whose tasks cover more columns than one run of the epilogue.
void AddWideGated(std::vector<Case>* cases) {
  uint64_t seed = 1;
  for (Format format : {Format::kFp4E2M1, Format::kU4, Format::kInt3, Format::kS8}) {
    for (int64_t m : {3, 40}) {
      Case c;
      c.format = format;
      c.m = m;
      c.n = 400;
      c.k = 48;
      c.group_size = 32;
      c.zero = format == Format::kU4 ? ZeroKind::kInteger : ZeroKind::kNone;
      c.gated = true;
      c.bias = true;
      c.activation = seed % 2 == 0 ? Activation::kRelu : Activation::kNone;
      c.seed = seed++;
      cases->push_back(c);
    }
  }
}

void AddPromises(std::vector<Case>* cases) {
  constexpr Check kPromises[] = {Check::kBatchInvariant, Check::kThreads, Check::kRowPermutation,
                                 Check::kRepeat};
  constexpr Format kFormats[] = {Format::kFp4E2M1, Format::kU4,      Format::kNf3,
                                 Format::kInt2,    Format::kFp8E4M3, Format::kBf16};
  uint64_t seed = 1;
  for (Check check : kPromises) {
    for (Format format : kFormats) {
      const FormatInfo& info = GetFormatInfo(format);
      Case c;
      c.check = check;
      c.format = format;
      c.m = check == Check::kThreads ? 19 + static_cast<int64_t>(seed) % 50 : 64;
      c.n = check == Check::kThreads ? 150 : 40;
      c.k = 208;
      c.group_size = info.quantized ? 32 : c.k;
      c.zero = format == Format::kU4 ? ZeroKind::kFractional : ZeroKind::kNone;
      c.data = check == Check::kRowPermutation ? DataClass::kNonFinite : DataClass::kGaussian;
      c.a_type = seed % 3 == 0 ? DType::kF32 : (seed % 3 == 1 ? DType::kBf16 : DType::kF16);
      c.c_type = DType::kF32;
      c.row_weight = seed % 2 == 0;
      c.seed = seed++;
      cases->push_back(c);
    }
  }
}

}  // namespace

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

std::vector<Case> SelectProblems(std::span<const KernelDesc> rows, const SelectionSize& size) {
  std::vector<Case> cases;
  AddEveryFormat(&cases);
  AddSpecialShapes(&cases);
  AddWideGated(&cases);
  AddPromises(&cases);
  CaseSource source(rows, HashText("conformance"));
  SelectByPairs(source, Check::kGemm, size.gemm, &cases);
  SelectByPairs(source, Check::kDequantize, size.dequantize, &cases);
  // A name is drawn twice now and then: one is enough.
  std::unordered_set<std::string> names;
  std::erase_if(cases, [&](const Case& c) { return !names.insert(ProblemName(c)).second; });
  return cases;
}

}  // namespace marlin::conformance
