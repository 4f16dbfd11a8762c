// A GEMM on poisoned, guarded device memory, and its results.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device_image.h"
#include "marlin/gemm.h"
#include "periodic.h"
#include "problem.h"

namespace marlin::conformance {

/// One GEMM: its operands, output and guards in device memory.
class ProductRun {
 public:
  /// Plans the GEMM for a selection of the rows of the problem's A, gathered contiguously, with a
  /// workspace of exactly the planned size. The weights may have more columns than the problem.
  /// Errors: those of PlanGemm and DeviceBuffer.
  static Result<ProductRun> Make(const Device& device, const PreparedWeights& prepared,
                                 const Problem& problem, GemmOptions options,
                                 const std::vector<int64_t>& rows);

  /// Calls Gemm or, for one row and some seeds, Gemv. Complete when Collect returns. Errors:
  /// theirs.
  Status Launch() const;
  /// Waits for the stream and downloads the results. Errors: those of the asynchronous work.
  Status Collect();
  /// Poisons output and workspace for another Launch.
  Status Reset();
  /// Makes `other`'s output the A of this GEMM; it must have the type and the columns of A.
  void ReadFrom(const ProductRun& other);
  /// Enables PDL: the kernel may start before the previous work on the stream completes.
  void OverlapPrevious() { options_.overlap_previous = true; }

  double Output(int64_t m, int64_t n) const;
  /// The stored bits of an output element.
  uint32_t Bits(int64_t m, int64_t n) const;
  /// All outputs as a periodic matrix with a period of `rows` and `columns`.
  PeriodicOutput Repeated(int64_t rows, int64_t columns) const;
  /// A hash of all outputs.
  uint64_t Hash() const;
  /// Returns empty, or a message about memory that was written and must not be.
  std::string Damage() const;
  const std::string& kernel() const { return kernel_; }

 private:
  ProductRun(const Device& device, const PreparedWeights& prepared, GemmOptions options)
      : device_(device), prepared_(prepared), options_(std::move(options)) {}

  Status PlaceInputs(const Problem& problem, const std::vector<int64_t>& rows);
  Status PlaceOutput(const Case& c);
  void TakeVariant(uint64_t seed);
  Status Plan();

  Device device_;
  PreparedWeights prepared_;
  GemmOptions options_;
  TensorView a_view_;
  MutableTensorView out_view_;
  bool as_vector_ = false;
  int64_t rows_ = 0;
  int64_t columns_ = 0;
  int64_t stride_ = 0;
  DType type_ = DType::kF32;
  DeviceImage a_;
  DeviceImage bias_;
  DeviceImage row_weight_;
  DeviceImage output_;
  DeviceImage workspace_;
  std::string kernel_;
  bool inputs_changed_ = false;
};

/// The options of a case, without a forced kernel and without device operands.
GemmOptions ProductOptions(const Problem& problem);

/// Makes, launches and collects the GEMM of a problem. Errors: those of the three.
Result<ProductRun> RunProduct(const Device& device, const PreparedWeights& prepared,
                              const Problem& problem, const GemmOptions& options);

/// The same on a selection of the rows of A.
Result<ProductRun> RunProductRows(const Device& device, const PreparedWeights& prepared,
                                  const Problem& problem, const GemmOptions& options,
                                  const std::vector<int64_t>& rows);

/// All row indices of a problem; for a periodic one, those of its period repeated.
std::vector<int64_t> AllRows(const Problem& problem);

}  // namespace marlin::conformance
