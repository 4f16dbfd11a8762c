#include "backends/metal/attention/launch_buffers.h"

#include <algorithm>
#include <limits>

#include "base/errors.h"

namespace marlin::metal {

KernelBuffer BufferOf(int index, const TensorView& view) {
  int64_t last = 0;
  for (int i = 0; i < view.rank(); ++i) last += (view.dim(i) - 1) * view.stride(i);
  return {index, view.data(), view.ElementCount() == 0 ? 0 : (last + 1) * DTypeBytes(view.dtype())};
}

KernelBuffer Written(KernelBuffer buffer) {
  buffer.written = true;
  buffer.cleared = false;
  return buffer;
}

bool Overlap(const KernelBuffer& a, const KernelBuffer& b) {
  const auto first = reinterpret_cast<uintptr_t>(a.data);
  const auto second = reinterpret_cast<uintptr_t>(b.data);
  return first < second + static_cast<uintptr_t>(b.bytes) &&
         second < first + static_cast<uintptr_t>(a.bytes);
}

bool QuadsAligned(const void* data, DType type, std::initializer_list<int64_t> strides) {
  const auto bytes = static_cast<uintptr_t>(4 * DTypeBytes(type));
  return reinterpret_cast<uintptr_t>(data) % bytes == 0 &&
         std::ranges::all_of(strides, [](int64_t stride) { return stride % 4 == 0; });
}

bool QuadsAligned(const TensorView& view) {
  return view.dim(2) % 4 == 0 &&
         QuadsAligned(view.data(), view.dtype(), {view.stride(0), view.stride(1)});
}

bool TakesSlabs(const PagedCache& cache) { return std::ssize(cache.slabs) <= kernels::kMostSlabs; }

Status SetSlabs(const PagedCache& cache, const Driver& driver, kernels::PagedRows* pages) {
  pages->page_stride = cache.page_stride;
  pages->first_element = cache.first_element;
  pages->page_tokens = static_cast<int32_t>(cache.page_tokens);
  // No page number is larger.
  pages->slab_pages = static_cast<int32_t>(
      std::min<int64_t>(cache.slab_pages, std::numeric_limits<int32_t>::max()));
  pages->slab_count = static_cast<int32_t>(cache.slabs.size());
  for (size_t i = 0; i < cache.slabs.size(); ++i) {
    if (cache.slabs[i] == nullptr) continue;
    const uint64_t address = driver.AddressOf(cache.slabs[i]);
    if (address == 0) return Invalid("cache: a slab is not memory of the device");
    pages->slabs[i] = static_cast<int64_t>(address);
  }
  return Status();
}

void AddressSlabs(const PagedCache& cache, KernelLaunch* launch, bool written) {
  const int64_t bytes = cache.slab_pages * cache.page_stride * DTypeBytes(cache.type);
  for (const void* const slab : cache.slabs) {
    if (slab != nullptr) launch->addressed.push_back({slab, bytes, written});
  }
}

}  // namespace marlin::metal
