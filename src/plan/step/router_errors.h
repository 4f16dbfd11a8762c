// The errors of values that a router cannot route. Every device reports the same one: the choice
// bias first, then the first expert of the first token that has one.
#pragma once

#include <cstdint>

#include "marlin/status.h"

namespace marlin {

Status NanChoiceBias(int64_t expert);

/// `is_nan`: NaN; else +Inf.
Status BadLogit(bool is_nan, int64_t token, int64_t expert);

Status NoFiniteLogit(int64_t token, int64_t experts);

}  // namespace marlin
