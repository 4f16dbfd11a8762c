#include "backends/cuda/recurrent/recurrent_views.h"

#include <fmt/core.h>

namespace marlin::cuda {

PagedCache CacheOf(const RecurrentStates& states) {
  PagedCache cache;
  cache.slabs = states.slabs;
  cache.slab_pages = states.slab_pages;
  cache.page_stride = states.page_stride;
  cache.first_element = states.first_element;
  cache.type = DType::kF32;
  cache.page_tokens = 1;
  cache.kv_heads = 1;
  return cache;
}

bool HasQuads(const PagedCache& states, int64_t value_dim) {
  constexpr int64_t kQuad = 4;
  return value_dim % kQuad == 0 && states.page_stride % kQuad == 0 &&
         states.first_element % kQuad == 0 && SlabsAreAligned(states);
}

HeadsView HeadsOf(const TensorView& view) {
  return {view.As<float>(), view.stride(0), view.stride(1)};
}

void SetRows(const RecurrentRows& rows, const TensorView& out, const ErrorView& errors,
             RecurrentArguments* args) {
  args->out = RowsOf(out);
  args->sequences = {rows.positions.As<int32_t>(),
                     rows.first_rows.As<int32_t>(),
                     rows.pages.As<int32_t>(),
                     static_cast<int>(rows.positions.dim(0)),
                     static_cast<int>(rows.first_rows.dim(0)) - 1,
                     2};
  args->errors = errors;
}

Status CheckLimits(const RecurrentSizes& sizes) {
  constexpr int64_t kMostSequences = 65535;
  if (sizes.key_dim > kMostRecurrentKeys || sizes.value_dim > kMostRecurrentValues) {
    return Status(
        Code::kUnsupported,
        fmt::format("{}: heads of {} and {} features; supported: up to {} and {}", sizes.operation,
                    sizes.key_dim, sizes.value_dim, kMostRecurrentKeys, kMostRecurrentValues));
  }
  if (sizes.conv_width > kMostConvWidth) {
    return Status(Code::kUnsupported,
                  fmt::format("{}: a convolution of {} tokens; supported: up to {}",
                              sizes.operation, sizes.conv_width, kMostConvWidth));
  }
  if (sizes.sequences <= kMostSequences) return {};
  return Status(Code::kUnsupported, fmt::format("{}: {} sequences; supported: up to {}",
                                                sizes.operation, sizes.sequences, kMostSequences));
}

}  // namespace marlin::cuda
