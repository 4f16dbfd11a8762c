// The options that select GEMMs to measure, shared by bench and tune.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/gemm.h"
#include "cli/arguments/arguments.h"
#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin::cli {

/// "a,b" -> "a", "b"; always at least one part, which may be empty.
std::vector<std::string> SplitList(const std::string& list);

/// "M,N,K". Errors: kInvalidArgument.
Result<bench::GemmShape> ParseShape(const std::string& text);

/// Checks the bytes of a case's operands: the weights and their prepared form, activations and
/// outputs. Errors: kInvalidArgument for a shape whose sizes overflow, kOutOfMemory when they
/// exceed this machine's memory; both name the shape and both numbers.
Status CheckCaseFits(const bench::BenchCase& bench);

/// --format, --group-size, --scale-dtype, --activations, --copies.
class ProductArguments {
 public:
  void Declare(ArgumentList& arguments);
  /// Errors: kInvalidArgument naming the option.
  Status Read();

  const std::vector<Format>& formats() const { return parsed_formats_; }
  /// One GEMM whose weights have at least `weight_bytes`, unless --copies overrides it.
  /// Precondition: Read.
  bench::BenchCase MakeCase(Format format, const bench::GemmShape& shape,
                            int64_t weight_bytes) const;

 private:
  std::vector<std::string> formats_;
  std::optional<int64_t> group_size_;
  std::string scale_type_ = "fp16";
  std::string activation_type_ = "bf16";
  std::optional<int64_t> copies_;

  std::vector<Format> parsed_formats_;
  WeightsSpec spec_;
};

}  // namespace marlin::cli
