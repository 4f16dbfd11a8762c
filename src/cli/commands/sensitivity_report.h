// Sensitivities for people: a table, and a picture.
#pragma once

#include <string>

#include "marlin/sensitivity.h"

namespace marlin::cli {

/// A row for each layer and class of its matrices: what they cost in each format, summed, and a bar
/// for the first format.
std::string SensitivityTable(const Sensitivity& sensitivity);

/// An SVG document: a map for each format, layers down, projections across, the colour by the
/// logarithm of the cost per weight.
std::string SensitivityPlot(const Sensitivity& sensitivity);

}  // namespace marlin::cli
