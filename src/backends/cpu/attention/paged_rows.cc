#include "backends/cpu/attention/paged_rows.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"
#include "plan/step/indices.h"

namespace marlin::cpu {

uint8_t* PageOf(const PagedCache& cache, int64_t page) {
  const int64_t slab = page / cache.slab_pages;
  if (page < 0 || slab >= static_cast<int64_t>(cache.slabs.size())) return nullptr;
  auto* const data = static_cast<uint8_t*>(cache.slabs[static_cast<size_t>(slab)]);
  if (data == nullptr) return nullptr;
  const int64_t element = page % cache.slab_pages * cache.page_stride + cache.first_element;
  return data + element * DTypeBytes(cache.type);
}

Status PagedRows::CheckSequence(int64_t sequence, int64_t window) const {
  const int64_t first = FirstRow(sequence);
  const int64_t last = FirstRow(sequence + 1) - 1;
  if (last < first) return {};
  const int64_t begin = Position(first);
  if (begin < 0) {
    return Invalid(fmt::format("positions: expected 0 or more, got {} at {}", begin, first));
  }
  for (int64_t row = first + 1; row <= last; ++row) {
    const int64_t expected = begin + row - first;
    if (Position(row) == expected) continue;
    return Invalid(
        fmt::format("positions: expected {}, got {} at {}", expected, Position(row), row));
  }
  const int64_t seen = window > 0 ? std::max<int64_t>(begin - window + 1, 0) : 0;
  const int64_t last_block = Position(last) / cache_.page_tokens;
  const int64_t blocks = rows_.block_tables.dim(1);
  if (last_block >= blocks) {
    return Invalid(fmt::format("block_tables: position {} is in block {} of {}", Position(last),
                               last_block, blocks));
  }
  for (int64_t block = seen / cache_.page_tokens; block <= last_block; ++block) {
    const int32_t page = TableOf(sequence)[block];
    if (Page(page) != nullptr) continue;
    return Invalid(
        fmt::format("block_tables: no page {} for block {} of sequence {}", page, block, sequence));
  }
  return {};
}

Status PagedRows::Check(int64_t window) const {
  MARLIN_RETURN_IF_ERROR(CheckFirstRows(rows_.first_rows, rows_.positions.dim(0)));
  for (int64_t s = 0; s < sequences(); ++s) MARLIN_RETURN_IF_ERROR(CheckSequence(s, window));
  return {};
}

int64_t PagedRows::Length(int64_t sequence) const {
  return Tokens(sequence) == 0 ? 0 : Position(FirstRow(sequence + 1) - 1) + 1;
}

int64_t PagedRows::SegmentsOf(int64_t sequence) const {
  return 2 * CeilDivide(Length(sequence), kSegment);
}

int64_t PagedRows::SegmentBytes() const {
  int64_t count = 0;
  for (int64_t s = 0; s < sequences(); ++s) count += SegmentsOf(s);
  return RoundUp(count * int64_t{sizeof(const uint8_t*)}, kBufferAlignment);
}

uint8_t* PagedRows::PageAt(int64_t sequence, int64_t position) const {
  return Page(TableOf(sequence)[position / cache_.page_tokens]);
}

AttentionJob PagedRows::JobOf(int64_t sequence, const TensorView& queries,
                              const MutableTensorView& out, const uint8_t** segments) const {
  const int64_t first = FirstRow(sequence);
  const int64_t tokens = Tokens(sequence);
  const auto rows_of = [&](const auto& view) {
    using View = std::remove_cvref_t<decltype(view)>;
    auto* data =
        static_cast<std::conditional_t<std::is_same_v<View, TensorView>, const uint8_t*, uint8_t*>>(
            view.data());
    return View(data + first * view.stride(0) * DTypeBytes(view.dtype()), view.dtype(),
                {tokens, view.dim(1), view.dim(2)}, {view.stride(0), view.stride(1), 1});
  };
  const int64_t count = SegmentsOf(sequence) / 2;
  const int64_t key_elements = cache_.kv_heads * cache_.page_tokens * cache_.key_dim;
  for (int64_t i = 0; segments != nullptr && i < count; ++i) {
    // Null if a block before the window has no page any more.
    const uint8_t* const page = PageAt(sequence, i * kSegment);
    const int64_t place = i * kSegment % cache_.page_tokens;
    const auto at = [&](int64_t element) {
      return page == nullptr ? nullptr : page + element * DTypeBytes(cache_.type);
    };
    segments[i] = at(place * cache_.key_dim);
    segments[count + i] =
        cache_.values_in_keys ? segments[i] : at(key_elements + place * cache_.value_dim);
  }
  const int64_t value_stride = cache_.values_in_keys ? cache_.key_dim : cache_.value_dim;
  const KeyMemory keys{nullptr,        segments,       cache_.type,
                       cache_.key_dim, cache_.key_dim, cache_.page_tokens * cache_.key_dim};
  const KeyMemory values{nullptr,      segments == nullptr ? nullptr : segments + count,
                         cache_.type,  cache_.value_dim,
                         value_stride, cache_.page_tokens * value_stride};
  return {rows_of(queries), keys, values, Length(sequence), cache_.kv_heads, rows_of(out)};
}

}  // namespace marlin::cpu
