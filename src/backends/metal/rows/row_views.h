// Views of rows as launches of kernels/rows_*.metal take them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "backends/metal/decoder/operations.h"
#include "backends/metal/kernels/rows/rows_parameters.h"
#include "backends/metal/runtime/driver.h"
#include "marlin/decoder.h"
#include "marlin/tensor.h"

namespace marlin::metal {

/// The strides of a view of rank 2 or 3.
kernels::RowStrides StridesOf(const TensorView& view);
/// From the first element to the end of the last one.
int64_t BytesOf(const TensorView& view);

/// How a launch uses an operand.
enum class Use : uint8_t { kRead, kWritten, kChanged };
KernelBuffer OperandOf(int index, const TensorView& view, Use use = Use::kRead);

/// Whether the bytes from the first to the last element of two views meet, as columns
/// of one matrix do.
bool Interleaved(const TensorView& a, const TensorView& b);

/// An input of a launch. Without data it is not bound.
struct RowInput {
  int index;
  TensorView view;
  kernels::RowStrides* strides;
};

/// Binds inputs, and an output to MARLIN_BUFFER_OUTPUT, in whose buffer are the inputs that are
/// interleaved with it: a buffer that is written must not overlap another.
void BindRows(std::initializer_list<RowInput> inputs, const TensorView& output, Use use,
              kernels::RowStrides* output_strides, KernelLaunch* launch);

/// Whether kernels can count the rows and columns of a view in 32 bits.
bool Fits(const TensorView& view);
/// Rows of a view of rank 2 or 3, as a matrix.
int64_t RowsOf(const TensorView& view);

/// The launch of an elementwise kernel over the rows of `view`.
KernelLaunch ElementLaunch(std::string_view function, const TensorView& view,
                           kernels::RowParameters* parameters);

kernels::RotaryParameters RotaryOf(const RotaryEmbedding& rotary);

/// Ids or positions of a launch, with the word for a wrong one: binds both. Messages name `name`.
/// Errors: kOutOfMemory.
Status BindIndices(const char* name, const TensorView& indices, int64_t limit, KernelLaunch* launch,
                   kernels::IndexParameters* parameters, CallContext* context);

}  // namespace marlin::metal
