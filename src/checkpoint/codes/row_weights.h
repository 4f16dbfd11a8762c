// Modules whose codes lie in rows along k, one row per output feature, as most programs store them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/listed_reader.h"

namespace marlin {

/// Weights that share a scale in the OCP microscaling formats (MXFP4, MXFP8) and in NVFP4.
inline constexpr int64_t kMxGroup = 32;
inline constexpr int64_t kNvGroup = 16;

/// Gives something of every row, one byte each.
using BytesOfRow = std::function<void(int64_t row, uint8_t* bytes)>;

/// The kept codes of 2:4 weights, k rounded up to a multiple of kSparseRun.
struct KeptRows {
  BytesOfRow codes;      ///< Two codes per block of four; padding has codes of value 0.
  BytesOfRow positions;  ///< The nibble of each block, as QuantizedWeights::metadata has it.
};

/// Tensors, by number, from which a module in the canonical layout is made.
struct RowWeights {
  WeightsSpec spec;
  Exactness exactness = Exactness::kExact;
  SourceLayout layout = SourceLayout::kOutIn;
  size_t codes = 0;           ///< experts * n rows of dense bit strings, lowest bits first.
  uint32_t flip = 0;          ///< XORed to every word of codes.
  bool swap_nibbles = false;  ///< The high nibble of a byte comes first.
  /// Gives the codes of a row in place of `codes`, for packings that are no dense bit strings.
  BytesOfRow unpack;
  KeptRows kept;  ///< In place of `codes` where spec.sparsity is 2:4.
  /// Checks content that the spec's format does not hold, before anything is made. Errors:
  /// kMalformedFile, beginning with the part's name, as Validate's.
  std::function<Status()> check;
  /// [experts, ceil(n / scale_rows), groups], elements as wide as spec.scale_type; nothing: `more`
  /// makes the scales.
  std::optional<size_t> scales;
  int64_t scale_rows = 1;        ///< Rows that share scales.
  std::optional<size_t> biases;  ///< [experts, n, groups], as wide as the scales.
  std::vector<float> global_scale;
  std::vector<float> codebook;
  /// The order in which rows of k are stored, if the spec has one (SortByGroup); `codes` and
  /// `unpack` are in the order of k.
  std::vector<int32_t> permutation;
  std::vector<float> input_scale;  ///< [experts, k], if the spec has them.
  /// Makes what no tensor holds as it is needed.
  std::function<void(WeightsBuffer* buffer)> more;
};

/// Adds a module of these weights. Precondition: the tensors have the sizes that the spec implies.
void AddRows(const std::string& name, RowWeights rows, ModuleTensorFinder* finder,
             ListedReader* reader);

/// The value of weight k of row `row`, which belongs to expert row / n and column row % n.
using ValueOfRow = std::function<void(int64_t row, float* values)>;

/// Adds a module that no format holds as codes: every value in fp32, computed as the writer's own
/// program does.
void AddFloats(const std::string& name, int64_t experts, int64_t k, int64_t n, ValueOfRow values,
               ModuleTensorFinder* finder, ListedReader* reader);

/// fp8 codes [experts, n, k], or [n, k].
struct Fp8Codes {
  Shape shape;
  bool e5m2 = false;
  size_t tensor = 0;  ///< Holds the codes, unless `unpack` gives them.
  BytesOfRow unpack;
  KeptRows kept;  ///< The same codes, if they are 2:4 and k is a multiple of four.
};

/// fp8 codes with a scale for the whole matrix, a row, a group or a
/// block of `block_rows` x `block_columns` (0: unknown), which the shape of the scales tells.
/// Errors: kMalformedFile for other shapes.
Status AddFp8(const std::string& name, Fp8Codes codes, std::string_view scales, int64_t block_rows,
              int64_t block_columns, ModuleTensorFinder* finder, ListedReader* reader);
/// The same for the codes of a tensor, named by its suffix.
Status AddFp8(const std::string& name, std::string_view codes, std::string_view scales,
              int64_t block_rows, int64_t block_columns, ModuleTensorFinder* finder,
              ListedReader* reader);

/// The largest group size that divides k into `groups` and that a spec may have; nothing if the
/// groups do not divide k, or end within kGroupGranule.
std::optional<int64_t> GroupSizeOf(int64_t k, int64_t groups);

}  // namespace marlin
