#include "checkpoint/codes/row_weights.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "checkpoint/codes/unpack.h"
#include "layout/parameters.h"
#include "layout/permutation.h"

namespace marlin {
namespace {

Status FillRows(const TensorStore& store, const RowWeights& rows, WeightsBuffer* buffer,
                ThreadPool& pool) {
  const WeightsSpec& spec = rows.spec;
  if (rows.check) MARLIN_RETURN_IF_ERROR(rows.check());
  if (spec.sparsity == Sparsity::k24) {
    PackKeptRows(rows.kept.codes, rows.kept.positions, *buffer, pool);
  } else if (rows.unpack) {
    PackByteRows(rows.unpack, *buffer, pool);
  } else {
    const int64_t row_bytes = store.tensors[rows.codes].bytes / (spec.experts * spec.n);
    PackDenseRows({store.Data(rows.codes), row_bytes, rows.flip, rows.swap_nibbles}, *buffer, pool);
  }
  if (rows.scales) StoreScales(store.Data(*rows.scales), rows.scale_rows, *buffer);
  if (rows.biases) {
    TransposeElements(store.Data(*rows.biases), spec.experts, spec.n, GroupCount(spec),
                      DTypeBytes(ScaleDType(spec.scale_type)), buffer->biases);
  }
  std::copy(rows.global_scale.begin(), rows.global_scale.end(), buffer->global_scale);
  buffer->weights.codebook = rows.codebook;
  std::copy(rows.input_scale.begin(), rows.input_scale.end(), buffer->input_scale);
  if (rows.more) rows.more(buffer);
  return spec.has_permutation ? StoreSorted(rows.permutation, buffer) : Status();
}

/// One number of a scale tensor; U8 are exponents.
float ScaleAt(const std::byte* data, DType dtype, int64_t index) {
  return ParameterAt(data, dtype == DType::kU8 ? DType::kF8E8M0 : dtype, index);
}

/// Which weights share a scale.
struct ScaleGrid {
  int64_t rows = 1;     ///< Rows of a block.
  int64_t columns = 1;  ///< Scales along k.
  int64_t group_size = 0;
};

/// The grid of scales for codes [experts, n, k] or [n, k]; nothing if they do not fit.
std::optional<ScaleGrid> GridOf(const Shape& codes, const Shape& scales, int64_t block_rows,
                                int64_t block_columns) {
  if (codes.rank() < 2 || codes.rank() > 3 || codes.ElementCount() < 1) return std::nullopt;
  const int64_t experts = codes.rank() == 3 ? codes[0] : 1;
  const int64_t n = codes[codes.rank() - 2];
  const int64_t k = codes[codes.rank() - 1];
  const int64_t count = scales.ElementCount() / experts;
  if (count < 1 || count * experts != scales.ElementCount()) return std::nullopt;
  ScaleGrid grid;
  if (block_rows > 0 && block_columns > 0 &&
      count == CeilDivide(n, block_rows) * CeilDivide(k, block_columns)) {
    grid = {block_rows, CeilDivide(k, block_columns), block_columns};
  } else if (count == 1) {
    grid.rows = n;
  } else if (count % n == 0 && k % (count / n) == 0) {
    grid = {1, count / n, k / (count / n)};
  } else {
    return std::nullopt;
  }
  if (grid.columns == 1) grid.group_size = k;
  // Dimensions of 1 aside, which some writers add, the last one counts the scales along k.
  int64_t last = 1;
  for (int i = 0; i < scales.rank(); ++i) last = scales[i] > 1 ? scales[i] : last;
  if (scales.rank() > 1 && grid.columns > 1 && last != grid.columns) return std::nullopt;
  return grid;
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

Status AddFp8(const std::string& name, Fp8Codes codes, std::string_view scales_suffix,
              int64_t block_rows, int64_t block_columns, ModuleTensorFinder* finder,
              ListedReader* reader) {
  MARLIN_ASSIGN_OR_RETURN(const size_t scales, finder->Need(ModulePart::kScales, scales_suffix,
                                                            {DType::kF32, DType::kBf16, DType::kF16,
                                                             DType::kU8, DType::kF8E8M0}));
  const Shape& shape = codes.shape;
  const std::optional<ScaleGrid> found =
      GridOf(shape, finder->ShapeOf(scales), block_rows, block_columns);
  if (!found) {
    return finder->Malformed(
        scales_suffix,
        fmt::format("{} does not fit {} in blocks of [{}, {}]", finder->ShapeOf(scales).ToString(),
                    shape.ToString(), block_rows, block_columns));
  }
  const DType scale_type = finder->TypeOf(scales);
  const bool exponent = scale_type == DType::kU8 || scale_type == DType::kF8E8M0;
  const ScaleGrid grid = *found;
  RowWeights weights;
  weights.spec = {.format = codes.e5m2 ? Format::kFp8E5M2 : Format::kFp8E4M3,
                  .experts = shape.rank() == 3 ? shape[0] : 1,
                  .k = shape[shape.rank() - 1],
                  .n = shape[shape.rank() - 2],
                  .group_size = grid.group_size,
                  .scale_type = exponent ? ScaleType::kE8M0 : *ScaleTypeOf(scale_type)};
  if (grid.columns == 1 || grid.group_size % kGroupGranule == 0) {
    weights.codes = codes.tensor;
    weights.unpack = std::move(codes.unpack);
    weights.spec.sparsity = codes.kept.codes ? Sparsity::k24 : Sparsity::kDense;
    weights.kept = std::move(codes.kept);
    weights.scales = scales;
    weights.scale_rows = grid.rows;
    AddRows(name, std::move(weights), finder, reader);
    return {};
  }
  const WeightsSpec spec = weights.spec;
  if (!codes.unpack) {
    codes.unpack = [data = finder->Data(codes.tensor), k = spec.k](int64_t row, uint8_t* bytes) {
      std::memcpy(bytes, data + row * k, static_cast<size_t>(k));
    };
  }
  const std::byte* factors = finder->Data(scales);
  const int64_t grid_rows = CeilDivide(spec.n, grid.rows);
  AddFloats(
      name, spec.experts, spec.k, spec.n,
      [=, unpack = std::move(codes.unpack), e5m2 = codes.e5m2](int64_t row, float* values) {
        std::vector<uint8_t> bytes(static_cast<size_t>(spec.k));
        unpack(row, bytes.data());
        const int64_t first = (row / spec.n * grid_rows + row % spec.n / grid.rows) * grid.columns;
        for (int64_t i = 0; i < spec.k; ++i) {
          const uint8_t code = bytes[static_cast<size_t>(i)];
          const float value = e5m2 ? Fp8E5M2ToFloat(code) : Fp8E4M3ToFloat(code);
          values[i] = value * ScaleAt(factors, scale_type, first + i / grid.group_size);
        }
      },
      finder, reader);
  return {};
}

Status AddFp8(const std::string& name, std::string_view codes, std::string_view scales,
              int64_t block_rows, int64_t block_columns, ModuleTensorFinder* finder,
              ListedReader* reader) {
  Fp8Codes found;
  MARLIN_ASSIGN_OR_RETURN(
      found.tensor, finder->Need(ModulePart::kCodes, codes, {DType::kF8E4M3, DType::kF8E5M2}));
  found.shape = finder->ShapeOf(found.tensor);
  found.e5m2 = finder->TypeOf(found.tensor) == DType::kF8E5M2;
  return AddFp8(name, std::move(found), scales, block_rows, block_columns, finder, reader);
}

std::optional<int64_t> GroupSizeOf(int64_t k, int64_t groups) {
  if (groups < 1 || k % groups != 0) return std::nullopt;
  const int64_t size = k / groups;
  if (groups > 1 && size % kGroupGranule != 0) return std::nullopt;
  return size;
}

}  // namespace marlin
