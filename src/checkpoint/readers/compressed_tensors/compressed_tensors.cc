// compressed-tensors, as llm-compressor and vLLM use it. The tensors of a module tell its format:
//   X.weight_packed i32  pack-quantized: integers of 2 to 8 bits as code + 2^(bits - 1), along k
//   X.weight_packed u8   nvfp4-pack-quantized or mxfp4-pack-quantized: two E2M1 codes a byte, and
//                        mxfp6-pack-quantized: four E2M3 codes in three bytes
//   X.weight f8 or i8    float-quantized, int-quantized, naive-quantized, mxfp8-quantized
//   X.meta i16           marlin-24; X.compressed: a bitmask (compressed_tensors_24.h)
// X.weight_scale is [n, groups], or [n / rows, k / columns] for blocks, or one number.
#include <fmt/core.h>

#include <array>
#include <charconv>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/scalars.h"
#include "checkpoint/codes/row_weights.h"
#include "checkpoint/codes/unpack.h"
#include "checkpoint/readers/compressed_tensors/compressed_tensors_24.h"
#include "checkpoint/readers/compressed_tensors/compressed_tensors_transforms.h"
#include "layout/parameters.h"
#include "layout/permutation.h"
#include "recipe/model_config.h"

namespace marlin {
namespace {

struct CtGroup {
  std::vector<std::string> targets;
  int64_t bits = 8;  // 0: unknown.
  int64_t block_rows = 0;
  int64_t block_columns = 0;
};

struct CtConfig {
  std::string where;
  std::vector<CtGroup> groups;
  BitmaskFormat bitmask = BitmaskFormat::kNone;
  CtTransforms transforms;
  bool dense_packing = true;  // How 3, 5, 6 and 7 bits are packed where the shapes do not tell.

  /// The group that a module is in: the first one if no target names it.
  const CtGroup& GroupOf(const std::string& base) const {
    static const CtGroup kNone{{}, 0, 0, 0};
    for (const CtGroup& group : groups) {
      for (const std::string& target : group.targets) {
        if (MatchesTarget(target, base)) return group;
      }
    }
    return groups.empty() ? kNone : groups.front();
  }
};

// Since 0.18 codes of 3, 5, 6 and 7 bits may cross words; before, words held whole codes.
bool PacksDensely(const std::string& version) {
  int major = 0;
  int minor = 0;
  const char* const end = version.data() + version.size();
  const auto first = std::from_chars(version.data(), end, major);
  if (first.ec != std::errc() || first.ptr == end) return true;
  const auto second = std::from_chars(first.ptr + 1, end, minor);
  return second.ec != std::errc() || major > 0 || minor >= 18;
}

Result<CtGroup> ReadGroup(ModelConfig group) {
  CtGroup read;
  read.targets = group.StringsOrEmpty("targets");
  ModelConfig weights = group.Nested("weights");
  read.bits = weights.SizeOr("num_bits", 8, 8);
  const std::vector<int64_t> block = weights.IntegersOrEmpty("block_structure");
  MARLIN_RETURN_IF_ERROR(group.status());
  MARLIN_RETURN_IF_ERROR(weights.status());
  if (block.size() == 2 && block[0] > 0 && block[1] > 0) {
    read.block_rows = block[0];
    read.block_columns = block[1];
  }
  return read;
}

Result<CtConfig> ReadCtConfig(const QuantMethod& method) {
  ModelConfig json = ModelConfig::Of(*method.config, method.where);
  CtConfig config;
  config.where = method.where;
  config.dense_packing = PacksDensely(json.StringOr("version", ""));
  ModelConfig sparsity = json.Nested("sparsity_config");
  const std::string sparse = sparsity.StringOr("format", "dense");
  MARLIN_RETURN_IF_ERROR(json.status());
  MARLIN_RETURN_IF_ERROR(sparsity.status());
  if (sparse == "sparse-24-bitmask") {
    config.bitmask = BitmaskFormat::kSparse24;
  } else if (sparse == "sparse-bitmask") {
    config.bitmask = BitmaskFormat::kAny;
  } else if (sparse != "dense") {
    return Status(Code::kUnsupported,
                  fmt::format("{}: sparsity_config: format \"{}\" is not supported; supported: "
                              "dense, sparse-24-bitmask, sparse-bitmask",
                              method.where, Printable(sparse)));
  }
  MARLIN_ASSIGN_OR_RETURN(config.transforms, CtTransforms::Parse(*method.config, method.where));
  const auto groups = method.config->find("config_groups");
  if (groups == method.config->end() || !groups->is_object()) return config;
  ModelConfig nested = json.Nested("config_groups");
  for (const auto& [name, value] : groups->items()) {
    MARLIN_ASSIGN_OR_RETURN(CtGroup group, ReadGroup(nested.Nested(name)));
    MARLIN_RETURN_IF_ERROR(nested.status());
    config.groups.push_back(std::move(group));
  }
  return config;
}

/// Codes of `bits` bits of consecutive words `stride` apart, from number `index`.
struct Packing {
  const std::byte* data;
  int bits;
  bool dense;

  int CodeAt(int64_t stride, int64_t first, int64_t index) const {
    const int64_t per_word = 32 / bits;
    const int64_t bit = dense ? index * bits : index / per_word * 32 + index % per_word * bits;
    uint64_t window = WordAt(data, first + bit / 32 * stride);
    if (bit % 32 + bits > 32) {
      window |= uint64_t{WordAt(data, first + (bit / 32 + 1) * stride)} << 32;
    }
    return static_cast<int>((window >> (bit % 32)) & ((1u << bits) - 1));
  }
};

/// [n, k] of packed codes.
Result<std::pair<int64_t, int64_t>> ReadWeightShape(ModuleTensorFinder* finder) {
  MARLIN_ASSIGN_OR_RETURN(const size_t shape, finder->Need(ModulePart::kCodes, ".weight_shape",
                                                           {DType::kI64, DType::kI32}, {2}));
  const std::byte* data = finder->Data(shape);
  const auto dim = [&](int64_t i) -> int64_t {
    if (finder->TypeOf(shape) == DType::kI32) return static_cast<int32_t>(WordAt(data, i));
    return static_cast<int64_t>(uint64_t{WordAt(data, 2 * i)} | uint64_t{WordAt(data, 2 * i + 1)}
                                                                    << 32);
  };
  const int64_t n = dim(0);
  const int64_t k = dim(1);
  if (n >= 1 && k >= 1 && n <= INT32_MAX && k <= INT32_MAX) return std::pair(n, k);
  return finder->Malformed(".weight_shape", fmt::format("[{}, {}] is not a shape", n, k));
}

// The global scale divides.
Result<float> GlobalScale(ModuleTensorFinder* finder) {
  MARLIN_ASSIGN_OR_RETURN(const size_t global, finder->Need(ModulePart::kGlobalScale,
                                                            ".weight_global_scale", {DType::kF32}));
  if (finder->ShapeOf(global).ElementCount() != 1) {
    return finder->Malformed(".weight_global_scale",
                             "expected one number, got " + finder->ShapeOf(global).ToString());
  }
  return ParameterAt(finder->Data(global), DType::kF32, 0);
}

/// E2M1 and E2M3 codes with a scale for each group of k, which tells the group's size.
Status AddPackedFloat(const std::string& name, ModuleTensorFinder* finder, ListedReader* reader) {
  MARLIN_ASSIGN_OR_RETURN(const size_t codes_tensor,
                          finder->Need(ModulePart::kCodes, ".weight_packed", {DType::kU8}));
  MARLIN_ASSIGN_OR_RETURN(const size_t scales_tensor,
                          finder->Need(ModulePart::kScales, ".weight_scale",
                                       {DType::kF8E4M3, DType::kU8, DType::kF8E8M0}));
  const Shape& codes = finder->ShapeOf(codes_tensor);
  const Shape& scales = finder->ShapeOf(scales_tensor);
  const bool nvfp4 = finder->TypeOf(scales_tensor) == DType::kF8E4M3;
  const int64_t group = nvfp4 ? kNvGroup : kMxGroup;
  const bool matrices =
      codes.rank() == 2 && scales.rank() == 2 && codes[0] == scales[0] && codes.ElementCount() > 0;
  const int64_t n = matrices ? codes[0] : 0;
  const int64_t groups = matrices ? scales[1] : 0;
  const int64_t k = (Checked(groups) * Checked(group)).Take().value_or(0);
  const bool fp4 = k > 0 && codes[1] == k / 2;
  const bool fp6 = k > 0 && !nvfp4 && codes[1] == k / 4 * 3;
  if (!fp4 && !fp6) {
    return finder->Malformed(".weight_packed", fmt::format("{} does not fit scales {}",
                                                           codes.ToString(), scales.ToString()));
  }
  RowWeights rows;
  rows.codes = codes_tensor;
  rows.scales = scales_tensor;
  rows.spec = {.format = fp4 ? Format::kFp4E2M1 : Format::kFp6E2M3,
               .k = k,
               .n = n,
               .group_size = group,
               .scale_type = nvfp4 ? ScaleType::kE4M3 : ScaleType::kE8M0,
               .has_global_scale = nvfp4,
               .global_scale_divides = nvfp4};
  if (nvfp4) {
    MARLIN_ASSIGN_OR_RETURN(const float global, GlobalScale(finder));
    rows.global_scale = {global};
  }
  AddRows(name, std::move(rows), finder, reader);
  return {};
}

class CtFinder {
 public:
  CtFinder(const TensorStore& store, const CtConfig& config, const std::string& base)
      : store_(store),
        config_(config),
        group_(config.GroupOf(base)),
        finder_(store, base),
        name_(base + ".weight") {}

  Status AddTo(ListedReader* reader) {
    reader_ = reader;
    finder_.TakeUnused({".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale",
                        ".output_zero_point", ".weight_observer_min", ".weight_observer_max"});
    if (config_.bitmask != BitmaskFormat::kNone && finder_.Has(".compressed")) return AddBitmask();
    if (finder_.Has(".meta") || finder_.Has(".scale_packed")) {
      return AddMarlin24(name_, group_.bits, &finder_, reader);
    }
    if (const TensorInfo* packed = finder_.Look(".weight_packed"); packed != nullptr) {
      if (packed->dtype == DType::kI32) return AddPacked();
      return AddPackedFloat(name_, &finder_, reader);
    }
    const TensorInfo* weight = finder_.Look(".weight");
    if (weight == nullptr) return finder_.Malformed(".weight", "is missing");
    if (weight->dtype == DType::kI8) return AddInt8();
    return AddFp8(name_, ".weight", ".weight_scale", group_.block_rows, group_.block_columns,
                  &finder_, reader);
  }

 private:
  // Codes of 8 bits that were compressed once more.
  Status AddBitmask() {
    MARLIN_ASSIGN_OR_RETURN(
        BitmaskTensor found,
        FindBitmask(config_.bitmask, {DType::kI8, DType::kF8E4M3, DType::kF8E5M2}, &finder_));
    if (found.shape.rank() != 2) {
      return finder_.Malformed(".shape", "expected [n, k], got " + found.shape.ToString());
    }
    const KeptRows kept = found.blocks_in_rows ? found.Kept() : KeptRows();
    const DType dtype = found.dtype;
    const Shape shape = found.shape;
    BytesOfRow unpack = [found = std::make_shared<const BitmaskTensor>(std::move(found))](
                            int64_t row, uint8_t* codes) {
      found->Expand(row, reinterpret_cast<std::byte*>(codes));
    };
    if (dtype == DType::kI8) return AddInt8(shape, std::move(unpack), kept);
    return AddFp8(name_, {shape, dtype == DType::kF8E5M2, 0, std::move(unpack), kept},
                  ".weight_scale", group_.block_rows, group_.block_columns, &finder_, reader_);
  }

  // The scales of integers: one number, or [n, groups].
  Status FindScales() {
    MARLIN_ASSIGN_OR_RETURN(scales_,
                            finder_.Need(ModulePart::kScales, ".weight_scale", kFloatTypes));
    const Shape& shape = finder_.ShapeOf(scales_);
    whole_ = shape.ElementCount() == 1;
    groups_ = shape.rank() == 2 ? shape[1] : 1;
    const bool fits = whole_ || (shape.rank() >= 1 && shape.rank() <= 2 && shape[0] == n_);
    const std::optional<int64_t> size = GroupSizeOf(k_, groups_);
    if (!fits || !size) {
      return finder_.Malformed(".weight_scale",
                               fmt::format("{} does not fit [{}, {}]", shape.ToString(), n_, k_));
    }
    group_size_ = *size;
    return {};
  }

  // Zeros are packed along n, like codes along k, or stored one by one.
  Status FindZeros(int bits, bool packed) {
    if (!finder_.Has(".weight_zero_point")) return {};
    const std::string_view suffix = ".weight_zero_point";
    const int64_t words = dense_ ? CeilDivide(n_ * bits, 32) : CeilDivide(n_, 32 / bits);
    if (packed && finder_.Look(suffix)->dtype == DType::kI32) {
      MARLIN_ASSIGN_OR_RETURN(
          zeros_, finder_.Need(ModulePart::kZeros, suffix, {DType::kI32}, {words, groups_}));
      packed_zeros_ = true;
      return {};
    }
    MARLIN_ASSIGN_OR_RETURN(zeros_, finder_.Need(ModulePart::kZeros, suffix, {DType::kI8}));
    if (finder_.ShapeOf(*zeros_).ElementCount() != (whole_ ? 1 : n_ * groups_)) {
      return finder_.Malformed(
          suffix, fmt::format("{} does not fit [{}, {}]", finder_.ShapeOf(*zeros_).ToString(), n_,
                              groups_));
    }
    return {};
  }

  Status AddPacked() {
    MARLIN_ASSIGN_OR_RETURN(codes_,
                            finder_.Need(ModulePart::kCodes, ".weight_packed", {DType::kI32}));
    const Shape& shape = finder_.ShapeOf(codes_);
    MARLIN_ASSIGN_OR_RETURN(std::tie(n_, k_), ReadWeightShape(&finder_));
    const int64_t bits = group_.bits == 0 ? 4 : group_.bits;
    const std::optional<int64_t> dense_words =
        CeilDiv(Checked(k_) * Checked(bits), Checked(32)).Take();
    const int64_t whole_words = CeilDivide(k_, 32 / bits);
    const bool fits_dense = dense_words && shape.rank() == 2 && shape[1] == *dense_words;
    const bool fits_whole = shape.rank() == 2 && shape[1] == whole_words;
    if (bits < 2 || shape.rank() != 2 || shape[0] != n_ || !(fits_dense || fits_whole)) {
      return finder_.Malformed(".weight_packed",
                               fmt::format("{} does not hold [{}, {}] codes of {} bits",
                                           shape.ToString(), n_, k_, bits));
    }
    dense_ = fits_dense && (!fits_whole || config_.dense_packing);
    bits_ = static_cast<int>(bits);
    MARLIN_RETURN_IF_ERROR(FindScales());
    MARLIN_RETURN_IF_ERROR(FindZeros(bits_, true));
    MARLIN_RETURN_IF_ERROR(FindGroupIndex());
    // Groups of unequal sizes have no format of their own.
    if (group_index_ && permutation_.empty()) return AddPackedFloats();
    RowWeights rows = Rows(IntegerFormat(bits_, zeros_.has_value()));
    rows.spec.has_permutation = group_index_.has_value();
    rows.permutation = std::move(permutation_);
    rows.codes = codes_;
    if (rows.spec.format == Format::kS8 && bits_ == 8) rows.flip = 0x80808080u;
    const bool straddles = 32 % bits_ != 0;
    if (bits_ == 7 || (straddles && !dense_)) {
      rows.unpack = Unpacker(bits_ == 7 && !zeros_ ? 1 << (bits_ - 1) : 0);
    }
    AddRows(name_, std::move(rows), &finder_, reader_);
    return {};
  }

  /// Codes less `offset`, as bytes.
  std::function<void(int64_t, uint8_t*)> Unpacker(int offset) const {
    const Packing packing{store_.Data(codes_), bits_, dense_};
    const int64_t words = finder_.ShapeOf(codes_)[1];
    return [=, k = k_](int64_t row, uint8_t* codes) {
      if (packing.dense) {
        UnpackDense(packing.data + row * words * 4, packing.bits, k, codes);
        for (int64_t i = 0; i < k; ++i) codes[i] = static_cast<uint8_t>(codes[i] - offset);
        return;
      }
      for (int64_t i = 0; i < k; ++i) {
        codes[i] = static_cast<uint8_t>(packing.CodeAt(1, row * words, i) - offset);
      }
    };
  }

  /// Weights with these scales and zeros; zeros count from the middle, except for unsigned formats.
  RowWeights Rows(Format format) const {
    RowWeights rows;
    rows.spec = {.format = format,
                 .k = k_,
                 .n = n_,
                 .group_size = group_size_,
                 .scale_type = *ScaleTypeOf(finder_.TypeOf(scales_)),
                 .has_zeros = zeros_.has_value()};
    rows.scales = scales_;
    rows.scale_rows = whole_ ? n_ : 1;
    if (!zeros_) return rows;
    const bool is_unsigned = GetFormatInfo(format).min_value >= 0;
    const int base = is_unsigned ? 1 << (bits_ - 1) : 0;
    rows.more = [zero = Zeros(), base](WeightsBuffer* buffer) {
      StoreZeros([&](int64_t row, int64_t group) { return zero(row, group) + base; }, *buffer);
    };
    return rows;
  }

  /// The zero of row n and group g, counted from the middle of the codes.
  std::function<int(int64_t, int64_t)> Zeros() const {
    if (!zeros_) return [](int64_t, int64_t) { return 0; };
    const std::byte* data = store_.Data(*zeros_);
    if (packed_zeros_) {
      const Packing packing{data, bits_, dense_};
      return [=, groups = groups_, middle = 1 << (bits_ - 1)](int64_t n, int64_t g) {
        return packing.CodeAt(groups, g, n) - middle;
      };
    }
    return [=, groups = groups_, whole = whole_](int64_t n, int64_t g) {
      return static_cast<int>(static_cast<int8_t>(data[whole ? 0 : n * groups + g]));
    };
  }

  Status AddPackedFloats() {
    const Packing packing{store_.Data(codes_), bits_, dense_};
    const int64_t words = finder_.ShapeOf(codes_)[1];
    const std::byte* scales = store_.Data(scales_);
    const std::byte* index = store_.Data(*group_index_);
    const DType type = finder_.TypeOf(scales_);
    AddFloats(
        name_, 1, k_, n_,
        [=, zero = Zeros(), k = k_, groups = groups_, whole = whole_, middle = 1 << (bits_ - 1)](
            int64_t row, float* values) {
          for (int64_t i = 0; i < k; ++i) {
            const int64_t g = WordAt(index, i);
            if (g >= groups) return;  // Checked at opening: the file has changed since.
            const float scale = ParameterAt(scales, type, whole ? 0 : row * groups + g);
            const int code = packing.CodeAt(1, row * words, i) - middle;
            values[i] = scale * static_cast<float>(code - zero(row, g));
          }
        },
        &finder_, reader_);
    return {};
  }

  // Older files of actorder "group" have the group of each k.
  Status FindGroupIndex() {
    if (!finder_.Has(".weight_g_idx")) return {};
    MARLIN_ASSIGN_OR_RETURN(const size_t index,
                            finder_.Need(ModulePart::kCodes, ".weight_g_idx", {DType::kI32}, {k_}));
    bool consecutive = true;
    std::vector<int32_t> groups(static_cast<size_t>(k_));
    for (int64_t k = 0; k < k_; ++k) {
      const auto group = static_cast<int32_t>(WordAt(store_.Data(index), k));
      // Stands for no index in the program that writes these files, wherever it is.
      if (group == -1) return {};
      if (group < 0 || group >= groups_) {
        return finder_.Malformed(".weight_g_idx",
                                 fmt::format("group {} of {} at [{}]", group, groups_, k));
      }
      consecutive = consecutive && group == k / group_size_;
      groups[static_cast<size_t>(k)] = group;
    }
    if (consecutive) return {};
    group_index_ = index;
    permutation_ = SortByGroup(groups, group_size_);
    return {};
  }

  Status AddInt8() {
    MARLIN_ASSIGN_OR_RETURN(codes_, finder_.Need(ModulePart::kCodes, ".weight", {DType::kI8}));
    return AddInt8(finder_.ShapeOf(codes_), nullptr, {});
  }

  Status AddInt8(const Shape& shape, BytesOfRow unpack, const KeptRows& kept) {
    if (shape.rank() != 2 || shape.ElementCount() < 1) {
      return finder_.Malformed(".weight", "expected [n, k], got " + shape.ToString());
    }
    n_ = shape[0];
    k_ = shape[1];
    bits_ = 8;
    MARLIN_RETURN_IF_ERROR(FindScales());
    MARLIN_RETURN_IF_ERROR(FindZeros(8, false));
    RowWeights rows = Rows(Format::kS8);
    rows.codes = codes_;
    rows.unpack = std::move(unpack);
    // The code of weight 0 depends on zeros.
    if (kept.codes && !zeros_) {
      rows.spec.sparsity = Sparsity::k24;
      rows.kept = kept;
    }
    AddRows(name_, std::move(rows), &finder_, reader_);
    return {};
  }

  const TensorStore& store_;
  const CtConfig& config_;
  const CtGroup& group_;
  ModuleTensorFinder finder_;
  std::string name_;
  ListedReader* reader_ = nullptr;
  int64_t n_ = 0;
  int64_t k_ = 0;
  int64_t groups_ = 1;
  int64_t group_size_ = 0;
  int bits_ = 8;
  bool dense_ = true;   // Codes may cross words.
  bool whole_ = false;  // One scale for the whole matrix.
  bool packed_zeros_ = false;
  size_t codes_ = 0;
  size_t scales_ = 0;
  std::optional<size_t> zeros_;
  std::optional<size_t> group_index_;  // Nothing: groups are consecutive.
  std::vector<int32_t> permutation_;   // Sorts k by group_index_; empty: nothing does.
};

/// Replaces the parts of tensors in floating point by the tensors. Version 0.3 compressed them all
/// and kept their whole names; later ones name the module of a weight.
Status ExpandPlain(BitmaskFormat format, TensorStore* store) {
  std::vector<size_t> replaced;
  std::vector<ComputedTensor> made;
  for (const std::string& base : BasesWithSuffix(*store, ".compressed")) {
    ModuleTensorFinder finder(*store, base);
    if (finder.Has(".weight_scale")) continue;
    MARLIN_ASSIGN_OR_RETURN(BitmaskTensor found, FindBitmask(format, kFloatTypes, &finder));
    for (const PartTensor& part : finder.TakeParts()) replaced.push_back(part.tensor);
    const bool named = base.ends_with(".weight") || base.ends_with(".bias");
    const TensorInfo& values = store->tensors[found.values_tensor];
    TensorInfo info{named ? base : base + ".weight",
                    found.dtype,
                    found.shape,
                    values.file,
                    values.offset,
                    found.shape.ElementCount() * DTypeBytes(found.dtype)};
    if (store->FindTensor(info.name)) {
      return finder.Malformed(".compressed", "is stored both plain and compressed");
    }
    made.push_back({std::move(info), [found = std::move(found)](std::byte* out) {
                      const int64_t bytes = found.columns * DTypeBytes(found.dtype);
                      for (int64_t row = 0; row < found.rows; ++row) {
                        found.Expand(row, out + row * bytes);
                      }
                    }});
  }
  return made.empty() ? Status() : ReplaceTensors(replaced, std::move(made), store);
}

}  // namespace

OpenReader OpenCompressedTensors;

Result<std::unique_ptr<const ModuleReader>> OpenCompressedTensors(TensorStore& store,
                                                                  const QuantMethod& method) {
  MARLIN_ASSIGN_OR_RETURN(const CtConfig config, ReadCtConfig(method));
  if (config.bitmask != BitmaskFormat::kNone) {
    MARLIN_RETURN_IF_ERROR(ExpandPlain(config.bitmask, &store));
  }
  MARLIN_RETURN_IF_ERROR(config.transforms.DropMatrices(&store));
  std::set<std::string> bases;
  for (const char* suffix : {".weight_packed", ".weight_scale"}) {
    for (std::string& base : BasesWithSuffix(store, suffix)) bases.insert(std::move(base));
  }
  return ListedReader::Open(store, [&](ListedReader* reader) -> Status {
    for (const std::string& base : bases) {
      MARLIN_RETURN_IF_ERROR(CtFinder(store, config, base).AddTo(reader));
      if (!config.transforms.rotates_inputs()) continue;
      MARLIN_ASSIGN_OR_RETURN(const int64_t hadamard,
                              config.transforms.HadamardOf(base, reader->last().k));
      if (hadamard > 0) MARLIN_RETURN_IF_ERROR(reader->RotateLast(hadamard));
    }
    MARLIN_RETURN_IF_ERROR(config.transforms.CheckPlain(store));
    return {};
  });
}

}  // namespace marlin
