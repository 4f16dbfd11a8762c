#include "backends/cuda/decoder/views.h"

#include <algorithm>
#include <limits>

#include "backends/cuda/common/cuda_gemm.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"

namespace marlin::cuda {

RowsView RowsOf(const TensorView& view) {
  RowsView rows;
  rows.data = const_cast<void*>(view.data());
  rows.type = ElementOf(view.dtype());
  rows.stride = view.stride(0);
  rows.rows = view.dim(0);
  if (view.rank() == 3) {
    rows.inner = static_cast<int>(view.dim(1));
    rows.inner_stride = view.stride(1);
    rows.rows *= rows.inner;
  }
  return rows;
}

IndexView IndicesOf(const TensorView& view) { return {view.data(), view.dtype() == DType::kI64}; }

RotaryView RotaryOf(const RotaryEmbedding& rotary) {
  const TensorView& frequencies = rotary.inverse_frequencies;
  if (frequencies.empty()) return {};
  return {frequencies.As<float>(), static_cast<int>(frequencies.ElementCount()),
          rotary.attention_factor, rotary.interleaved};
}

SequencesView SequencesOf(const SequenceRows& rows) {
  return {rows.positions.As<int32_t>(),
          rows.first_rows.As<int32_t>(),
          rows.block_tables.As<int32_t>(),
          static_cast<int>(rows.positions.dim(0)),
          static_cast<int>(rows.first_rows.dim(0)) - 1,
          static_cast<int>(rows.block_tables.dim(1))};
}

int64_t SlabTableBytes(const PagedCache& cache) {
  const auto count = static_cast<int64_t>(cache.slabs.size());
  if (count <= kMostSlabParameters) return 0;
  return RoundUp(count * int64_t{sizeof(void*)}, kBufferAlignment);
}

cudaError_t PagesOf(const PagedCache& cache, const CallContext& context, PagesView* pages) {
  pages->slab_count = static_cast<int>(cache.slabs.size());
  pages->slab_pages = static_cast<uint32_t>(
      std::min<int64_t>(cache.slab_pages, std::numeric_limits<uint32_t>::max()));
  pages->page_stride = cache.page_stride;
  pages->first_element = cache.first_element;
  pages->type = ElementOf(cache.type);
  pages->page_tokens = static_cast<int>(cache.page_tokens);
  pages->kv_heads = static_cast<int>(cache.kv_heads);
  pages->key_dim = static_cast<int>(cache.key_dim);
  pages->value_dim = static_cast<int>(cache.value_dim);
  pages->values_in_keys = cache.values_in_keys;
  if (SlabTableBytes(cache) == 0) {
    std::copy(cache.slabs.begin(), cache.slabs.end(), pages->slabs);
    return cudaSuccess;
  }
  pages->more_slabs = static_cast<void* const*>(context.workspace);
  // A graph would read the host's table again, when it is gone.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (context.stream != nullptr) cudaStreamIsCapturing(context.stream, &capture);
  if (capture != cudaStreamCaptureStatusNone) return cudaErrorStreamCaptureUnsupported;
  // The copy reads the host's table before it returns.
  return cudaMemcpyAsync(context.workspace, cache.slabs.data(), cache.slabs.size_bytes(),
                         cudaMemcpyHostToDevice, context.stream);
}

bool SlabsAreAligned(const PagedCache& cache) {
  return std::ranges::all_of(cache.slabs, [](const void* slab) {
    return reinterpret_cast<uintptr_t>(slab) % kCacheAlignment == 0;
  });
}

}  // namespace marlin::cuda
