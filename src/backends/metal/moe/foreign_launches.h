// The launches of a layer's experts without addresses, for frameworks that encode them: the part of
// ForeignExperts that needs no symbols of this library.
#pragma once

#include <cstdint>
#include <vector>

#include "backends/metal/runtime/driver.h"
#include "marlin/tensor.h"

namespace marlin::metal {

/// The memory that launches refer to by invented addresses.
enum class ForeignOperand {
  kNone,
  kImage,      ///< Weights, biases and the table of their addresses: ForeignExperts::WriteImage.
  kX,          ///< [rows, hidden], contiguous, or one row.
  kIds,        ///< i32 [rows]: the expert of each row.
  kOnes,       ///< f32 [rows], all 1.
  kOut,        ///< [rows, hidden], contiguous.
  kWorkspace,  ///< ForeignExpertLaunches::workspace_bytes
  kErrors,     ///< ErrorWords::Word [passes]
};

/// The bits of an address from this one on are its operand's number: no operand is larger.
inline constexpr int kForeignOperandShift = 48;
/// The bit of an address of x that says that x is not aligned: elements have two bytes or more.
inline constexpr uint64_t kForeignUnaligned = 1;

/// Where an invented address is.
struct ForeignPlace {
  ForeignOperand operand = ForeignOperand::kNone;
  int64_t offset = 0;
};

inline ForeignPlace PlaceOf(uint64_t address) {
  const uint64_t offset = address & ((uint64_t{1} << kForeignOperandShift) - 1);
  return {static_cast<ForeignOperand>(address >> kForeignOperandShift),
          static_cast<int64_t>(offset & ~kForeignUnaligned)};
}
inline ForeignPlace PlaceOf(const void* address) {
  return PlaceOf(uint64_t{reinterpret_cast<uintptr_t>(address)});
}

/// y = expert(x), row by row.
struct ForeignExpertsCall {
  int64_t rows = 0;          ///< Not 0.
  bool one_row = false;      ///< x has one row, which all selections share.
  bool aligned = true;       ///< x begins at a multiple of 16 bytes.
  DType type = DType::kF32;  ///< The type of x and of the output.
  friend bool operator==(const ForeignExpertsCall&, const ForeignExpertsCall&) = default;
};

/// Launches in order; each sees the writes of those before it.
struct ForeignExpertLaunches {
  std::vector<KernelLaunch> launches;
  int64_t workspace_bytes = 0;
  int64_t passes = 0;
};

}  // namespace marlin::metal
