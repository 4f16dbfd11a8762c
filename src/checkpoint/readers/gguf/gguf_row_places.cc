#include "checkpoint/readers/gguf/gguf_row_places.h"

#include <functional>

namespace marlin {
namespace {

using Rows = GgufPlace::Rows;

/// The parts that each key head has side by side in a projection: their widths, and the parts that
/// a tensor has, one after another.
struct HeadParts {
  std::vector<int64_t> widths;
  size_t first = 0;
  size_t end = 0;
};

HeadParts PartsOf(Rows rows, const GgufHeads& heads) {
  const int64_t keys = heads.delta_key_dim;
  const int64_t values = heads.values_per_key() * heads.delta_value_dim;
  const int64_t each = heads.values_per_key();
  switch (rows) {
    case Rows::kQkvOfHeads:
      return {{keys, keys, values, values}, 0, 3};
    case Rows::kGatesOfHeads:
      return {{keys, keys, values, values}, 3, 4};
    case Rows::kWritesOfHeads:
      return {{each, each}, 0, 1};
    default:
      return {{each, each}, 1, 2};
  }
}

std::vector<int64_t> PlacesInHeads(Rows rows, const GgufHeads& heads) {
  const HeadParts parts = PartsOf(rows, heads);
  int64_t whole = 0;
  for (const int64_t width : parts.widths) whole += width;
  std::vector<int64_t> places;
  int64_t before = 0;
  for (size_t part = 0; part < parts.end; ++part) {
    const int64_t width = parts.widths[part];
    for (int64_t row = 0; part >= parts.first && row < heads.delta_keys * width; ++row) {
      places.push_back(row / width * whole + before + row % width);
    }
    before += width;
  }
  return places;
}

std::vector<int64_t> PlacesOfEach(int64_t count, const std::function<int64_t(int64_t)>& place) {
  std::vector<int64_t> places(static_cast<size_t>(count));
  for (int64_t row = 0; row < count; ++row) places[static_cast<size_t>(row)] = place(row);
  return places;
}

/// Rows from `first` on are value heads.
std::vector<int64_t> PlacesOfValues(const GgufHeads& heads, int64_t first, int64_t count) {
  if (!heads.has_delta() || count <= first || (count - first) % heads.delta_values != 0) return {};
  const int64_t height = (count - first) / heads.delta_values;
  return PlacesOfEach(count, [&](int64_t row) {
    if (row < first) return row;
    const int64_t value = row - first;
    const int64_t head = TiledHead(value / height, heads.delta_keys, heads.values_per_key());
    return first + head * height + value % height;
  });
}

std::vector<int64_t> PlacesOfPairs(int64_t heads, int64_t count) {
  if (heads < 1 || count % heads != 0 || count / heads % 2 != 0) return {};
  return PlacesOfEach(count, [&](int64_t row) { return HeadRow(row, count / heads); });
}

}  // namespace

std::vector<int64_t> GgufRowPlaces(Rows rows, const GgufHeads& heads, int64_t count) {
  const bool even = count % 2 == 0;
  switch (rows) {
    case Rows::kStraight:
      return PlacesOfEach(count, [](int64_t row) { return row; });
    case Rows::kQueryHeads:
      return PlacesOfPairs(heads.queries, count);
    case Rows::kKeyHeads:
      return PlacesOfPairs(heads.keys, count);
    case Rows::kEven:
    case Rows::kOdd:
      if (!even) return {};
      return PlacesOfEach(count, [&](int64_t row) {
        return row % 2 == (rows == Rows::kOdd ? 1 : 0) ? row / 2 : -1;
      });
    case Rows::kFirstHalf:
      if (!even) return {};
      return PlacesOfEach(count, [&](int64_t row) { return row < count / 2 ? row : -1; });
    case Rows::kSecondHalf:
      if (!even) return {};
      return PlacesOfEach(count,
                          [&](int64_t row) { return row < count / 2 ? -1 : row - count / 2; });
    case Rows::kValueHeads:
      return PlacesOfValues(heads, 0, count);
    case Rows::kMixedHeads:
      return PlacesOfValues(heads, 2 * heads.key_rows(), count);
    case Rows::kQkvOfHeads:
    case Rows::kGatesOfHeads:
    case Rows::kWritesOfHeads:
    case Rows::kDecaysOfHeads:
      if (!heads.has_delta() || count != PartRows(rows, heads)) return {};
      return PlacesInHeads(rows, heads);
  }
  return {};
}

int64_t PartRows(Rows rows, const GgufHeads& heads) {
  const HeadParts parts = PartsOf(rows, heads);
  int64_t width = 0;
  for (size_t part = parts.first; part < parts.end; ++part) width += parts.widths[part];
  return heads.delta_keys * width;
}

int64_t ProjectionRows(Rows rows, const GgufHeads& heads) {
  int64_t width = 0;
  for (const int64_t part : PartsOf(rows, heads).widths) width += part;
  return heads.delta_keys * width;
}

std::vector<int64_t> GgufWrittenPlaces(Rows rows, const GgufHeads& heads, int64_t count) {
  if (!IsOfHeads(rows)) return GgufRowPlaces(rows, heads, count);
  if (!heads.has_delta() || count != ProjectionRows(rows, heads)) return {};
  std::vector<int64_t> places(static_cast<size_t>(count), -1);
  const std::vector<int64_t> sources = PlacesInHeads(rows, heads);
  for (size_t row = 0; row < sources.size(); ++row) {
    places[static_cast<size_t>(sources[row])] = static_cast<int64_t>(row);
  }
  return places;
}

GgufHeads GgufDeltaHeads(const Dimensions& dimensions) {
  GgufHeads heads;
  heads.delta_keys = dimensions.delta_key_heads;
  heads.delta_values = dimensions.delta_value_heads;
  heads.delta_key_dim = dimensions.delta_key_dim;
  heads.delta_value_dim = dimensions.delta_value_dim;
  return heads;
}

int64_t GgufColumn(const GgufPlace& place, const GgufHeads& heads, int64_t count, int64_t column) {
  if (!place.value_columns || !heads.has_delta() || count % heads.delta_values != 0) return column;
  const int64_t width = count / heads.delta_values;
  return TiledHead(column / width, heads.delta_keys, heads.values_per_key()) * width +
         column % width;
}

std::vector<int64_t> TiledHeads(const GgufHeads& heads) {
  return PlacesOfEach(heads.delta_values, [&](int64_t head) {
    return TiledHead(head, heads.delta_keys, heads.values_per_key());
  });
}

std::vector<int64_t> UntiledHeads(const GgufHeads& heads) {
  std::vector<int64_t> untiled(static_cast<size_t>(heads.delta_values));
  const std::vector<int64_t> tiled = TiledHeads(heads);
  for (size_t head = 0; head < tiled.size(); ++head) {
    untiled[static_cast<size_t>(tiled[head])] = static_cast<int64_t>(head);
  }
  return untiled;
}

}  // namespace marlin
