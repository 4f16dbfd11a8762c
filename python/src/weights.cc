// Quantized weights, packing and unpacking.
#include "marlin/weights.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>

#include "core.h"
#include "layout/weights_buffer.h"
#include "marlin/layout.h"
#include "marlin/quantize.h"

namespace marlin::python {
namespace {

using OptionalArray = std::optional<Array>;

/// Copies an array with the shape and element size of `target`; types of equal size are
/// reinterpreted (uint8 for the 8-bit floats, uint16 for bfloat16).
void CopyPart(const char* name, const OptionalArray& array, const TensorView& target, void* to) {
  if (!array) {
    if (target.empty()) return;
    throw StatusError(Status(Code::kInvalidArgument, std::string(name) + ": missing"));
  }
  const TensorView view = ViewOf(name, *array);
  Shape shape = target.shape();
  // A single matrix may omit the expert dimension.
  if (view.rank() + 1 == shape.rank() && shape[0] == 1) {
    Shape inner;
    for (int i = 1; i < shape.rank(); ++i) inner.Append(shape[i]);
    shape = inner;
  }
  if (!(view.shape() == shape) || DTypeBytes(view.dtype()) != DTypeBytes(target.dtype()) ||
      !view.IsContiguous()) {
    throw StatusError(Status(Code::kInvalidArgument, std::string(name) + ": expected contiguous " +
                                                         std::string(DTypeName(target.dtype())) +
                                                         " " + shape.ToString() + ", got " +
                                                         std::string(DTypeName(view.dtype())) +
                                                         " " + view.shape().ToString()));
  }
  if (view.ElementCount() > 0) {
    std::memcpy(to, view.data(), static_cast<size_t>(view.ByteCount()));
  }
}

/// Arguments of QuantizedWeights.from_parts.
struct WeightsParts {
  std::string format = "fp4_e2m1";
  int64_t k = 0;
  int64_t n = 0;
  int64_t experts = 1;
  int64_t group_size = 128;
  std::string scale_type = "fp16";
  std::string zero_type = "fp16";
  nb::object codes = nb::none();
  nb::object scales = nb::none();
  nb::object zeros = nb::none();
  nb::object biases = nb::none();
  nb::object global_scale = nb::none();
  bool global_scale_divides = false;
  nb::object metadata = nb::none();
  nb::object permutation = nb::none();
  nb::object input_scale = nb::none();
  int64_t input_hadamard = 0;
  int64_t super_group_size = 0;
  nb::object super_scales = nb::none();
  nb::object super_biases = nb::none();
  std::vector<float> codebook;
};

OptionalArray ArrayOf(const char* name, const nb::object& object) {
  if (object.is_none()) return {};
  Array array;
  if (nb::try_cast(object, array) && array.is_valid()) return array;
  throw StatusError(Status(Code::kInvalidArgument,
                           std::string(name) + ": expected an array in the host's memory, got " +
                               nb::type_name(object.type()).c_str()));
}

QuantizedWeights FromParts(const WeightsParts& parts) {
  WeightsSpec spec;
  spec.format = Take(ParseFormat(parts.format));
  spec.scale_type = Take(ParseScaleType(parts.scale_type));
  spec.experts = parts.experts;
  spec.k = parts.k;
  spec.n = parts.n;
  spec.group_size = Take(NormalizeGroupSize(parts.group_size, parts.k));
  spec.has_zeros = !parts.zeros.is_none();
  spec.has_biases = !parts.biases.is_none();
  spec.has_global_scale = !parts.global_scale.is_none();
  spec.global_scale_divides = parts.global_scale_divides;
  spec.sparsity = parts.metadata.is_none() ? Sparsity::kDense : Sparsity::k24;
  spec.has_permutation = !parts.permutation.is_none();
  spec.has_input_scale = !parts.input_scale.is_none();
  spec.input_hadamard = parts.input_hadamard;
  spec.super_group_size = parts.super_group_size;
  if (spec.has_zeros) spec.zero_type = Take(ParseScaleType(parts.zero_type));
  WeightsBuffer buffer = Take(AllocateWeights(spec));
  CopyPart("codes", ArrayOf("codes", parts.codes), buffer.weights.codes, buffer.codes);
  CopyPart("scales", ArrayOf("scales", parts.scales), buffer.weights.scales, buffer.scales);
  CopyPart("zeros", ArrayOf("zeros", parts.zeros), buffer.weights.zeros, buffer.zeros);
  CopyPart("biases", ArrayOf("biases", parts.biases), buffer.weights.biases, buffer.biases);
  CopyPart("global_scale", ArrayOf("global_scale", parts.global_scale), buffer.weights.global_scale,
           buffer.global_scale);
  CopyPart("metadata", ArrayOf("metadata", parts.metadata), buffer.weights.metadata,
           buffer.metadata);
  CopyPart("permutation", ArrayOf("permutation", parts.permutation), buffer.weights.permutation,
           buffer.permutation);
  CopyPart("input_scale", ArrayOf("input_scale", parts.input_scale), buffer.weights.input_scale,
           buffer.input_scale);
  CopyPart("super_scales", ArrayOf("super_scales", parts.super_scales), buffer.weights.super_scales,
           buffer.super_scales);
  CopyPart("super_biases", ArrayOf("super_biases", parts.super_biases), buffer.weights.super_biases,
           buffer.super_biases);
  buffer.weights.codebook = parts.codebook;
  Check(Validate(buffer.weights));
  return std::move(buffer.weights);
}

/// An array of the weights, without the expert dimension for a single matrix; None when the format
/// has no such array.
nb::object Part(nb::handle self, const TensorView QuantizedWeights::*part) {
  const auto& weights = nb::cast<const QuantizedWeights&>(self);
  TensorView view = weights.*part;
  if (view.empty()) return nb::none();
  if (weights.spec.experts == 1 && view.rank() == 3) {
    view = TensorView(view.data(), view.dtype(), {view.dim(1), view.dim(2)});
  }
  const bool of_rows =
      part == &QuantizedWeights::permutation || part == &QuantizedWeights::input_scale;
  if (weights.spec.experts == 1 && view.rank() == 2 && of_rows) {
    view = TensorView(view.data(), view.dtype(), {view.dim(1)});
  }
  return ToNumPy(view, self);
}

template <const TensorView QuantizedWeights::*kPart>
nb::object PartOf(nb::handle self) {
  return Part(self, kPart);
}

QuantizedWeights QuantizeArray(const Array& weight, const std::string& format, int64_t group_size,
                               const std::string& scale_type, const std::string& method,
                               bool symmetric, std::vector<float> codebook,
                               const std::string& name) {
  QuantizeOptions options;
  options.format = Take(ParseFormat(format));
  options.group_size = group_size;
  options.scale_type = Take(ParseScaleType(scale_type));
  options.method = Take(ParseQuantizeMethod(method));
  options.symmetric = symmetric;
  options.codebook = std::move(codebook);
  options.tensor_name = name;
  const TensorView view = ViewOf("weight", weight);
  const nb::gil_scoped_release released;
  return Take(Quantize(view, options));
}

void DequantizeInto(const QuantizedWeights& weights, const MutableArray& out) {
  MutableTensorView view = ViewOf("out", out);
  const nb::gil_scoped_release released;
  Check(Dequantize(weights, view));
}

QuantizedWeights ShardOf(const QuantizedWeights& weights, const std::string& axis, int64_t rank,
                         int64_t world) {
  if (axis != "k" && axis != "n") {
    throw StatusError(
        Status(Code::kInvalidArgument, "axis: expected \"k\" or \"n\", got \"" + axis + "\""));
  }
  const nb::gil_scoped_release released;
  return Take(Shard(weights, axis == "k" ? ShardAxis::kK : ShardAxis::kN, rank, world));
}

QuantizedWeights PruneArray(const QuantizedWeights& weights, const std::vector<float>& importance) {
  const nb::gil_scoped_release released;
  return Take(Prune24(weights, importance));
}

/// The stored rows without the input transform, for callers that transform activations themselves.
QuantizedWeights StoredRows(QuantizedWeights weights) {
  weights.spec.has_permutation = false;
  weights.permutation = TensorView();
  weights.spec.has_input_scale = false;
  weights.input_scale = TensorView();
  weights.spec.input_hadamard = 0;
  return weights;
}

QuantizedWeights FoldInputArray(const QuantizedWeights& weights) {
  const nb::gil_scoped_release released;
  return Take(FoldInput(weights));
}

QuantizedWeights ExpandArray(const QuantizedWeights& weights) {
  const nb::gil_scoped_release released;
  return Take(Expand24(weights));
}

void BindFunctions(nb::module_& module) {
  module.def("quantize", &QuantizeArray, nb::arg("weight"), nb::arg("format"),
             nb::arg("group_size") = 128, nb::arg("scale_type") = "fp16", nb::arg("method") = "rtn",
             nb::arg("symmetric") = false, nb::arg("codebook") = std::vector<float>(),
             nb::arg("name") = "",
             "Quantizes [k, n] or [experts, k, n] of float32, float16 or bfloat16, any strides.");
  module.def("dequantize", &DequantizeInto, nb::arg("weights"), nb::arg("out"),
             "Writes the weights to out, [k, n] or [experts, k, n].");
  module.def("prune", &PruneArray, nb::arg("weights"), nb::arg("importance"));
  module.def("expand", &ExpandArray, nb::arg("weights"));
  module.def("fold_input", &FoldInputArray, nb::arg("weights"));
  module.def("stored_rows", &StoredRows, nb::arg("weights"),
             "The stored rows: their products take the columns of x times input_scale and Hadamard "
             "blocks, in the permutation's order.");
  module.def("shard", &ShardOf, nb::arg("weights"), nb::arg("axis"), nb::arg("rank"),
             nb::arg("world"));
  module.def(
      "format_values",
      [](const std::string& format) {
        const std::span<const float> values = FormatValues(Take(ParseFormat(format)));
        return std::vector<float>(values.begin(), values.end());
      },
      nb::arg("format"), "The value of every code; empty for formats of more than 8 bits.");
  module.def(
      "words_along_k",
      [](const std::string& format, int64_t k, bool sparse) {
        WeightsSpec spec{.format = Take(ParseFormat(format)), .k = k};
        if (sparse) spec.sparsity = Sparsity::k24;
        return WordsAlongK(spec);
      },
      nb::arg("format"), nb::arg("k"), nb::arg("sparse") = false,
      "The rows of QuantizedWeights.codes.");
  module.def("formats", [] {
    std::vector<std::string> names;
    for (const FormatInfo& info : AllFormats()) names.emplace_back(info.name);
    return names;
  });
}

}  // namespace

void BindWeights(nb::module_& module) {
  nb::class_<WeightsParts>(module, "WeightsParts", "The arrays of quantized weights.")
      .def(nb::init<>())
      .def_rw("format", &WeightsParts::format)
      .def_rw("k", &WeightsParts::k)
      .def_rw("n", &WeightsParts::n)
      .def_rw("experts", &WeightsParts::experts)
      .def_rw("group_size", &WeightsParts::group_size)
      .def_rw("scale_type", &WeightsParts::scale_type)
      .def_rw("zero_type", &WeightsParts::zero_type)
      .def_rw("codes", &WeightsParts::codes)
      .def_rw("scales", &WeightsParts::scales)
      .def_rw("zeros", &WeightsParts::zeros)
      .def_rw("biases", &WeightsParts::biases)
      .def_rw("global_scale", &WeightsParts::global_scale)
      .def_rw("global_scale_divides", &WeightsParts::global_scale_divides)
      .def_rw("metadata", &WeightsParts::metadata)
      .def_rw("permutation", &WeightsParts::permutation)
      .def_rw("input_scale", &WeightsParts::input_scale)
      .def_rw("input_hadamard", &WeightsParts::input_hadamard)
      .def_rw("super_group_size", &WeightsParts::super_group_size)
      .def_rw("super_scales", &WeightsParts::super_scales)
      .def_rw("super_biases", &WeightsParts::super_biases)
      .def_rw("codebook", &WeightsParts::codebook);
  nb::class_<QuantizedWeights>(module, "QuantizedWeights",
                               "A quantized matrix [k, n], or a stack of them, in the canonical "
                               "layout. Immutable; arrays are views of its memory.")
      .def_static("from_parts", &FromParts, nb::arg("parts"),
                  "Copies and validates arrays with the shapes of the properties.")
      .def_prop_ro("format",
                   [](const QuantizedWeights& w) { return std::string(FormatName(w.spec.format)); })
      .def_prop_ro("k", [](const QuantizedWeights& w) { return w.spec.k; })
      .def_prop_ro("n", [](const QuantizedWeights& w) { return w.spec.n; })
      .def_prop_ro("experts", [](const QuantizedWeights& w) { return w.spec.experts; })
      .def_prop_ro("group_size", [](const QuantizedWeights& w) { return w.spec.group_size; })
      .def_prop_ro(
          "scale_type",
          [](const QuantizedWeights& w) { return std::string(ScaleTypeName(w.spec.scale_type)); })
      .def_prop_ro(
          "zero_type",
          [](const QuantizedWeights& w) { return std::string(ScaleTypeName(w.spec.zero_type)); })
      .def_prop_ro("global_scale_divides",
                   [](const QuantizedWeights& w) { return w.spec.global_scale_divides; })
      .def_prop_ro("bits_per_weight",
                   [](const QuantizedWeights& w) { return BitsPerWeight(w.spec); })
      .def_prop_ro("nbytes", [](const QuantizedWeights& w) { return StoredBytes(w.spec); })
      .def_prop_ro("codes", &PartOf<&QuantizedWeights::codes>,
                   "uint32 [words, n]; an unquantized format's values [k, n].")
      .def_prop_ro("scales", &PartOf<&QuantizedWeights::scales>, "[groups, n], or None.")
      .def_prop_ro("zeros", &PartOf<&QuantizedWeights::zeros>, "zero_type [groups, n], or None.")
      .def_prop_ro("biases", &PartOf<&QuantizedWeights::biases>, "[groups, n], or None.")
      .def_prop_ro("global_scale", &PartOf<&QuantizedWeights::global_scale>,
                   "float32 [experts], or None.")
      .def_prop_ro("metadata", &PartOf<&QuantizedWeights::metadata>,
                   "uint32 [ceil(k / 32), n], or None for dense weights.")
      .def_prop_ro("permutation", &PartOf<&QuantizedWeights::permutation>,
                   "int32 [k]: row i of the stored matrix is row permutation[i] of W; or None.")
      .def_prop_ro("input_scale", &PartOf<&QuantizedWeights::input_scale>,
                   "float32 [k]: products multiply the columns of x with it first; or None.")
      .def_prop_ro(
          "input_hadamard", [](const QuantizedWeights& w) { return w.spec.input_hadamard; },
          "The size of the Hadamard blocks that the columns of x are rotated by; 0: none.")
      .def_prop_ro(
          "super_group_size", [](const QuantizedWeights& w) { return w.spec.super_group_size; },
          "Rows that share a super scale: scale = super scale * int8; 0: one level.")
      .def_prop_ro("super_scales", &PartOf<&QuantizedWeights::super_scales>,
                   "scale_type [super groups, n], or None.")
      .def_prop_ro("super_biases", &PartOf<&QuantizedWeights::super_biases>,
                   "scale_type [super groups, n], or None.")
      .def_prop_ro(
          "sparsity",
          [](const QuantizedWeights& w) { return std::string(SparsityName(w.spec.sparsity)); })
      .def_ro("codebook", &QuantizedWeights::codebook, "Empty: the format's own values.");
  BindFunctions(module);
}

}  // namespace marlin::python
