// Buffers and addresses of launches over tensors and paged caches.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "backends/metal/kernels/attention/attend_parameters.h"
#include "backends/metal/runtime/driver.h"
#include "marlin/decoder.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin::metal {

/// From the first to the last element of a view.
KernelBuffer BufferOf(int index, const TensorView& view);
/// A buffer that a kernel writes, and does not read before.
KernelBuffer Written(KernelBuffer buffer);
bool Overlap(const KernelBuffer& a, const KernelBuffer& b);

/// Whether every four features of vectors from an address on are aligned to their size. Strides are
/// in elements.
bool QuadsAligned(const void* data, DType type, std::initializer_list<int64_t> strides);
/// The same for the vectors of a view of rank 3.
bool QuadsAligned(const TensorView& view);

/// Whether parameters have room for the slabs of a cache.
bool TakesSlabs(const PagedCache& cache);
/// The pages of a cache and the addresses of its slabs. Errors: kInvalidArgument (memory that is
/// not the device's).
Status SetSlabs(const PagedCache& cache, const Driver& driver, kernels::PagedRows* pages);
/// Declares that a launch reads the slabs, and perhaps writes them.
void AddressSlabs(const PagedCache& cache, KernelLaunch* launch, bool written = false);

}  // namespace marlin::metal
