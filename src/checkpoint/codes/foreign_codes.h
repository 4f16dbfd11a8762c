// Shared parts of the writers of other formats: codes as unsigned integers, exact conversions of
// scales and zeros, and errors for weights that a format cannot hold.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

namespace marlin {

/// kUnsupported: a format cannot hold `what`, which no recipe changes.
Status CannotHold(std::string_view format, std::string_view what);
/// The same for codes and scales, with a recipe that fits every format.
Status WouldLose(std::string_view format, std::string_view what);

/// How the codes of an integer format become unsigned: u = code ^ flip, value = u - offset.
struct UnsignedCodes {
  int bits = 0;  ///< 0: the format's values are not integers.
  uint8_t flip = 0;
  int offset = 0;
};
/// Codebook formats count as integers with offset 0; CheckCountingCodebook tells whether they are.
UnsignedCodes UnsignedCodesOf(Format format);
/// For formats of scaled integers: kUnsupported for other codes, additive biases and 8-bit scales.
Status CheckScaledIntegers(std::string_view format, const WeightsSpec& spec);
/// kUnsupported for a last group that is smaller than the others.
Status CheckWholeGroups(std::string_view format, const WeightsSpec& spec);
/// Whether the codebook of weights, if their format has one, is 0, 1, 2, ...
Status CheckCountingCodebook(std::string_view format, const QuantizedWeights& matrix);

/// Calls use(first column, count, codes, stride) for runs of columns; column c of a run is k
/// contiguous bytes at codes + c * stride, each code XORed with `flip`, with zeros up to `stride`.
using UseColumns = std::function<Status(int64_t, int64_t, const uint8_t*, int64_t)>;
Status ForEachColumns(const QuantizedWeights& matrix, uint8_t flip, const UseColumns& use);

/// [n, groups] from [1, groups, n], in `dtype` (f16, bf16 or f32, or the view's own 8-bit type).
/// Errors: kUnsupported for a number that `dtype` does not hold.
Result<std::vector<std::byte>> TransposedParameters(std::string_view format, std::string_view what,
                                                    const TensorView& view, DType dtype);
/// The same without transposing.
Result<std::vector<std::byte>> ConvertedParameters(std::string_view format, std::string_view what,
                                                   const TensorView& view, DType dtype);

/// The zero of every group as an unsigned code, [groups, n]; without zeros, the code of value 0.
/// Errors: kUnsupported for a zero that is no unsigned code.
Result<std::vector<uint8_t>> UnsignedZeros(std::string_view format, const QuantizedWeights& matrix);

/// The bias of every group, [groups, n], of weights as scale * u + bias with unsigned codes u.
/// Errors: kUnsupported for a bias that fp32 does not hold.
Result<std::vector<float>> AdditiveBiases(std::string_view format, const QuantizedWeights& matrix);

/// The inverse of the global scale, which divides e4m3 scales if that multiplies and the reverse.
/// Errors: kUnsupported if one of the scales becomes another number.
Result<float> InverseGlobalScale(std::string_view format, const QuantizedWeights& matrix);

/// Packs `count` codes of `bits` bits, lowest first, into words of 32 bits that start over after
/// `per_run` codes.
std::vector<uint32_t> PackRuns(const std::vector<uint8_t>& codes, int64_t per_run, int bits);

}  // namespace marlin
