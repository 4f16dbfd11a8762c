#include "marlin/weights.h"

#include "base/checked.h"
#include "base/find_named.h"
#include "layout/weights_shapes.h"

namespace marlin {

int64_t GroupCount(const WeightsSpec& spec) {
  if (spec.k <= 0 || !GetFormatInfo(spec.format).quantized) return 0;
  return spec.group_size < 1 ? 1 : CeilDivide(spec.k, spec.group_size);
}

int64_t SuperGroupCount(const WeightsSpec& spec) {
  if (spec.k <= 0 || spec.super_group_size < 1) return 0;
  return CeilDivide(spec.k, spec.super_group_size);
}

int64_t WordsAlongK(Format format, int64_t k) {
  const int bits = GetFormatInfo(format).bits;
  // 32 codes fill `bits` words; widths that divide 32 end at the last word used, not after 32
  // codes.
  return 32 % bits == 0 ? CeilDivide(k, 32 / bits) : bits * CeilDivide(k, 32);
}

int64_t WordsAlongK(const WeightsSpec& spec) {
  if (spec.sparsity == Sparsity::kDense) return WordsAlongK(spec.format, spec.k);
  return MetadataWordsAlongK(spec.k) * (GetFormatInfo(spec.format).bits / 2);
}

int64_t MetadataWordsAlongK(int64_t k) { return CeilDivide(k, 32); }

std::string_view PackedLayoutName(PackedLayout layout) {
  return layout == PackedLayout::kMarlinW4 ? "marlin_w4" : "k_packed";
}

Result<PackedLayout> ParsePackedLayout(std::string_view name) {
  constexpr PackedLayout kAll[] = {PackedLayout::kKPacked, PackedLayout::kMarlinW4};
  return FindNamed("layout", "name", name, kAll, PackedLayoutName);
}

std::string_view SparsityName(Sparsity sparsity) {
  return sparsity == Sparsity::k24 ? "2:4" : "dense";
}

Result<Sparsity> ParseSparsity(std::string_view name) {
  constexpr Sparsity kAll[] = {Sparsity::kDense, Sparsity::k24};
  return FindNamed("sparsity", "name", name, kAll, SparsityName);
}

DType UnquantizedDType(Format format) {
  switch (format) {
    case Format::kBf16:
      return DType::kBf16;
    case Format::kFp16:
      return DType::kF16;
    default:
      return DType::kF32;
  }
}

DType BiasDType(ScaleType type) {
  const DType dtype = ScaleDType(type);
  return DTypeBytes(dtype) == 1 ? DType::kF16 : dtype;
}

bool TransformsInput(const WeightsSpec& spec) {
  return spec.has_permutation || spec.has_input_scale || spec.input_hadamard > 0;
}

int64_t StoredBytes(const WeightsSpec& spec) {
  const FormatInfo& info = GetFormatInfo(spec.format);
  const Checked experts(spec.experts);
  const Checked k(spec.k);
  const Checked n(spec.n);
  if (!info.quantized) return (experts * k * n * Checked(info.bits / 8)).Take().value_or(INT64_MAX);
  if (!k.valid()) return INT64_MAX;
  const int64_t per_group = DTypeBytes(StoredScaleDType(spec)) +
                            (spec.has_zeros ? DTypeBytes(ScaleDType(spec.zero_type)) : 0) +
                            (spec.has_biases ? DTypeBytes(StoredBiasDType(spec)) : 0);
  const int64_t per_super_group =
      DTypeBytes(ScaleDType(spec.scale_type)) * (spec.has_biases ? 2 : 1);
  const int64_t metadata = spec.sparsity == Sparsity::k24 ? MetadataWordsAlongK(spec.k) : 0;
  const Checked codes = Checked(4) * (Checked(WordsAlongK(spec)) + Checked(metadata)) * n;
  const Checked groups = (Checked(GroupCount(spec)) * Checked(per_group) +
                          Checked(SuperGroupCount(spec)) * Checked(per_super_group)) *
                         n;
  const Checked rows = Checked((spec.has_permutation ? 4 : 0) + (spec.has_input_scale ? 4 : 0)) * k;
  const Checked matrix = codes + groups + rows + Checked(spec.has_global_scale ? 4 : 0);
  const Checked codebook(info.has_codebook ? (int64_t{4} << info.bits) : 0);
  return (experts * matrix + codebook).Take().value_or(INT64_MAX);
}

double BitsPerWeight(const WeightsSpec& spec) {
  const double count =
      static_cast<double>(spec.experts) * static_cast<double>(spec.k) * static_cast<double>(spec.n);
  return count == 0 ? 0.0 : 8.0 * static_cast<double>(StoredBytes(spec)) / count;
}

}  // namespace marlin
