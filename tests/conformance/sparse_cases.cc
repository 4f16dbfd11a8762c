#include "sparse_cases.h"

#include <initializer_list>

#include "layout/sparse_24.h"
#include "problem.h"

namespace marlin::conformance {
namespace {

struct Shape {
  int64_t m, n, k, group;
};

/// A case with the scale and activation types of its turn.
Case SparseCase(std::string_view backend, const FormatInfo& info, const Shape& shape,
                uint64_t seed) {
  constexpr ScaleType kScaleTypes[] = {ScaleType::kF16, ScaleType::kE8M0, ScaleType::kBf16,
                                       ScaleType::kE4M3, ScaleType::kF32};
  constexpr DType kTypes[] = {DType::kBf16, DType::kF16, DType::kF32};
  Case c;
  c.backend = backend;
  c.format = info.format;
  c.m = shape.m;
  c.n = shape.n;
  c.k = shape.k;
  c.group_size = shape.group;
  c.scale_type = kScaleTypes[seed % 5];
  c.a_type = kTypes[seed % 3];
  c.sparse = true;
  c.data = shape.k > kMaxDenseLatticeK ? DataClass::kGaussian : DataClass::kLattice;
  c.seed = seed;
  return c;
}

/// One more case, where it is possible: a codebook has the value 0 on lattice data alone.
void Add(Case c, std::vector<Case>* cases) {
  const bool codebook = GetFormatInfo(c.format).has_codebook;
  const bool has_zero = CodeOfZero(FormatValues(c.format)).has_value();
  c.user_codebook = codebook && IsLattice(c.data) && c.format != Format::kCodebook4;
  if (codebook && !c.user_codebook && !has_zero) return;
  cases->push_back(c);
}

/// Problems of GEMVs that multiply bf16 activations: every number of rows, all group sizes, several
/// passes of 1024 k.
void AddFewRows(std::string_view backend, const FormatInfo& info, std::vector<Case>* cases) {
  constexpr Shape kShapes[] = {{1, 33, 389, 16},  {2, 18, 2064, 256}, {3, 24, 389, 32},
                               {4, 17, 208, 128}, {5, 20, 2064, 16},  {6, 40, 176, 48},
                               {7, 16, 1100, 32}, {8, 40, 389, 128},  {1, 48, 1100, 128}};
  uint64_t seed = 60;
  for (const Shape& shape : kShapes) {
    Case c = SparseCase(backend, info, shape, seed++);
    c.a_type = DType::kBf16;
    Add(c, cases);
    c.data = shape.m % 2 == 0 ? DataClass::kNonFinite : DataClass::kGaussian;
    c.c_type = DType::kF32;
    c.bias = c.row_weight = shape.m == 4;
    Add(c, cases);
    if (shape.m != 3) continue;
    c.a_type = DType::kF32;
    c.allow_bf16_activations = true;
    Add(c, cases);
  }
}

}  // namespace

void AddSparse(std::string_view backend, std::vector<Case>* cases) {
  // Whole and partial chunks of 128 k, runs of 32 and blocks of 4; columns of partial tiles.
  constexpr Shape kShapes[] = {{1, 16, 128, 32},   {1, 33, 144, 16},  {1, 40, 389, 128},
                               {2, 136, 256, 64},  {4, 17, 48, 64},   {5, 72, 38, 16},
                               {9, 24, 1100, 32},  {17, 48, 272, 32}, {33, 31, 80, 16},
                               {64, 16, 128, 128}, {3, 16, 6, 16},    {1, 48, 2064, 128},
                               {70, 18, 160, 160}};
  uint64_t seed = 1;
  for (const FormatInfo& info : AllFormats()) {
    const bool eligible =
        info.zero_point != ZeroPoint::kRequired && CheckSparse24(info.format, false).ok();
    if (!eligible) continue;
    for (const Shape& shape : kShapes) {
      Case c = SparseCase(backend, info, shape, seed++);
      Add(c, cases);
      if (IsLattice(c.data)) {
        c.data = DataClass::kLatticeInt8;
        Add(c, cases);
        c.data = DataClass::kHeavy;
        if (seed % 4 == 0) Add(c, cases);
      }
    }
    if (info.bits == 4) AddFewRows(backend, info, cases);
    Case gated = SparseCase(backend, info, {3, 400, 48, 32}, seed++);
    gated.gated = gated.bias = info.bits == 4;
    gated.activation = Activation::kRelu;
    Add(gated, cases);
    Case experts = SparseCase(backend, info, {2, 40, 150, 64}, seed++);
    experts.experts = 3;
    experts.padded = true;
    Add(experts, cases);
    Case decoded = SparseCase(backend, info, {1, 40, 300, 48}, seed++);
    decoded.check = Check::kDequantize;
    decoded.a_type = DType::kF32;
    decoded.data = DataClass::kHeavy;
    Add(decoded, cases);
    if (info.bits != 4) continue;
    for (Check check : {Check::kBatchInvariant, Check::kThreads, Check::kRepeat}) {
      Case promise =
          SparseCase(backend, info, {check == Check::kThreads ? 19 : 64, 40, 208, 32}, seed++);
      promise.check = check;
      promise.data = check == Check::kRepeat ? DataClass::kNonFinite : DataClass::kGaussian;
      Add(promise, cases);
    }
  }
}

}  // namespace marlin::conformance
