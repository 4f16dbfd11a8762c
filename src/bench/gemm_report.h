// The report of GEMMs and dequantizations of a device whose memory is the host's.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "bench/gemm.h"
#include "bench/size_table.h"

namespace marlin::bench {

/// The keys of a case: {"format", "sparsity", ..., "m", "n", "k"}.
nlohmann::ordered_json CaseJson(const BenchCase& bench);

/// One row of "results".
nlohmann::ordered_json BenchJson(const BenchResult& result, const MachineCeilings& ceilings);

/// The same as a row of a table.
SizeRow BenchRow(const BenchResult& result, const MachineCeilings& ceilings);

/// "n=4096 k=4096".
std::string MatrixText(const GemmShape& shape);
/// "fp4_e2m1", "fp4_e2m1 2:4".
std::string WeightsText(const WeightsSpec& spec);

}  // namespace marlin::bench
