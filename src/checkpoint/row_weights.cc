#include "checkpoint/row_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "checkpoint/unpack.h"

namespace marlin {
namespace {

/// Expands scales that several rows share to one per row, and transposes them to [groups, n].
void FillSharedScales(const std::byte* from, int64_t scale_rows, const WeightsSpec& spec,
                      int64_t element_bytes, std::byte* to) {
  const int64_t groups = GroupCount(spec);
  const int64_t grid_rows = CeilDivide(spec.n, scale_rows);
  for (int64_t e = 0; e < spec.experts; ++e) {
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t n = 0; n < spec.n; ++n) {
        const int64_t source = (e * grid_rows + n / scale_rows) * groups + g;
        std::memcpy(to, from + source * element_bytes, static_cast<size_t>(element_bytes));
        to += element_bytes;
      }
    }
  }
}

Status FillRows(const TensorStore& store, const RowWeights& rows, WeightsBuffer* buffer,
                ThreadPool& pool) {
  const WeightsSpec& spec = rows.spec;
  if (rows.unpack) {
    PackByteRows(rows.unpack, *buffer, pool);
  } else {
    const int64_t row_bytes = store.tensors[rows.codes].bytes / (spec.experts * spec.n);
    PackDenseRows({store.Data(rows.codes), row_bytes, rows.flip, rows.swap_nibbles}, *buffer, pool);
  }
  const int64_t element_bytes = DTypeBytes(ScaleDType(spec.scale_type));
  if (rows.scales) {
    const std::byte* scales = store.Data(*rows.scales);
    if (rows.scale_rows == 1) {
      TransposeElements(scales, spec.experts, spec.n, GroupCount(spec), element_bytes,
                        buffer->scales);
    } else {
      FillSharedScales(scales, rows.scale_rows, spec, element_bytes,
                       static_cast<std::byte*>(buffer->scales));
    }
  }
  if (rows.biases) {
    TransposeElements(store.Data(*rows.biases), spec.experts, spec.n, GroupCount(spec),
                      element_bytes, buffer->biases);
  }
  std::copy(rows.global_scale.begin(), rows.global_scale.end(), buffer->global_scale);
  buffer->weights.codebook = rows.codebook;
  if (rows.more) rows.more(buffer);
  return {};
}

/// One number of a scale tensor; U8 and F8_E8M0 are exponents.
float ScaleAt(const std::byte* data, DType dtype, int64_t index) {
  const bool exponent = dtype == DType::kU8 || dtype == DType::kF8E8M0;
  return exponent ? E8M0ToFloat(static_cast<uint8_t>(data[index])) : FloatAt(data, dtype, index);
}

}  // namespace

void AddRows(const std::string& name, RowWeights rows, ModuleTensorFinder* finder,
             ListedReader* reader) {
  ModuleRecord record = RecordOf(name, rows.spec);
  record.exactness = rows.exactness;
  record.layout = rows.layout;
  const TensorStore& store = finder->store();
  reader->Add(std::move(record), finder->TakeParts(),
              [rows = std::move(rows), &store](WeightsBuffer* buffer, ThreadPool& pool) {
                return FillRows(store, rows, buffer, pool);
              });
}

void AddFloats(const std::string& name, int64_t experts, int64_t k, int64_t n, ValueOfRow values,
               ModuleTensorFinder* finder, ListedReader* reader) {
  const WeightsSpec spec{
      .format = Format::kFp32, .experts = experts, .k = k, .n = n, .group_size = k};
  reader->Add(RecordOf(name, spec), finder->TakeParts(),
              [values = std::move(values)](WeightsBuffer* buffer, ThreadPool& pool) {
                StoreFloatRows(values, *buffer, pool);
                return Status();
              });
}

Status AddFp8(const std::string& name, std::string_view codes_suffix,
              std::string_view scales_suffix, int64_t block_rows, int64_t block_columns,
              ModuleTensorFinder* finder, ListedReader* reader) {
  MARLIN_ASSIGN_OR_RETURN(const size_t codes, finder->Need(ModulePart::kCodes, codes_suffix,
                                                           {DType::kF8E4M3, DType::kF8E5M2}));
  MARLIN_ASSIGN_OR_RETURN(const size_t scales, finder->Need(ModulePart::kScales, scales_suffix,
                                                            {DType::kF32, DType::kBf16, DType::kF16,
                                                             DType::kU8, DType::kF8E8M0}));
  const Shape& shape = finder->ShapeOf(codes);
  const Shape& grid = finder->ShapeOf(scales);
  const auto misfit = [&] {
    return finder->Malformed(
        scales_suffix, fmt::format("{} does not fit {} in blocks of [{}, {}]", grid.ToString(),
                                   shape.ToString(), block_rows, block_columns));
  };
  if (shape.rank() < 2 || shape.rank() > 3 || shape.ElementCount() < 1) return misfit();
  const int64_t experts = shape.rank() == 3 ? shape[0] : 1;
  const int64_t n = shape[shape.rank() - 2];
  const int64_t k = shape[shape.rank() - 1];
  // The scales of one matrix as [rows, columns], whatever dimensions of 1 the writer added.
  const int64_t per_matrix = grid.ElementCount() / experts;
  if (per_matrix < 1 || per_matrix * experts != grid.ElementCount()) return misfit();
  int64_t rows = n;
  int64_t columns = 0;
  if (block_rows > 0 && block_columns > 0 &&
      per_matrix == CeilDivide(n, block_rows) * CeilDivide(k, block_columns)) {
    rows = block_rows;
    columns = CeilDivide(k, block_columns);
  } else if (per_matrix == 1) {
    columns = 1;
  } else if (per_matrix % n == 0 && k % (per_matrix / n) == 0) {
    rows = 1;
    columns = per_matrix / n;
    block_columns = k / columns;
  } else {
    return misfit();
  }
  if (grid.rank() >= 2 && columns > 1) {
    // Dimensions of 1 aside, the last one counts the groups.
    int64_t last = 1;
    for (int i = 0; i < grid.rank(); ++i) last = grid[i] > 1 ? grid[i] : last;
    if (last != columns) return misfit();
  }
  const DType scale_type = finder->TypeOf(scales);
  const bool exponent = scale_type == DType::kU8 || scale_type == DType::kF8E8M0;
  const int64_t group_size = columns == 1 ? k : block_columns;
  const bool e5m2 = finder->TypeOf(codes) == DType::kF8E5M2;
  if (columns > 1 && group_size % kGroupGranule != 0) {
    const TensorStore& store = finder->store();
    const std::byte* data = store.Data(codes);
    const std::byte* factors = store.Data(scales);
    const int64_t grid_rows = CeilDivide(n, rows);
    AddFloats(
        name, experts, k, n,
        [=](int64_t row, float* values) {
          const int64_t first = (row / n * grid_rows + row % n / rows) * columns;
          for (int64_t i = 0; i < k; ++i) {
            const auto code = static_cast<uint8_t>(data[row * k + i]);
            const float value = e5m2 ? Fp8E5M2ToFloat(code) : Fp8E4M3ToFloat(code);
            values[i] = value * ScaleAt(factors, scale_type, first + i / group_size);
          }
        },
        finder, reader);
    return {};
  }
  RowWeights weights;
  weights.spec = {.format = e5m2 ? Format::kFp8E5M2 : Format::kFp8E4M3,
                  .experts = experts,
                  .k = k,
                  .n = n,
                  .group_size = group_size,
                  .scale_type = exponent ? ScaleType::kE8M0 : *ScaleTypeOf(scale_type)};
  weights.codes = codes;
  weights.scales = scales;
  weights.scale_rows = rows;
  AddRows(name, std::move(weights), finder, reader);
  return {};
}

std::optional<int64_t> GroupSizeOf(int64_t k, int64_t groups) {
  if (groups < 1 || k % groups != 0) return std::nullopt;
  const int64_t size = k / groups;
  if (groups > 1 && size % kGroupGranule != 0) return std::nullopt;
  return size;
}

}  // namespace marlin
