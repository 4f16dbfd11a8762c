// config.json as mlx_lm's models read it.
#pragma once

#include "base/json.h"
#include "marlin/status.h"

namespace marlin {

/// Gives the values of a config.json the names and forms that mlx_lm knows: its models read RoPE
/// parameters at the top level, one name for the number of experts, and have other defaults. What
/// transformers reads stays. Errors: kUnsupported naming a key whose value mlx_lm's model of the
/// type ignores or replaces.
Status TakeMlxNames(Json* config);

}  // namespace marlin
