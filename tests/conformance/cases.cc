#include "cases.h"

#include <algorithm>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>

#include "block_cases.h"
#include "case_source.h"
#include "problem.h"
#include "random.h"
#include "sparse_cases.h"

namespace marlin::conformance {
namespace {

// Shape classes of one dimension: sizes around every tile size in the kernel table.
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

// The systematic part: every format on every plain shape class, on lattice data.
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

// Zero sizes, m and k beyond one MC and KC block of any kernel, and the n = 73,448 of a real
// vocabulary, which once overflowed a 16-bit column count in another project.
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
      c.data = shape.k > kMaxDenseLatticeK ? DataClass::kGaussian : DataClass::kLattice;
      c.user_codebook = info.has_codebook && IsLattice(c.data);
      c.bias = seed % 2 == 0;
      c.seed = seed++;
      cases->push_back(c);
    }
  }
}

// GLU GEMMs whose tasks cover more columns than one epilogue block.
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

// GLU GEMMs of whole n-tiles, which Metal's kernels finish without a second launch: from one n-tile
// to several threadgroup tiles, partial ones included.
void AddPairedGated(std::vector<Case>* cases) {
  constexpr Activation kActivations[] = {Activation::kSilu, Activation::kNone, Activation::kRelu,
                                         Activation::kGeluTanh};
  uint64_t seed = 1;
  for (Format format : {Format::kFp4E2M1, Format::kU4, Format::kInt3, Format::kBf16}) {
    for (int64_t m : {1, 9, 40, 70}) {
      for (int64_t n : {16, 80, 272}) {
        Case c;
        c.format = format;
        c.m = m;
        c.n = n;
        c.k = 304;
        c.group_size = GetFormatInfo(format).quantized ? 32 : c.k;
        c.zero = format == Format::kU4 ? ZeroKind::kInteger : ZeroKind::kNone;
        c.gated = true;
        c.bias = seed % 3 == 0;
        c.row_weight = seed % 5 == 0;
        c.activation = kActivations[seed % 4];
        c.seed = seed++;
        cases->push_back(c);
        if (m != 40) continue;
        c.check = Check::kBatchInvariant;
        c.c_type = DType::kF32;
        c.data = DataClass::kGaussian;
        cases->push_back(c);
      }
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

std::vector<Case> SelectCpuProblems(std::span<const KernelDesc> rows, const SelectionSize& size) {
  std::vector<Case> cases;
  AddEveryFormat(&cases);
  AddSpecialShapes(&cases);
  AddWideGated(&cases);
  AddBlockEdges(&cases);
  AddPromises(&cases);
  AddSparse("cpu", &cases);
  SizeClasses sizes;
  sizes.backend = "cpu";
  sizes.m = AroundTiles(rows, &KernelDesc::tile_m, {3, 4, 5, 7, 17});
  sizes.n = AroundTiles(rows, &KernelDesc::tile_n, {5, 16, 17, 33, 64, 72, 136});
  sizes.k = AroundTiles(rows, &KernelDesc::tile_k,
                        {16, 31, 32, 33, 48, 80, 112, 128, 144, 240, 256, 288, 389});
  sizes.groups = {16, 32, 64, 128, 16, 32, 64, 128, 48, 256, 0, 0};
  sizes.max_work = 600'000;
  sizes.max_lattice_k = kMaxDenseLatticeK;
  sizes.int8 = true;
  CaseSource source(std::move(sizes), HashText("conformance"));
  SelectByPairs(source, Check::kGemm, size.gemm, &cases);
  SelectByPairs(source, Check::kDequantize, size.dequantize, &cases);
  return cases;
}

// The simulator is thousands of times slower than a GPU, so Metal gets the CPU's systematic cases,
// without those that only apply to the CPU, and sizes around the tiles.
std::vector<Case> SelectMetalProblems(std::span<const KernelDesc> rows, const SelectionSize& size) {
  std::vector<Case> cases;
  AddEveryFormat(&cases);
  AddSpecialShapes(&cases);
  AddWideGated(&cases);
  AddPairedGated(&cases);
  AddPromises(&cases);
  AddSparse("metal", &cases);
  std::erase_if(cases, [](const Case& c) {
    return c.data == DataClass::kLatticeInt8 || c.check == Check::kThreads || c.n * c.m > 80'000;
  });
  for (Case& c : cases) c.backend = "metal";
  SizeClasses sizes;
  sizes.backend = "metal";
  sizes.m = AroundTiles(rows, &KernelDesc::tile_m, {3, 5, 9, 17, 40, 70, 130});
  sizes.n = AroundTiles(rows, &KernelDesc::tile_n, {5, 16, 24, 33, 72, 130, 136});
  sizes.k = AroundTiles(rows, &KernelDesc::tile_k, {16, 48, 80, 112, 144, 256, 288, 389, 640});
  sizes.groups = {16, 32, 64, 128, 16, 32, 64, 128, 48, 256, 0, 0};
  sizes.max_work = 400'000;
  sizes.max_lattice_k = kMaxDenseLatticeK;
  CaseSource source(std::move(sizes), HashText("metal"));
  SelectByPairs(source, Check::kGemm, size.gemm, &cases);
  SelectByPairs(source, Check::kDequantize, size.dequantize, &cases);
  return cases;
}

}  // namespace

std::vector<Case> SelectProblems(std::string_view backend, std::span<const KernelDesc> rows,
                                 const SelectionSize& size) {
  std::vector<Case> cases = backend == "cpu"     ? SelectCpuProblems(rows, size)
                            : backend == "metal" ? SelectMetalProblems(rows, size)
                                                 : SelectGpuProblems(backend, rows, size);
  // Removes duplicate names, which are drawn occasionally.
  std::unordered_set<std::string> names;
  std::erase_if(cases, [&](const Case& c) { return !names.insert(ProblemName(c)).second; });
  return cases;
}

}  // namespace marlin::conformance
