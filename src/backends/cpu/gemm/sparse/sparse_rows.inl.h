// Rows and group modes of the kernels of 2:4 weights that gather activations (sparse_kernel.h).
// Included after decode.inl.h.

/// Whether the activations of a packed row are finite: the 4 bytes behind it are 0 then.
static bool IsFinite(const uint8_t* row, int64_t bytes) {
  uint32_t flag;
  __builtin_memcpy(&flag, row + bytes, sizeof(flag));
  return flag == 0;
}

/// Calls finite(first, count) for the runs of packed rows that are finite, other(row) for the rest.
template <class Finite, class Other>
static void ForFiniteRuns(const void* x, int64_t x_stride, int64_t row_bytes, int64_t m,
                          Finite finite, Other other) {
  const auto* const rows = static_cast<const uint8_t*>(x);
  for (int64_t i = 0; i < m;) {
    int64_t end = i;
    while (end < m && IsFinite(rows + end * x_stride, row_bytes)) ++end;
    if (end > i) {
      finite(i, end - i);
    } else {
      other(end++);
    }
    i = end;
  }
}

/// body(mode) with the GroupMode of 2:4 weights as a compile-time constant.
template <class Body>
static auto WithSparseMode(const PanelView& w, Body body) {
  if (w.group_size % kChunkK == 0) return body(Index<static_cast<int>(GroupMode::kChunk)>{});
  if (w.group_size % kSliceK == 0) return body(Index<static_cast<int>(GroupMode::kSlice)>{});
  return body(Index<static_cast<int>(GroupMode::kHalf)>{});
}
