// Quantized weights, packing and unpacking.
#include "marlin/weights.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <span>

#include "base/text_table.h"
#include "core.h"
#include "marlin/layout.h"
#include "marlin/quantize.h"
#include "registrations.h"
#include "weights_parts.h"

namespace marlin::python {
namespace {

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

/// "QuantizedWeights(fp4_e2m1/g64, k=4096, n=1024, 2.36 MB)".
std::string WeightsText(const QuantizedWeights& weights) {
  const WeightsSpec& spec = weights.spec;
  std::string text = "QuantizedWeights(" + std::string(FormatName(spec.format));
  if (GetFormatInfo(spec.format).quantized) {
    text += spec.group_size == 0 ? "/gK" : "/g" + std::to_string(spec.group_size);
  }
  if (spec.sparsity != Sparsity::kDense) text += "/" + std::string(SparsityName(spec.sparsity));
  text += ", k=" + std::to_string(spec.k) + ", n=" + std::to_string(spec.n);
  if (spec.experts > 1) text += ", experts=" + std::to_string(spec.experts);
  return text + ", " + FormatBytes(StoredBytes(spec)) + ")";
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
    Refuse("axis: expected \"k\" or \"n\", got \"" + axis + "\"");
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

/// Words of a matrix from k-packed to marlin_w4 or back; both are u32 and contiguous.
void Repack(int64_t k, int64_t n, const Array& from, const MutableArray& to, bool to_tiles) {
  const TensorView source = ViewOf("words", from);
  const MutableTensorView target = ViewOf("out", to);
  if (source.dtype() != DType::kU32 || !source.IsContiguous() || target.dtype() != DType::kU32) {
    Refuse("words: expected contiguous uint32");
  }
  const std::span<const uint32_t> in(source.As<uint32_t>(),
                                     static_cast<size_t>(source.ElementCount()));
  const std::span<uint32_t> out(static_cast<uint32_t*>(target.data()),
                                static_cast<size_t>(target.ElementCount()));
  const nb::gil_scoped_release released;
  Check(to_tiles ? RepackToMarlinW4(k, n, in, out) : RepackFromMarlinW4(k, n, in, out));
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
  module.def("repack_marlin_w4", &Repack, nb::arg("k"), nb::arg("n"), nb::arg("words"),
             nb::arg("out"), nb::arg("to_tiles"));
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
      "codebook_size",
      [](const std::string& format) {
        const FormatInfo& info = GetFormatInfo(Take(ParseFormat(format)));
        return info.has_codebook ? 1 << info.bits : 0;
      },
      nb::arg("format"), "The values of a format whose table is data; 0 for all others.");
  module.def(
      "words_along_k",
      [](const std::string& format, int64_t k, bool sparse) {
        WeightsSpec spec{.format = Take(ParseFormat(format)), .k = k};
        if (sparse) spec.sparsity = Sparsity::k24;
        return GetFormatInfo(spec.format).quantized ? WordsAlongK(spec) : k;
      },
      nb::arg("format"), nb::arg("k"), nb::arg("sparse") = false,
      "The rows of QuantizedWeights.codes.");
}

}  // namespace

void BindWeights(nb::module_& module) {
  BindWeightsParts(module);
  nb::class_<QuantizedWeights>(module, "QuantizedWeights",
                               "A quantized matrix [k, n], or a stack of them, in the canonical "
                               "layout. Immutable; arrays are views of its memory.")
      .def(nb::init<const QuantizedWeights&>(), nb::arg("other"), "The same weights; shares them.")
      .def_static(
          "from_parts", [](const WeightsParts& parts) { return MakeWeights(parts, {}); },
          nb::arg("parts"), "Copies and validates arrays with the shapes of the properties.")
      .def_prop_ro(
          "format",
          [](const QuantizedWeights& w) { return std::string(FormatName(w.spec.format)); },
          "The name of the weight format, as in mm.formats().")
      .def_prop_ro(
          "k", [](const QuantizedWeights& w) { return w.spec.k; }, "Input features.")
      .def_prop_ro(
          "n", [](const QuantizedWeights& w) { return w.spec.n; }, "Output features.")
      .def_prop_ro(
          "experts", [](const QuantizedWeights& w) { return w.spec.experts; },
          "Matrices of a stack; 1: a single matrix.")
      .def_prop_ro(
          "group_size", [](const QuantizedWeights& w) { return w.spec.group_size; },
          "Weights along K that share a scale; 0: all of K.")
      .def_prop_ro(
          "scale_type",
          [](const QuantizedWeights& w) { return std::string(ScaleTypeName(w.spec.scale_type)); },
          "The type of scales: \"fp16\", \"bf16\", \"fp32\", \"e8m0\" or \"e4m3\".")
      .def_prop_ro(
          "zero_type",
          [](const QuantizedWeights& w) { return std::string(ScaleTypeName(w.spec.zero_type)); },
          "The type of zeros: \"fp16\", \"bf16\" or \"fp32\".")
      .def_prop_ro(
          "global_scale_divides",
          [](const QuantizedWeights& w) { return w.spec.global_scale_divides; },
          "Whether scales are divided by global_scale, not multiplied.")
      .def_prop_ro(
          "bits_per_weight", [](const QuantizedWeights& w) { return BitsPerWeight(w.spec); },
          "Bits of codes, scales, zeros and metadata, per weight.")
      .def_prop_ro(
          "nbytes", [](const QuantizedWeights& w) { return StoredBytes(w.spec); },
          "Bytes of all arrays.")
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
          [](const QuantizedWeights& w) { return std::string(SparsityName(w.spec.sparsity)); },
          "\"dense\" or \"2:4\".")
      .def("__repr__", &WeightsText)
      .def_ro("codebook", &QuantizedWeights::codebook, "Empty: the format's own values.");
  BindFunctions(module);
}

}  // namespace marlin::python
