// Quantized weight matrices in the canonical layout, and their device-specific form.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "marlin/format.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

#pragma GCC visibility push(default)
namespace marlin {

class Device;

/// How packed words are arranged. The layout travels with the words: nothing takes words alone.
enum class PackedLayout : uint8_t {
  kKPacked,   ///< Canonical: codes run along K inside a word, words of one K slice along N.
  kMarlinW4,  ///< 4-bit tiles [K/32][N/32][32 lanes][4 words], see docs/formats/marlin_w4.md.
};

/// What a quantized matrix W [k, n] (or experts of them) is, without its data.
struct WeightsSpec {
  Format format = Format::kFp4E2M1;
  int64_t experts = 1;     ///< Matrices stacked in front; 1 for a plain matrix.
  int64_t k = 0;           ///< Input features: the dimension that is summed over.
  int64_t n = 0;           ///< Output features.
  int64_t group_size = 0;  ///< Consecutive k that share a scale; >= 1; the last group may be short.
  ScaleType scale_type = ScaleType::kF16;
  bool has_zeros = false;         ///< weight = scale * (value - zero)
  bool has_biases = false;        ///< weight = scale * value + bias
  bool has_global_scale = false;  ///< scale = stored scale * global_scale[expert]

  friend bool operator==(const WeightsSpec&, const WeightsSpec&) = default;
};

/// Number of groups along K: ceil(k / group_size), 1 when group_size is not positive; 0 when k is
/// 0.
int64_t GroupCount(const WeightsSpec& spec);

/// uint32 words along K of one column: ceil(k * bits / 32), for 3 bits 3 * ceil(k / 32).
int64_t WordsAlongK(Format format, int64_t k);

/// Bytes of codes, scales, zeros, biases, global scale and codebook of all experts; INT64_MAX for
/// sizes that are negative or too large to count.
int64_t StoredBytes(const WeightsSpec& spec);

/// Stored bits per weight, scales and the rest included.
double BitsPerWeight(const WeightsSpec& spec);

/// A quantized matrix (or a stack of expert matrices) in the canonical layout. The views are
/// contiguous and 4-byte aligned; `owner` keeps them alive, so copies are cheap and share data.
struct QuantizedWeights {
  WeightsSpec spec;
  TensorView codes;         ///< u32 [experts, WordsAlongK, n]; UnquantizedDType [experts, k, n].
  TensorView scales;        ///< ScaleDType [experts, groups, n]; empty for unquantized formats.
  TensorView zeros;         ///< f16 [experts, groups, n] when spec.has_zeros.
  TensorView biases;        ///< Same type and shape as scales when spec.has_biases (f16 for 8-bit).
  TensorView global_scale;  ///< f32 [experts] when spec.has_global_scale.
  std::vector<float> codebook;  ///< [2^bits] for codebook formats; empty means the built-in one.
  std::shared_ptr<const void> owner;
};

/// Checks that the views have the types and shapes that the spec asks for, that scales, zeros,
/// biases and codebook are finite and that no code means NaN. Errors: kInvalidArgument with both
/// shapes, kMalformedFile for non-finite content with its position.
Status Validate(const QuantizedWeights& weights);

/// The element type that an unquantized format is stored in: bf16, f16 or f32.
/// Precondition: !GetFormatInfo(format).quantized.
DType UnquantizedDType(Format format);

/// The element type of biases for a scale type: the scale's own, f16 for the 8-bit ones.
DType BiasDType(ScaleType type);

/// What Prepare makes: the weights in the layout that one device's kernels read. Immutable; copies
/// share the data and keep the device open; thread-safe. One that was made by its default
/// constructor or moved from holds nothing: its spec is empty, and every operation answers with
/// kInvalidArgument.
class PreparedWeights {
 public:
  struct Storage;
  PreparedWeights() = default;
  explicit PreparedWeights(std::shared_ptr<const Storage> storage) : storage_(std::move(storage)) {}

  const WeightsSpec& spec() const;
  /// Bytes held on the device.
  int64_t bytes() const;
  const Storage* storage() const { return storage_.get(); }

 private:
  std::shared_ptr<const Storage> storage_;
};

struct PrepareOptions {
  /// Keeps 4-bit codes on the device as PackedLayout::kMarlinW4, in place of the layout that its
  /// kernels like best: for the kernel that reads them as they lie, "marlin_gemm_w4" (CUDA).
  bool marlin_w4 = false;
};

/// Rearranges weights for a device, once, at load. The source may be freed afterwards.
/// Errors: those of Validate, kUnsupported, kOutOfMemory.
Result<PreparedWeights> Prepare(const QuantizedWeights& weights, const Device& device,
                                const PrepareOptions& options = {});

}  // namespace marlin
#pragma GCC visibility pop
