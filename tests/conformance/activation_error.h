// Errors of activation functions that are evaluated in fp32 on inexact arguments.
#pragma once

#include "marlin/decoder.h"

namespace marlin::conformance {

inline constexpr double kUnit32 = 0x1p-24;

/// The error of act(x + e) with |e| <= error.
double AfterActivation(Activation activation, double x, double error);

/// The error of the product of a gated activation whose gate and up are inexact, as GateOptions
/// defines it.
double AfterGate(const GateOptions& options, double gate, double gate_error, double up,
                 double up_error);

}  // namespace marlin::conformance
