// Control-flow macros for Status and Result.
#pragma once

#include "marlin/status.h"

#define MARLIN_CONCAT_INNER(a, b) a##b
#define MARLIN_CONCAT(a, b) MARLIN_CONCAT_INNER(a, b)

/// Returns the Status of `expr` from the enclosing function unless it is ok.
#define MARLIN_RETURN_IF_ERROR(expr)                 \
  do {                                               \
    ::marlin::Status marlin_status_ = (expr);        \
    if (!marlin_status_.ok()) return marlin_status_; \
  } while (false)

/// Evaluates `expr` to a Result, returns its error, or assigns its value to `lhs`.
#define MARLIN_ASSIGN_OR_RETURN(lhs, expr) \
  MARLIN_ASSIGN_OR_RETURN_IMPL(MARLIN_CONCAT(marlin_result_, __LINE__), lhs, expr)
#define MARLIN_ASSIGN_OR_RETURN_IMPL(result, lhs, expr) \
  auto result = (expr);                                 \
  if (!result.ok()) return result.status();             \
  lhs = std::move(*result)
