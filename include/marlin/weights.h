// Quantized weight matrices in the canonical (k-packed) layout, and in a device's layout.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/format.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

#pragma GCC visibility push(default)
namespace marlin {

class Device;

/// The layout of packed words. No function takes words without their layout.
enum class PackedLayout : uint8_t {
  kKPacked,   ///< Canonical: a word packs consecutive k of one column; [WordsAlongK, n], C order.
  kMarlinW4,  ///< 4-bit tiles [K/32][N/32][32 lanes][4 words], see docs/formats/marlin_w4.md.
};

/// "k_packed", "marlin_w4".
std::string_view PackedLayoutName(PackedLayout layout);
/// Finds a layout by name. Errors: kInvalidArgument listing the known names.
Result<PackedLayout> ParsePackedLayout(std::string_view name);

/// Which weights of a matrix are stored.
enum class Sparsity : uint8_t {
  kDense,  ///< All.
  /// 2:4: two of every four along k; the others are exactly 0. 4-bit and 8-bit formats without
  /// zeros and biases.
  k24,
};

/// "dense", "2:4".
std::string_view SparsityName(Sparsity sparsity);
/// Finds a sparsity by name. Errors: kInvalidArgument listing the known names.
Result<Sparsity> ParseSparsity(std::string_view name);

/// The description of a quantized matrix W [k, n], or a stack of them, without its data.
struct WeightsSpec {
  Format format = Format::kFp4E2M1;
  int64_t experts = 1;     ///< Number of stacked matrices; 1 for a plain matrix.
  int64_t k = 0;           ///< Input features: the reduction dimension.
  int64_t n = 0;           ///< Output features.
  int64_t group_size = 0;  ///< Consecutive k that share a scale; >= 1; the last group may be short.
  ScaleType scale_type = ScaleType::kF16;
  /// Two levels of scales: consecutive k that share a super scale, a multiple of group_size; 0: one
  /// level. scale_type (kF16, kBf16 or kF32) is then the type of the super scales, and
  ///   scale = super scale * scales[group], rounded to fp32, bias = super bias * biases[group].
  int64_t super_group_size = 0;
  bool has_zeros = false;                 ///< weight = scale * (value - zero)
  ScaleType zero_type = ScaleType::kF16;  ///< kF16, kBf16 or kF32; kF16 without zeros.
  bool has_biases = false;                ///< weight = scale * value + bias
  bool has_global_scale = false;          ///< scale = stored scale * global_scale[expert]
  /// scale = stored scale / global_scale[expert], rounded to fp32, instead of the product.
  bool global_scale_divides = false;
  Sparsity sparsity = Sparsity::kDense;
  /// Row i of the stored matrix, and of its groups, is row permutation[i] of W. Dense quantized
  /// formats.
  bool has_permutation = false;
  /// W = diag(input_scale) * H * stored matrix, so that A * W is (A * diag(input_scale) * H) *
  /// stored matrix. Quantized formats.
  bool has_input_scale = false;
  /// The size of the blocks of H, which is block diagonal: Hadamard matrices in Sylvester's order
  /// over sqrt(size), which are their own inverse. A power of two from 2 to 32768 that divides k;
  /// 0: H is the identity. Not with a permutation.
  int64_t input_hadamard = 0;

  friend bool operator==(const WeightsSpec&, const WeightsSpec&) = default;
};

/// Whether products with such weights permute, scale or rotate the columns of A first.
bool TransformsInput(const WeightsSpec& spec);

/// Number of groups along K: ceil(k / group_size), 1 if group_size is not positive; 0 if k is 0.
int64_t GroupCount(const WeightsSpec& spec);
/// Number of super scales along K: ceil(k / super_group_size); 0 with one level of scales.
int64_t SuperGroupCount(const WeightsSpec& spec);

/// uint32 words of one column: ceil(k * bits / 32), for 3, 5 and 6 bits bits * ceil(k / 32).
int64_t WordsAlongK(Format format, int64_t k);
/// uint32 words of one column of `codes`: with 2:4 the words of the kept codes of k rounded up to a
/// multiple of 32, ceil(k / 32) * bits / 2.
int64_t WordsAlongK(const WeightsSpec& spec);
/// uint32 words of one column of 2:4 metadata: ceil(k / 32).
int64_t MetadataWordsAlongK(int64_t k);

/// Bytes of codes, metadata, scales, super scales, zeros, biases, global scale, permutation,
/// input scale and codebook of all experts; INT64_MAX for negative sizes and on overflow.
int64_t StoredBytes(const WeightsSpec& spec);

/// 8 * StoredBytes / number of weights; 0 for an empty matrix.
double BitsPerWeight(const WeightsSpec& spec);

/// A quantized matrix, or a stack of expert matrices, in the canonical layout and host memory. The
/// views are contiguous and 4-byte aligned; `owner` keeps them alive, so copies are cheap and share
/// data.
struct QuantizedWeights {
  WeightsSpec spec;
  TensorView codes;  ///< u32 [experts, WordsAlongK, n]; unquantized: [experts, k, n].
  /// ScaleDType [experts, groups, n], i8 with two levels; empty for unquantized formats.
  TensorView scales;
  TensorView zeros;  ///< zero_type [experts, groups, n] when spec.has_zeros.
  /// Same type and shape as scales when spec.has_biases (f16 for E8M0 and E4M3 scales).
  TensorView biases;
  TensorView super_scales;  ///< ScaleDType [experts, super groups, n] with two levels of scales.
  TensorView super_biases;  ///< The same of the biases, with two levels and spec.has_biases.
  TensorView global_scale;  ///< f32 [experts] when spec.has_global_scale.
  /// u32 [experts, MetadataWordsAlongK, n] for 2:4: 8 nibbles a word, low first, one per block of
  /// four along k; nibble = pos1 << 2 | pos0, the positions of the two codes that are kept.
  TensorView metadata;
  /// i32 [experts, k] when spec.has_permutation: which k of W each stored row is, every k once.
  TensorView permutation;
  TensorView input_scale;  ///< f32 [experts, k], finite, when spec.has_input_scale, in W's order.
  std::vector<float> codebook;  ///< [2^bits] for codebook formats; empty: the built-in table.
  std::shared_ptr<const void> owner;
};

/// Checks that the views have the types and shapes of the spec, that scales, zeros, biases,
/// input scales and codebook are finite, and products of two levels of them, that a global scale
/// which divides leaves scales finite, and that no code decodes to NaN or infinity; for 2:4 also
/// that every nibble of the metadata is one of 4, 8, 9, 12, 13 and 14, and that a code has the
/// value 0; that a permutation names every k once. Errors: kInvalidArgument with both shapes,
/// kMalformedFile with the position of non-finite content, of an invalid nibble or of a k that is
/// out of range or repeated.
Status Validate(const QuantizedWeights& weights);

/// The element type of an unquantized format: bf16, f16 or f32.
/// Precondition: !GetFormatInfo(format).quantized.
DType UnquantizedDType(Format format);

/// The element type of biases for a scale type: the scale's own, f16 for the 8-bit ones.
DType BiasDType(ScaleType type);

/// Weights in the layout of one device's kernels, made by Prepare. Immutable; copies share the data
/// and keep the device open; thread-safe. Default-constructed or moved-from weights are empty:
/// their spec is empty, and every operation on them returns kInvalidArgument.
class PreparedWeights {
 public:
  struct Storage;
  PreparedWeights() = default;

  /// False for empty weights.
  bool valid() const { return storage_ != nullptr; }
  const WeightsSpec& spec() const;
  /// Bytes held on the device.
  int64_t bytes() const;

 private:
  friend struct Internals;
  explicit PreparedWeights(std::shared_ptr<const Storage> storage) : storage_(std::move(storage)) {}
  std::shared_ptr<const Storage> storage_;
};

/// Options of Prepare.
struct PrepareOptions {
  /// Keeps 4-bit codes in PackedLayout::kMarlinW4 instead of the device's preferred layout, for the
  /// kernel that reads that layout directly, "marlin_gemm_w4" (CUDA).
  bool marlin_w4 = false;
};

/// Converts weights to the layout of a device's kernels, once, at load. The source may be freed
/// afterwards. Their prepared spec differs where a device's kernels cannot read them as they are:
/// 2:4 weights become dense, codes of 5 and 6 bits become codes of 8 bits, and two levels of scales
/// become fp32 scales, all of the same values. Errors: as Validate, kUnsupported,
/// kOutOfMemory.
Result<PreparedWeights> Prepare(const QuantizedWeights& weights, const Device& device,
                                const PrepareOptions& options = {});

}  // namespace marlin
#pragma GCC visibility pop
