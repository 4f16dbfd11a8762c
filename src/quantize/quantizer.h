// Quantization on a given thread pool.
#pragma once

#include <span>
#include <string>

#include "base/thread_pool.h"
#include "layout/weights_buffer.h"
#include "marlin/quantize.h"
#include "quantize/scales.h"

namespace marlin {

/// As Quantize, but on `pool`.
Result<QuantizedWeights> QuantizeOn(ThreadPool& pool, const TensorView& dense,
                                    const QuantizeOptions& options, QuantizeReport* report);

/// The same with kMse's errors weighted: importance [k], finite and at least 0, the mean square of
/// each input. Empty, or in groups where it is 0 throughout: all errors weigh the same. With 2:4 it
/// also decides which weights are kept, as in Prune24.
Result<QuantizedWeights> QuantizeWeightedOn(ThreadPool& pool, const TensorView& dense,
                                            const QuantizeOptions& options,
                                            std::span<const float> importance,
                                            QuantizeReport* report);

/// How messages call a tensor: "tensor '<name>'", or "tensor" without a name.
std::string TensorLabel(const std::string& tensor_name);

/// Checks rank, element type, sizes and data of a dense matrix [k, n] or [experts, k, n].
/// Errors: kInvalidArgument beginning with `name`.
Status CheckDense(const std::string& name, const TensorView& dense);

/// Converts a dense matrix to the unquantized formats bf16 and fp16, rounding each element once.
/// Errors: kNonFiniteInput, kUnsupported for a value beyond fp16's range, kOutOfMemory.
Result<QuantizedWeights> CopyUnquantized(ThreadPool& pool, const TensorView& dense,
                                         const WeightsSpec& spec, const std::string& tensor_name);

/// The error for weights that are NaN or Inf, at [k, n] of an expert.
Status NonFiniteWeight(const std::string& tensor_name, float value, const WeightsSpec& spec,
                       int64_t expert, int64_t k, int64_t n);

/// The error for the first NaN or Inf among weights w [count] from k on.
Status FirstNonFinite(const std::string& tensor_name, const float* w, int64_t count,
                      const WeightsSpec& spec, int64_t expert, int64_t k, int64_t n);

/// The error for a scale beyond the range of its type, of the group at [k, n].
Status ScaleOverflow(const std::string& tensor_name, const WeightsSpec& spec, double scale,
                     int64_t expert, int64_t k, int64_t n);

/// Stores a group's scale and zero point at an index of the buffer's scales.
void StoreParameters(const GroupParameters& parameters, int64_t index, WeightsBuffer* buffer);

/// Runs body on a pool of up to all available processors, scaled to `weight_count`, and turns
/// exceptions of threads and allocations into a Status.
Status RunOnAllThreads(int64_t weight_count, FunctionRef<Status(ThreadPool&)> body);

}  // namespace marlin
