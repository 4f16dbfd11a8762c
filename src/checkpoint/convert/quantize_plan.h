// Plans the output of quantizing a checkpoint from headers alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/files/tensor_writer.h"
#include "checkpoint/module_tensors.h"
#include "marlin/checkpoint.h"

namespace marlin {

/// Source tensors that become one unit of output.
struct PlanUnit {
  enum class Action : uint8_t {
    kCopy,      ///< One tensor, byte for byte.
    kCast,      ///< One tensor, rounded to a 16-bit type.
    kQuantize,  ///< A matrix, a fused stack, or one matrix per expert.
  };
  Action action = Action::kCopy;
  std::vector<size_t> sources;  ///< Source tensors; for stacked experts in expert order.
  FormatChoice choice;          ///< For kCast and kQuantize.
  ModuleRecord record;          ///< For kQuantize.
  OutputUnit outputs;           ///< For kQuantize the tensors of ModuleTensors, in that order.
};

struct QuantizePlan {
  std::vector<PlanUnit> units;  ///< In the order of the source's files.
  int64_t parameters = 0;
  int64_t quantized_parameters = 0;
  int64_t quantized_bytes = 0;  ///< Codes, scales and zeros.
  int64_t bytes = 0;
  std::vector<SkippedTensor> skipped;
};

/// Experts of one projection are stacked when they are numbered 0, 1, ... without gaps, all are
/// quantized, and have the same shape and choice; otherwise each is stored under its own name.
/// Errors: kInvalidArgument for options that no matrix can have; kUnsupported, with `strict`, for a
/// matrix that the recipe quantizes but that cannot be quantized.
Result<QuantizePlan> PlanQuantize(const Checkpoint::Impl& source,
                                  const QuantizeCheckpointOptions& options);

/// The options with which a plan's choice quantizes a matrix; for methods that need data, of
/// which the caller has none, kMse's.
QuantizeOptions OptionsFor(const FormatChoice& choice, QuantizeMethod method,
                           const std::string& tensor_name);

}  // namespace marlin
