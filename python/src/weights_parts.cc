#include "weights_parts.h"

#include <fmt/core.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <string_view>

#include "base/checked.h"
#include "element_types.h"
#include "layout/weights_buffer.h"
#include "layout/weights_shapes.h"

namespace marlin::python {
namespace {

/// An array as its framework describes it, in host memory.
struct PartArray {
  Array owner;
  TensorView view;

  std::string ToString() const {
    return fmt::format("{} {}", DTypeName(view.dtype()), view.shape().ToString());
  }
};

PartArray LoadPart(const std::string& name, const nb::object& object) {
  // (an array that nanobind reads, the name of its element type or "" where DLPack tells it).
  const auto [readable, type] = nb::cast<std::pair<nb::object, std::string>>(
      nb::module_::import_("metal_marlin._arrays").attr("part")(name, object));
  // Other types could pass for a part's by their bits.
  const ElementType* const known = FindElementType(type);
  if (known == nullptr && !type.empty()) {
    Refuse(fmt::format("{}: element type {} is not supported", name, type));
  }
  PartArray made;
  if (!nb::try_cast(readable, made.owner) || !made.owner.is_valid()) {
    Refuse(name + ": expected an array in the host's memory, got " +
           nb::type_name(object.type()).c_str());
  }
  made.view = ViewOf(name.c_str(), made.owner);
  if (known != nullptr && known->only_bits) {
    made.view = TensorView(made.view.data(), known->type, made.view.shape());
  } else if (!made.view.IsContiguous()) {
    Refuse(name + ": is not contiguous");
  }
  return made;
}

/// Whether an array of one element type holds numbers of another. NumPy has none for bfloat16 and
/// floats of 8 bits, PyTorch's uint32 lacks most operations: their bits are accepted in place.
bool Holds(DType array, DType stored) {
  switch (stored) {
    case DType::kU32:
      return array == DType::kU32 || array == DType::kI32;
    case DType::kI32:
      return array == DType::kI32;
    case DType::kBf16:
    case DType::kF16:
      return array == stored || array == DType::kU16;
    case DType::kF8E4M3:
    case DType::kF8E8M0:
      return array == stored || array == DType::kU8;
    default:
      return array == stored;
  }
}

/// The name of a stored element type, "u32 or i32".
std::string TypeText(DType stored) {
  return std::string(DTypeName(stored)) + (stored == DType::kU32 ? " or i32" : "");
}

/// Copies an array of `target`'s type and shape; a single matrix may omit the expert dimension.
void CopyPart(const std::string& name, const std::optional<PartArray>& array,
              const TensorView& target, const std::string& context, void* to) {
  if (!array) {
    if (target.empty()) return;
    Refuse(fmt::format("{}: missing, expected {} {}{}", name, TypeText(target.dtype()),
                       target.shape().ToString(), context));
  }
  const TensorView& view = array->view;
  Shape shape = target.shape();
  const bool omits = view.rank() + 1 == shape.rank() || (shape.rank() == 3 && view.rank() < 3);
  if (omits && shape[0] == 1) {
    Shape inner;
    for (int i = 1; i < shape.rank(); ++i) inner.Append(shape[i]);
    shape = inner;
  }
  if (!(view.shape() == shape) || !Holds(view.dtype(), target.dtype())) {
    Refuse(fmt::format("{}: expected {} {}, got {}{}", name, TypeText(target.dtype()),
                       shape.ToString(), array->ToString(), context));
  }
  if (view.ElementCount() > 0) {
    std::memcpy(to, view.data(), static_cast<size_t>(view.ByteCount()));
  }
}

/// Builds weights from the parts of a caller.
class PartsReader {
 public:
  PartsReader(const WeightsParts& parts, const PartsCaller& caller)
      : parts_(parts), caller_(caller) {
    codes_ = Load(caller.codes, parts.codes);
    scales_ = Load("scales", parts.scales);
    zeros_ = Load("zeros", parts.zeros);
    biases_ = Load("biases", parts.biases);
    global_scale_ = Load("global_scale", parts.global_scale);
    metadata_ = Load("metadata", parts.metadata);
    permutation_ = Load("permutation", parts.permutation);
    input_scale_ = Load("input_scale", parts.input_scale);
    super_scales_ = Load("super_scales", parts.super_scales);
    super_biases_ = Load("super_biases", parts.super_biases);
  }

  QuantizedWeights Read() {
    FillSpec();
    WeightsBuffer buffer = Take(AllocateWeights(spec_));
    const QuantizedWeights& made = buffer.weights;
    Copy(caller_.codes, codes_, made.codes, buffer.codes);
    Copy("scales", scales_, made.scales, buffer.scales);
    Copy("zeros", zeros_, made.zeros, buffer.zeros);
    Copy("biases", biases_, made.biases, buffer.biases);
    Copy("global_scale", global_scale_, made.global_scale, buffer.global_scale);
    Copy("metadata", metadata_, made.metadata, buffer.metadata);
    Copy("permutation", permutation_, made.permutation, buffer.permutation);
    Copy("input_scale", input_scale_, made.input_scale, buffer.input_scale);
    Copy("super_scales", super_scales_, made.super_scales, buffer.super_scales);
    Copy("super_biases", super_biases_, made.super_biases, buffer.super_biases);
    buffer.weights.codebook = parts_.codebook;
    CheckNamed(Validate(buffer.weights));
    return std::move(buffer.weights);
  }

 private:
  using Part = std::optional<PartArray>;

  static Part Load(const std::string& name, const nb::object& object) {
    return object.is_none() ? Part() : Part(LoadPart(name, object));
  }

  void Copy(const std::string& name, const Part& array, const TensorView& target, void* to) const {
    CopyPart(name, array, target, Context(), to);
  }

  /// Throws the error of a check, with the caller's name of the codes.
  void CheckNamed(const Status& status) const {
    constexpr std::string_view kCodes = "codes";
    std::string message(status.message());
    if (message.starts_with("codes:")) message.replace(0, kCodes.size(), caller_.codes);
    Check(status.ok() ? status : Status(status.code(), message));
  }

  /// The origin of the expected sizes, " (packed [8, 48], fp4_e2m1, group_size=32)".
  std::string Context() const {
    return fmt::format(" ({} {}, {}, k={}, group_size={})", caller_.codes,
                       codes_->view.shape().ToString(), FormatName(spec_.format), spec_.k,
                       parts_.group_size);
  }

  bool Quantized() const { return GetFormatInfo(spec_.format).quantized; }

  /// Rows of the codes of k inputs.
  int64_t CodeRows(int64_t k) const {
    WeightsSpec spec = spec_;
    spec.k = k;
    return Quantized() ? WordsAlongK(spec) : k;
  }

  /// The largest k that has the codes' rows; -1 if none has.
  int64_t LargestK(int64_t rows) const {
    if (!Quantized()) return rows;
    int64_t k = 0;
    if (spec_.sparsity == Sparsity::k24) {
      k = rows / (GetFormatInfo(spec_.format).bits / 2) * 32;
    } else {
      const int bits = GetFormatInfo(spec_.format).bits;
      k = 32 % bits == 0 ? rows * (32 / bits) : rows / bits * 32;
    }
    return CodeRows(k) == rows ? k : -1;
  }

  bool OneGroup() const { return parts_.group_size <= 0; }
  int64_t Groups(int64_t k) const {
    if (k <= 0) return 0;
    return OneGroup() ? 1 : (k + parts_.group_size - 1) / parts_.group_size;
  }

  void FillSpec() {
    spec_.format = Take(ParseFormat(parts_.format));
    spec_.sparsity = metadata_ ? Sparsity::k24 : Sparsity::kDense;
    if (!codes_) Refuse(caller_.codes + ": missing");
    FillSizes();
    spec_.group_size = Take(NormalizeGroupSize(Quantized() ? parts_.group_size : 0, spec_.k));
    spec_.super_group_size = parts_.super_group_size;
    spec_.has_zeros = zeros_.has_value();
    spec_.has_biases = biases_.has_value();
    spec_.has_global_scale = global_scale_.has_value();
    spec_.global_scale_divides = parts_.global_scale_divides;
    spec_.has_permutation = permutation_.has_value();
    spec_.has_input_scale = input_scale_.has_value();
    spec_.input_hadamard = parts_.input_hadamard;
    const bool two_levels = spec_.super_group_size > 0;
    const Part& numbers = two_levels ? super_scales_ : scales_;
    const char* const name = two_levels ? "super_scales" : "scales";
    spec_.scale_type = TypeOf(name, "scale_type", parts_.scale_type, numbers, true);
    spec_.zero_type = TypeOf("zeros", "zero_type", parts_.zero_type, zeros_, false);
    if (!spec_.has_zeros) spec_.zero_type = ScaleType::kF16;
  }

  void FillSizes() {
    const Shape& shape = codes_->view.shape();
    const int rank = shape.rank();
    if (rank != 2 && rank != 3) {
      Refuse(fmt::format("{}: expected [rows, n] or [experts, rows, n], got {}", caller_.codes,
                         codes_->ToString()));
    }
    const DType stored = Quantized() ? DType::kU32 : UnquantizedDType(spec_.format);
    if (!Holds(codes_->view.dtype(), stored)) {
      Refuse(fmt::format("{}: expected {}, got {} ({})", caller_.codes, TypeText(stored),
                         codes_->ToString(), FormatName(spec_.format)));
    }
    spec_.experts = parts_.experts >= 0 ? parts_.experts : (rank == 3 ? shape[0] : 1);
    spec_.n = parts_.n >= 0 ? parts_.n : shape[rank - 1];
    const int64_t rows = shape[rank - 2];
    const int64_t largest = LargestK(rows);
    if (!caller_.x_shape.empty()) return TakeInputs(rows, largest);
    if (parts_.k >= 0) {
      spec_.k = parts_.k;
      return;
    }
    if (largest < 0) {
      Refuse(fmt::format("{}: {} rows are no whole number of {}-bit codes ({})", caller_.codes,
                         rows, GetFormatInfo(spec_.format).bits, FormatName(spec_.format)));
    }
    spec_.k = largest;
    spec_.k = std::min(largest, LargestKOfGroups(rows));
  }

  /// The largest k of the scales' rows if the codes' rows fit it; INT64_MAX if they do not. Padding
  /// codes of the last word are not weights, which the number of groups tells.
  int64_t LargestKOfGroups(int64_t rows) const {
    if (OneGroup() || GroupRows() <= 0) return INT64_MAX;
    const std::optional<int64_t> k = (Checked(GroupRows()) * Checked(parts_.group_size)).Take();
    return k && CodeRows(*k) == rows ? *k : INT64_MAX;
  }

  /// Rows of the scales; -1 without scales.
  int64_t GroupRows() const {
    if (!scales_ || scales_->view.rank() < 2) return -1;
    return scales_->view.dim(scales_->view.rank() - 2);
  }

  /// k is taken from x. Two of x, codes and scales that agree say which one is wrong.
  void TakeInputs(int64_t rows, int64_t largest) {
    spec_.k = caller_.x_shape.back();
    if (CodeRows(spec_.k) == rows) return;
    const auto fits_scales = [this](int64_t k) { return !Quantized() || Groups(k) == GroupRows(); };
    const bool codes_fit = largest >= 0 && fits_scales(std::min(largest, LargestKOfGroups(rows)));
    if (!codes_fit && spec_.k > 0 && fits_scales(spec_.k)) {
      // The codes are wrong; n is taken from the scales, too.
      if (scales_ && parts_.n < 0) spec_.n = scales_->view.dim(scales_->view.rank() - 1);
      return;
    }
    Shape shape;
    for (const int64_t dim : caller_.x_shape) shape.Append(dim);
    const std::string sizes =
        fmt::format("{} {}, {}, group_size={}", caller_.codes, codes_->view.shape().ToString(),
                    FormatName(spec_.format), parts_.group_size);
    if (largest < 0) {
      Refuse(fmt::format("{}: {} rows are no whole number of {}-bit codes ({})", caller_.codes,
                         rows, GetFormatInfo(spec_.format).bits, sizes));
    }
    Refuse(fmt::format("x: expected [..., {}], got {} ({})", largest, shape.ToString(), sizes));
  }

  /// The scale type that an argument names, or else the array's.
  ScaleType TypeOf(const char* name, const char* argument, const std::string& given,
                   const Part& array, bool is_scale) const {
    if (!given.empty()) return Take(ParseScaleType(given));
    if (!array) return ScaleType::kF16;
    switch (array->view.dtype()) {
      case DType::kF16:
        return ScaleType::kF16;
      case DType::kBf16:
      case DType::kU16:  // NumPy has no bfloat16: QuantizedWeights.scales are its bits.
        return ScaleType::kBf16;
      case DType::kF32:
        return ScaleType::kF32;
      case DType::kF8E8M0:
        if (is_scale) return ScaleType::kE8M0;
        break;
      case DType::kF8E4M3:
        if (is_scale) return ScaleType::kE4M3;
        break;
      case DType::kU8:
        if (!is_scale) break;
        if (global_scale_) return ScaleType::kE4M3;  // No other type has one.
        Refuse(fmt::format("{}: {} may be e8m0 or e4m3; {}=\"e8m0\" or \"e4m3\" says which", name,
                           array->ToString(), argument));
      default:
        break;
    }
    Refuse(fmt::format("{}: expected f16, bf16{}, got {}{}", name,
                       is_scale ? ", f32, f8_e8m0 or f8_e4m3" : " or f32", array->ToString(),
                       Context()));
  }

  const WeightsParts& parts_;
  const PartsCaller& caller_;
  WeightsSpec spec_;
  Part codes_;
  Part scales_;
  Part zeros_;
  Part biases_;
  Part global_scale_;
  Part metadata_;
  Part permutation_;
  Part input_scale_;
  Part super_scales_;
  Part super_biases_;
};

}  // namespace

QuantizedWeights MakeWeights(const WeightsParts& parts, const PartsCaller& caller) {
  return PartsReader(parts, caller).Read();
}

void BindWeightsParts(nb::module_& module) {
  nb::class_<WeightsParts>(
      module, "WeightsParts",
      "The arrays of quantized weights, of NumPy, PyTorch, MLX, CuPy or DLPack. Sizes of -1 and "
      "types of \"\" are taken from the arrays; uint16 is bfloat16's bits.")
      .def(nb::init<>(), "No arrays yet; set those that the weights have.")
      .def_rw("format", &WeightsParts::format, "The name of the weight format, as in mm.formats().")
      .def_rw("k", &WeightsParts::k, "Input features; -1: of the arrays.")
      .def_rw("n", &WeightsParts::n, "Output features; -1: of the arrays.")
      .def_rw("experts", &WeightsParts::experts, "Matrices of a stack; -1: of the arrays.")
      .def_rw("group_size", &WeightsParts::group_size,
              "Weights along K that share a scale; 0: all of K; -1: of the arrays.")
      .def_rw("scale_type", &WeightsParts::scale_type,
              "\"fp16\", \"bf16\", \"fp32\", \"e8m0\" or \"e4m3\"; \"\": of the array.")
      .def_rw("zero_type", &WeightsParts::zero_type,
              "The type of zeros, as scale_type; \"\": of the array.")
      .def_rw(
          "codes", &WeightsParts::codes,
          "uint32 or int32 [words, n]: k-packed codes; of unquantized formats the values [k, n].")
      .def_rw("scales", &WeightsParts::scales,
              "[groups, n]: what codes are multiplied with; None: no scales.")
      .def_rw("zeros", &WeightsParts::zeros, "[groups, n]: the code of zero; None: no zeros.")
      .def_rw("biases", &WeightsParts::biases,
              "[groups, n]: what is added to scaled codes; None: no biases.")
      .def_rw("global_scale", &WeightsParts::global_scale,
              "float32 [experts]: a second level of scales; None: 1.")
      .def_rw("global_scale_divides", &WeightsParts::global_scale_divides,
              "Whether scales are divided by global_scale, not multiplied.")
      .def_rw("metadata", &WeightsParts::metadata,
              "uint32 [ceil(k / 32), n]: the positions of 2:4 sparse weights; None: dense.")
      .def_rw("permutation", &WeightsParts::permutation,
              "int32 [k]: row i of the codes is row permutation[i] of W; None: in order.")
      .def_rw("input_scale", &WeightsParts::input_scale,
              "float32 [k]: multiplies the columns of x first; None: 1.")
      .def_rw("input_hadamard", &WeightsParts::input_hadamard,
              "The size of the Hadamard blocks that rotate the columns of x; 0: none.")
      .def_rw("super_group_size", &WeightsParts::super_group_size,
              "Rows that share a super scale; 0: one level of scales.")
      .def_rw("super_scales", &WeightsParts::super_scales,
              "[super groups, n]: what int8 scales are multiplied with; None: one level.")
      .def_rw("super_biases", &WeightsParts::super_biases,
              "[super groups, n]: what int8 biases are multiplied with; None: one level.")
      .def_rw("codebook", &WeightsParts::codebook,
              "The values of the codes; empty: the format's own.");
  module.def(
      "make_weights",
      [](const WeightsParts& parts, const std::string& codes, const std::vector<int64_t>& x_shape) {
        return MakeWeights(parts, {codes, x_shape});
      },
      nb::arg("parts"), nb::arg("codes") = "codes", nb::arg("x_shape") = std::vector<int64_t>(),
      "QuantizedWeights.from_parts with the caller's name of the codes; with x_shape, k is the "
      "last "
      "dimension of a product's input.");
}

}  // namespace marlin::python
