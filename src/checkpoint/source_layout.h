// How a checkpoint stores its matrices.
#pragma once

#include <string_view>

#include "base/json.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/module_reader.h"
#include "marlin/checkpoint.h"
#include "marlin/status.h"

namespace marlin {

/// How the model type of a config.json stores a weight.
SourceLayout TypeLayoutOf(const Json& config, std::string_view name);

/// How a checkpoint stores a plain weight. Of stacked experts the shapes of both stacks of a layer
/// tell, whatever the type does: no sizes fit two layouts. Where the other stack is quantized, it
/// is as that one was; where it is missing, and for all other weights, as the type stores them.
/// Errors: kMalformedFile naming stacks that fit neither layout.
Result<SourceLayout> SourceLayoutOf(const Checkpoint::Impl& source, const TensorInfo& tensor);

}  // namespace marlin
