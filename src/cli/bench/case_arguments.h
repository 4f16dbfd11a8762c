// Options of the commands of bench that multiply or expand random weights.
#pragma once

#include <string>
#include <vector>

#include "bench/gemm.h"
#include "cli/arguments/arguments.h"
#include "cli/arguments/product_arguments.h"

namespace marlin::cli {

/// The weights of a case, except their shape and their scales.
struct WeightKind {
  Format format = Format::kFp4E2M1;
  Sparsity sparsity = Sparsity::kDense;
};

/// --shape, --shapes, --format, --group-size, --scale-dtype, --activations, --copies and, where
/// declared, --sparsity.
class CaseArguments {
 public:
  /// `op` is the cases' operation, `shape_help` the meaning of M,N,K where it is other than a
  /// GEMM's.
  explicit CaseArguments(const char* op, const char* shape_help = "A GEMM; may be repeated")
      : op_(op), shape_help_(shape_help) {}

  void Declare(ArgumentList& arguments);
  void DeclareSparsity(ArgumentList& arguments);

  /// Reads everything, and checks that the operands of every case, with at least `weight_bytes` of
  /// weights, fit in memory. Errors: kInvalidArgument, kOutOfMemory, naming the option; kIo.
  Status Read(int64_t weight_bytes);

  bool chooses_sparsity() const { return !sparsities_.empty(); }
  /// Whether exactly one --shape is given, and no --shapes.
  bool has_one_shape() const { return shapes_.size() == 1 && shapes_file_.empty(); }
  /// Precondition of what follows: Read.
  const std::vector<bench::GemmShape>& shapes() const { return parsed_shapes_; }
  const std::vector<Format>& formats() const { return products_.formats(); }
  /// Formats by sparsities.
  const std::vector<WeightKind>& kinds() const { return kinds_; }
  /// A case whose weights have at least `weight_bytes`, unless --copies overrides it.
  bench::BenchCase MakeCase(const WeightKind& kind, const bench::GemmShape& shape,
                            int64_t weight_bytes) const;
  /// MakeCase of all kinds and shapes, the shapes of a kind together: they may share weights.
  std::vector<bench::BenchCase> AllCases(int64_t weight_bytes) const;

 private:
  Status ReadShapes();
  Status ReadShapesFile();
  Status ReadSparsities();

  const char* op_;
  const char* shape_help_;
  std::vector<std::string> shapes_;
  std::string shapes_file_;
  ProductArguments products_;
  std::vector<std::string> sparsities_;

  std::vector<bench::GemmShape> parsed_shapes_;
  std::vector<WeightKind> kinds_;
};

}  // namespace marlin::cli
