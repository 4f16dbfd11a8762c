// The problems for GPU kernels.
#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "case_source.h"
#include "cases.h"
#include "problem.h"
#include "random.h"
#include "sparse_cases.h"

namespace marlin::conformance {
namespace {

struct Shape {
  int64_t m, n, k, group;
};

// Plain cases with randomly drawn activation and output types.
class PlainCases {
 public:
  PlainCases(std::string_view backend, std::vector<Case>* cases)
      : backend_(backend), cases_(cases) {}

  Case Make(Format format, const Shape& shape) {
    constexpr DType kTypes[] = {DType::kBf16, DType::kF16, DType::kF32};
    const FormatInfo& info = GetFormatInfo(format);
    Case c;
    c.backend = backend_;
    c.format = format;
    c.m = shape.m;
    c.n = shape.n;
    c.k = shape.k;
    c.group_size = info.quantized ? shape.group : std::max<int64_t>(shape.k, 1);
    c.zero = info.zero_point == ZeroPoint::kRequired ? ZeroKind::kInteger : ZeroKind::kNone;
    // The built-in quantiles are not lattice values.
    c.user_codebook = info.has_codebook && format != Format::kCodebook4;
    c.a_type = kTypes[random_.Integer(0, 2)];
    c.c_type = kTypes[random_.Integer(0, 2)];
    c.allow_bf16_activations = c.a_type != DType::kBf16 && OneIn(2);
    c.seed = seed_++;
    return c;
  }
  void Add(Case c) { cases_->push_back(std::move(c)); }
  bool OneIn(int64_t count) { return random_.OneIn(count); }

 private:
  std::string backend_;
  std::vector<Case>* cases_;
  Random random_ = Random(HashText("plain cases"));
  uint64_t seed_ = 1;
};

constexpr Format kSomeFormats[] = {Format::kFp4E2M1, Format::kU4, Format::kS8, Format::kBf16};

// Every format on every plain shape class. tests/conformance/compute_sanitizer.sh names the shapes
// with n = 40 and n = 72, and some of AddLongSums, AddPeriodic and AddStreamed.
void AddEveryFormat(PlainCases& plain) {
  constexpr Shape kShapes[] = {
      {1, 128, 256, 128},   {2, 33, 144, 16},   {8, 64, 128, 64},    {16, 256, 384, 128},
      {17, 40, 96, 32},     {33, 300, 400, 80}, {64, 128, 272, 16},  {65, 72, 160, 32},
      {128, 129, 144, 48},  {129, 520, 96, 96}, {256, 136, 128, 64}, {257, 31, 80, 16},
      {300, 264, 192, 256},
  };
  for (const FormatInfo& info : AllFormats()) {
    for (const Shape& shape : kShapes) {
      plain.Add(plain.Make(info.format, shape));
      if (shape.m != 17 && shape.m != 65) continue;
      Case c = plain.Make(info.format, shape);
      c.check = Check::kDequantize;
      c.m = 1;
      c.a_type = DType::kF32;
      c.allow_bf16_activations = false;
      plain.Add(c);
    }
  }
}

// The kinds of weight zero points and biases that a format may have.
std::vector<std::pair<ZeroKind, bool>> GroupKinds(const FormatInfo& info) {
  std::vector<std::pair<ZeroKind, bool>> kinds = {{ZeroKind::kNone, true}};
  if (info.zero_point != ZeroPoint::kRequired) kinds.push_back({ZeroKind::kNone, false});
  if (info.zero_point != ZeroPoint::kNone) {
    kinds.push_back({ZeroKind::kInteger, false});
    kinds.push_back({ZeroKind::kFractional, false});
  }
  return kinds;
}

// Every format with every group size, scale type and kind of zero points and biases, cycling
// through shapes.
void AddEveryWeights(PlainCases& plain) {
  constexpr int64_t kGroups[] = {16, 32, 48, 64, 96, 112, 128, 256, 0};
  constexpr int64_t kM[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129};
  constexpr int64_t kN[] = {8, 24, 64, 33, 128, 72, 16, 130, 65, 7, 40};
  constexpr int64_t kTails[] = {0, 16, 13, 32, 8, 64, 1};
  size_t at = 0;
  const auto add = [&](const FormatInfo& info, int64_t group, ScaleType scale,
                       const std::pair<ZeroKind, bool>& kind) {
    const int64_t k = (group == 0 ? 96 : 2 * group) + kTails[at % std::size(kTails)];
    Case c = plain.Make(
        info.format, {kM[at % std::size(kM)], kN[at % std::size(kN)], k, group == 0 ? k : group});
    c.scale_type = scale;
    c.zero = kind.first;
    c.weight_biases = kind.second;
    const bool fp8 = info.format == Format::kFp8E4M3 || info.format == Format::kFp8E5M2;
    const bool long_codes =
        (fp8 && c.weight_biases) || (info.bits == 8 && c.zero == ZeroKind::kFractional);
    const bool lattice = !plain.OneIn(3) && !long_codes;
    constexpr ScaleType kZeroTypes[] = {ScaleType::kF16, ScaleType::kBf16, ScaleType::kF32};
    if (c.zero != ZeroKind::kNone) c.zero_type = kZeroTypes[at % std::size(kZeroTypes)];
    c.global_divides = scale == ScaleType::kE4M3 && at % 2 == 0;
    c.data = lattice ? DataClass::kLattice : DataClass::kGaussian;
    c.bias = !lattice && plain.OneIn(2);
    ++at;
    plain.Add(c);
  };
  for (const FormatInfo& info : AllFormats()) {
    if (!info.quantized) continue;
    for (int64_t group : kGroups) {
      for (int scale = 0; scale < 5; ++scale) {
        for (const auto& kind : GroupKinds(info)) {
          add(info, group, static_cast<ScaleType>(scale), kind);
        }
      }
    }
  }
}

// Zero sizes, many tiles, and the n = 73,448 of a real vocabulary.
void AddSpecialShapes(PlainCases& plain) {
  constexpr Shape kShapes[] = {{0, 16, 32, 32},     {3, 0, 32, 32},       {3, 16, 0, 32},
                               {0, 0, 0, 32},       {1, 73448, 16, 16},   {2, 73448, 32, 32},
                               {17, 73448, 32, 16}, {65, 73448, 16, 16},  {7, 8200, 128, 128},
                               {64, 4104, 400, 64}, {300, 1000, 512, 32}, {129, 2304, 256, 128},
                               {1030, 520, 192, 64}};
  for (const Shape& shape : kShapes) {
    for (Format format : kSomeFormats) plain.Add(plain.Make(format, shape));
  }
}

// Small n and long k, which occupy a GPU only with split-K.
void AddLongSums(PlainCases& plain) {
  constexpr Shape kShapes[] = {
      {0, 64, 16384, 128}, {0, 8, 4096, 64}, {0, 192, 2064, 32}, {0, 72, 5136, 48}};
  for (const Shape& shape : kShapes) {
    for (int64_t m : {1, 2, 4, 8, 16, 17, 33, 64}) {
      for (Format format : kSomeFormats) {
        Case c = plain.Make(format, {m, shape.n, shape.k, shape.group});
        c.data = plain.OneIn(2) ? DataClass::kLattice : DataClass::kGaussian;
        plain.Add(c);
      }
    }
  }
}

// GLU GEMMs with more columns than a tile.
void AddWideGated(PlainCases& plain) {
  for (Format format : {Format::kFp4E2M1, Format::kU4, Format::kInt3, Format::kS8}) {
    for (int64_t m : {1, 3, 16, 40, 130}) {
      for (int64_t n : {192, 400, 512, 1040}) {
        Case c = plain.Make(format, {m, n, 48, 32});
        c.gated = true;
        c.bias = true;
        c.activation = plain.OneIn(2) ? Activation::kRelu : Activation::kNone;
        plain.Add(c);
      }
    }
  }
}

// GEMMs of many tiles, with and without split-K: on an H200 they use every tile size, in one wave
// and in several waves, and smaller tiles for the tail wave. Only one period is computed by the
// reference, so it is cheap.
void AddPeriodic(PlainCases& plain) {
  constexpr Shape kShapes[] = {
      {1, 20000, 1040, 128},  {5, 12008, 272, 32},    {9, 8192, 2064, 64},
      {16, 40000, 144, 16},   {8, 2200, 4096, 128},   {13, 2304, 2560, 64},
      {4, 20000, 8192, 128},  {16, 4160, 14336, 128}, {15, 4143, 14344, 128},
      {33, 4104, 2064, 64},   {65, 4096, 4112, 128},  {100, 16384, 400, 80},
      {257, 4608, 272, 64},   {300, 20000, 144, 32},  {520, 8192, 400, 128},
      {1030, 8192, 400, 32},  {1030, 520, 8208, 64},  {1030, 1040, 8208, 32},
      {2049, 1040, 8208, 16}, {2049, 1024, 272, 96},  {250, 17040, 2064, 128},
      {1, 10240, 4112, 128},  {8, 5120, 5120, 128},   {11, 5216, 6928, 64}};
  constexpr Activation kActivations[] = {Activation::kNone, Activation::kSilu, Activation::kRelu};
  for (const FormatInfo& info : AllFormats()) {
    for (const Shape& shape : kShapes) {
      Case c = plain.Make(info.format, shape);
      c.check = Check::kPeriodic;
      c.gated = plain.OneIn(3);
      c.activation = kActivations[c.seed % 3];
      c.row_weight = plain.OneIn(4);
      c.padded = plain.OneIn(4);
      c.misaligned = plain.OneIn(4);
      const bool has_halves = shape.n % 2 == 0;
      if (!c.gated || has_halves) plain.Add(c);
    }
  }
}

// Stream-K: shapes whose tail wave would be partly filled with data-parallel tiles. For some tile_m
// of each, all CTAs of an H200 take parts of the remaining output tiles, after whole tiles or on
// their own, with two to nine CTAs per tile.
void AddStreamed(PlainCases& plain) {
  constexpr Shape kShapes[] = {{40, 2320, 2064, 64},   {20, 4400, 8208, 64},
                               {40, 20000, 2064, 128}, {190, 18944, 2064, 32},
                               {250, 2100, 8208, 16},  {128, 20000, 2064, 128},
                               {512, 13824, 5120, 128}};
  for (Format format : kSomeFormats) {
    for (const Shape& shape : kShapes) {
      for (const bool gated : {false, true}) {
        Case c = plain.Make(format, shape);
        c.check = Check::kPeriodic;
        c.gated = gated;
        c.activation = gated ? Activation::kSilu : Activation::kNone;
        c.row_weight = plain.OneIn(2);
        c.padded = plain.OneIn(2);
        plain.Add(c);
      }
    }
    for (Check check : {Check::kRepeat, Check::kStreams}) {
      for (const Shape& shape : {Shape{20, 4400, 8208, 128}, Shape{90, 10240, 4112, 128}}) {
        Case c = plain.Make(format, shape);
        c.check = check;
        c.data = DataClass::kGaussian;
        c.c_type = DType::kF32;
        plain.Add(c);
      }
    }
  }
}

// Square bf16 GEMMs, so that the output of one is the A of the next.
void AddChains(PlainCases& plain) {
  for (int64_t m : {1, 7, 16, 33, 130}) {
    for (Format format : {Format::kFp4E2M1, Format::kU4, Format::kS8, Format::kBf16}) {
      for (int64_t n : {256, 1040}) {
        Case c = plain.Make(format, {m, n, n, 32});
        c.check = Check::kChain;
        c.a_type = c.c_type = DType::kBf16;
        c.allow_bf16_activations = false;
        c.data = DataClass::kGaussian;
        plain.Add(c);
      }
    }
  }
}

void AddPromises(PlainCases& plain) {
  constexpr Check kPromises[] = {Check::kBatchInvariant, Check::kRowPermutation, Check::kRepeat,
                                 Check::kStreams};
  constexpr Format kFormats[] = {Format::kFp4E2M1, Format::kU4,      Format::kNf3,
                                 Format::kInt2,    Format::kFp8E4M3, Format::kBf16};
  constexpr Shape kShapes[] = {
      {64, 40, 208, 32}, {8, 64, 4096, 128}, {130, 264, 512, 64}, {260, 72, 272, 32}};
  for (Check check : kPromises) {
    for (Format format : kFormats) {
      for (const Shape& shape : kShapes) {
        Case c = plain.Make(format, shape);
        c.check = check;
        c.zero = format == Format::kU4 ? ZeroKind::kFractional : ZeroKind::kNone;
        c.user_codebook = false;
        c.data = check == Check::kRowPermutation ? DataClass::kNonFinite : DataClass::kGaussian;
        c.c_type = DType::kF32;
        c.row_weight = c.seed % 2 == 0;
        plain.Add(c);
      }
    }
  }
  // Split-K partials that are reduced through the workspace in global memory.
  for (Check check : {Check::kRepeat, Check::kStreams}) {
    for (Format format : {Format::kFp4E2M1, Format::kS8}) {
      Case c = plain.Make(format, {16, 1440, 14336, 128});
      c.check = check;
      c.data = DataClass::kGaussian;
      plain.Add(c);
    }
  }
}

// 2:4 weights, beside the small problems of AddSparse: sums of many rows, and the tilings of
// AddPeriodic that the kernel on sparse tensor cores shares with the dense one.
void AddManySparseRows(PlainCases& plain) {
  constexpr Format kFormats[] = {Format::kFp4E2M1, Format::kS4, Format::kNf4};
  constexpr Shape kShapes[] = {{17, 40, 96, 32},     {31, 130, 389, 128},  {33, 300, 400, 80},
                               {65, 72, 160, 16},    {97, 136, 256, 64},   {129, 520, 96, 96},
                               {256, 136, 1100, 48}, {300, 264, 192, 256}, {64, 128, 272, 16}};
  constexpr Shape kManyTiles[] = {{20, 4400, 8208, 64},    {33, 4104, 2064, 64},
                                  {100, 16384, 400, 80},   {300, 20000, 144, 32},
                                  {1030, 8192, 400, 16},   {1030, 520, 8208, 64},
                                  {250, 17040, 2064, 128}, {16, 4160, 14336, 128}};
  constexpr Check kPromises[] = {Check::kBatchInvariant, Check::kRepeat, Check::kStreams,
                                 Check::kChain};
  for (const Format format : kFormats) {
    for (const Shape& shape : kShapes) {
      for (const bool lattice : {true, false}) {
        Case c = plain.Make(format, shape);
        c.sparse = true;
        c.data = lattice ? DataClass::kLattice : DataClass::kGaussian;
        c.user_codebook = c.user_codebook && lattice;
        c.bias = plain.OneIn(2);
        c.row_weight = plain.OneIn(4);
        c.padded = plain.OneIn(4);
        plain.Add(c);
      }
    }
    for (const Shape& shape : kManyTiles) {
      Case c = plain.Make(format, shape);
      c.sparse = true;
      c.check = Check::kPeriodic;
      c.gated = plain.OneIn(3);
      c.misaligned = plain.OneIn(4);
      plain.Add(c);
    }
    for (const Check check : kPromises) {
      const bool chain = check == Check::kChain;
      Case c = plain.Make(format, chain ? Shape{130, 1040, 1040, 32} : Shape{130, 264, 4112, 64});
      c.sparse = true;
      c.check = check;
      c.data = DataClass::kGaussian;
      c.user_codebook = false;
      c.c_type = chain ? DType::kBf16 : DType::kF32;
      if (chain) c.a_type = DType::kBf16;
      if (chain) c.allow_bf16_activations = false;
      plain.Add(c);
    }
  }
}

// The problems of AddSparse that have a meaning on a GPU. There a pruned weight is not multiplied
// (docs/kernels/sparse.md), so that a NaN need not reach every output of its row.
void AddFewSparseRows(std::string_view backend, std::vector<Case>* cases) {
  std::vector<Case> sparse;
  AddSparse(backend, &sparse);
  std::erase_if(sparse, [](const Case& c) {
    return c.data == DataClass::kLatticeInt8 || c.data == DataClass::kNonFinite ||
           c.check == Check::kThreads;
  });
  cases->insert(cases->end(), sparse.begin(), sparse.end());
}

}  // namespace

std::vector<Case> SelectGpuProblems(std::string_view backend, std::span<const KernelDesc> rows,
                                    const SelectionSize& size) {
  std::vector<Case> cases;
  PlainCases plain(backend, &cases);
  AddEveryFormat(plain);
  AddEveryWeights(plain);
  AddSpecialShapes(plain);
  AddLongSums(plain);
  AddWideGated(plain);
  AddPeriodic(plain);
  AddChains(plain);
  AddPromises(plain);
  AddStreamed(plain);
  AddManySparseRows(plain);
  AddFewSparseRows(backend, &cases);
  SizeClasses sizes;
  sizes.backend = backend;
  sizes.m = {1,  2,  7,  8,  9,   15,  16,  17,  31,  32,  33, 63,
             64, 65, 66, 96, 127, 128, 129, 255, 256, 257, 300};
  sizes.n = {1,  2,  7,  8,   9,   15,  16,  17,  31,  32,  33,  63,  64,
             65, 72, 96, 127, 128, 129, 136, 200, 255, 256, 257, 300, 520};
  sizes.k = {1,   8,   15,  16,  17,  31,  32,  33,  48,  63,  64,  65,  80,  100,  112, 127,
             128, 129, 144, 192, 255, 256, 257, 272, 384, 389, 416, 520, 640, 1040, 2064};
  sizes.groups = {16, 32, 48, 64, 96, 112, 128, 256, 0};
  sizes.max_work = 8'000'000;
  sizes.max_lattice_k = std::numeric_limits<int64_t>::max();
  sizes.int8 = std::any_of(rows.begin(), rows.end(),
                           [](const KernelDesc& row) { return row.error.int8_block != 0; });
  CaseSource source(std::move(sizes), HashText("conformance of GPUs"));
  SelectByPairs(source, Check::kGemm, size.gemm, &cases);
  SelectByPairs(source, Check::kDequantize, size.dequantize, &cases);
  return cases;
}

std::vector<Case> LargeProblems(std::string_view backend) {
  std::vector<Case> cases;
  PlainCases plain(backend, &cases);
  const auto add = [&](Format format, const Shape& shape) {
    Case c = plain.Make(format, shape);
    c.check = Check::kPeriodic;
    c.a_type = c.c_type = DType::kBf16;
    c.allow_bf16_activations = false;
    plain.Add(c);
  };
  // More than 2^31 weights, outputs or activations.
  for (Format format : {Format::kFp4E2M1, Format::kS8, Format::kBf16}) {
    for (int64_t m : {1, 16, 130}) add(format, {m, 65'600, 32'768, 128});
  }
  add(Format::kFp4E2M1, {32'800, 65'600, 64, 32});
  add(Format::kFp4E2M1, {65'600, 64, 32'768, 128});
  return cases;
}

}  // namespace marlin::conformance
