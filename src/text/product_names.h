// The names of a product's options, for the command and the Python package.
#pragma once

#include <span>
#include <string_view>

#include "marlin/gemm.h"
#include "marlin/status.h"

namespace marlin {

/// All activations, kNone first.
std::span<const Activation> AllActivations();
/// "none", "silu", "gelu_tanh", "relu"; "unknown" for an invalid enumerator.
std::string_view ActivationName(Activation activation);
/// Errors: kInvalidArgument listing the known names.
Result<Activation> ParseActivation(std::string_view name);

/// Finds an accuracy by name: "default", "exact" or "w4a8". Errors: kInvalidArgument listing the
/// known names.
Result<Accuracy> ParseAccuracy(std::string_view name);

}  // namespace marlin
