// A product on poisoned, guarded memory of a device, and what it left there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device_image.h"
#include "marlin/gemm.h"
#include "periodic.h"
#include "problem.h"

namespace marlin::conformance {

/// One product: its operands in the device's memory, its output and the memory around it.
class ProductRun {
 public:
  /// Plans the product of a choice of the rows of the problem's A, copied one after the other, in a
  /// workspace of exactly the planned size. The weights may have more columns than the problem.
  /// Errors: those of PlanGemm and DeviceBuffer.
  static Result<ProductRun> Make(const Device& device, const PreparedWeights& prepared,
                                 const Problem& problem, GemmOptions options,
                                 const std::vector<int64_t>& rows);

  /// Calls Gemm or, for one row of some seeds, Gemv. Done when Collect returns. Errors: theirs.
  Status Launch() const;
  /// Waits for the stream and fetches what the product left. Errors: of the work itself.
  Status Collect();
  /// Poisons output and workspace again, for another Launch.
  Status Reset();
  /// From now on A is the output of `other`, which must have the type and the columns of A.
  void ReadFrom(const ProductRun& other);
  /// Lets the kernel begin before the work before it on the stream is done.
  void OverlapPrevious() { options_.overlap_previous = true; }

  double Output(int64_t m, int64_t n) const;
  /// The stored bits of an output.
  uint32_t Bits(int64_t m, int64_t n) const;
  /// All outputs, to be compared with one period of `rows` and `columns`.
  PeriodicOutput Repeated(int64_t rows, int64_t columns) const;
  /// A hash of all outputs.
  uint64_t Hash() const;
  /// Empty, or what was written that must not be.
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

/// The options that a case asks for, kernel not yet forced and operands not yet on a device.
GemmOptions ProductOptions(const Problem& problem);

/// Makes, launches and collects the product of a problem. Errors: those of the three.
Result<ProductRun> RunProduct(const Device& device, const PreparedWeights& prepared,
                              const Problem& problem, const GemmOptions& options);

/// The same on a choice of the rows of A.
Result<ProductRun> RunProductRows(const Device& device, const PreparedWeights& prepared,
                                  const Problem& problem, const GemmOptions& options,
                                  const std::vector<int64_t>& rows);

/// The rows of a problem; of a periodic one those of its period, again and again.
std::vector<int64_t> AllRows(const Problem& problem);

}  // namespace marlin::conformance
