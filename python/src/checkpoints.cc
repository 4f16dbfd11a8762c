// Checkpoints and recipes.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/files/model_directory.h"
#include "checkpoint/source_layout.h"
#include "core.h"
#include "marlin/calibrate.h"
#include "marlin/checkpoint.h"
#include "marlin/importance.h"
#include "marlin/sensitivity.h"
#include "registrations.h"
#include "text/documents.h"

namespace marlin::python {
namespace {

/// "MixedPrecisionConfig('default_moe': moe_expert fp4_e2m1/g128, ...; 2 overrides)". Classes
/// that are kept are left out.
nb::str RecipeText(const MixedPrecisionConfig& recipe) {
  std::string choices;
  for (const auto& [layer_class, choice] : recipe.classes()) {
    if (choice.keep) continue;
    choices += choices.empty() ? "" : ", ";
    choices += std::string(LayerClassName(layer_class)) + " " + choice.ToString();
  }
  const auto add = [&choices](size_t count, const char* what) {
    if (count == 0) return;
    choices += "; " + std::to_string(count) + " " + what + (count == 1 ? "" : "s");
  };
  add(recipe.overrides().size(), "override");
  add(recipe.tensors().size(), "tensor of its own choice");
  if (recipe.hot_experts()) choices += "; hot experts " + recipe.hot_experts()->choice.ToString();
  return TextObject("MixedPrecisionConfig('" + recipe.name() + "': " + choices + ")");
}

/// Calls a Python function, or nothing for None. Both must outlive the result.
Progress ProgressTo(const nb::object& function, CallbackError* raised) {
  return [&function, raised](int64_t done, int64_t total) {
    raised->Run([&] {
      if (!function.is_none()) function(done, total);
    });
  };
}

/// Options of writing a directory; the first and the last ones concern quantizing it.
struct DirectoryOptions {
  std::string method = "rtn";
  bool overwrite = false;
  bool strict = false;
  bool resume = false;
  bool model_card = true;
  bool allow_extra_tensors = false;
  int64_t shard_bytes = int64_t{5} << 30;
  std::string layout = "k_packed";
  nb::object progress = nb::none();
  std::vector<int32_t> calibration;
  int64_t calibration_tokens = 0;
  uint64_t seed = 0;
  std::string pruning = "compensated";
  nb::object imatrix = nb::none();  ///< A path.
};

nb::object QuantizeDirectory(nb::handle source_path, nb::handle output_path,
                             const MixedPrecisionConfig& recipe, const DirectoryOptions& directory,
                             const OpenDevice& opened) {
  const std::string source = PathOf("source", source_path);
  const std::string output = PathOf("output", output_path);
  QuantizeCheckpointOptions options;
  options.recipe = recipe;
  options.method = Take(ParseQuantizeMethod(directory.method));
  options.overwrite = directory.overwrite;
  options.strict = directory.strict;
  options.resume = directory.resume;
  options.allow_extra_tensors = directory.allow_extra_tensors;
  options.model_card = directory.model_card;
  options.shard_bytes = directory.shard_bytes;
  options.layout = Take(ParsePackedLayout(directory.layout));
  const CalibrationOptions calibration{directory.calibration, directory.calibration_tokens,
                                       directory.seed, Take(ParsePruneMethod(directory.pruning))};
  std::optional<ImportanceMatrix> importance;
  if (!directory.imatrix.is_none()) {
    importance = Take(ImportanceMatrix::FromFile(PathOf("imatrix", directory.imatrix)));
  }
  CallbackError raised;
  options.progress = ProgressTo(directory.progress, &raised);
  std::optional<Result<QuantizeCheckpointReport>> report;
  {
    const nb::gil_scoped_release released;
    if (importance) {
      report.emplace(QuantizeWithImportance(source, output, options, *importance));
    } else if (NeedsCalibration(options.method)) {
      report.emplace(QuantizeCalibrated(source, output, opened.device, options, calibration));
    } else {
      report.emplace(QuantizeCheckpoint(source, output, options));
    }
  }
  raised.Rethrow();
  const QuantizeCheckpointReport taken = Take(*std::move(report));
  nb::object document = DocumentObject(QuantizedDocument(taken, options));
  document["output"] = PathObject(taken.output);
  return document;
}

std::vector<FormatChoice> ChoicesOf(const std::vector<std::string>& texts) {
  std::vector<FormatChoice> choices;
  for (const std::string& text : texts) choices.push_back(Take(ParseFormatChoice(text)));
  return choices;
}

/// Runs a measurement of the text that `directory` names, without the GIL: measure(options).
template <typename Options, typename Measure>
auto MeasureText(const DirectoryOptions& directory, Options options, const Measure& measure) {
  options.text = {directory.calibration, directory.calibration_tokens, directory.seed};
  CallbackError raised;
  options.progress = ProgressTo(directory.progress, &raised);
  std::optional<decltype(measure(options))> measured;
  {
    const nb::gil_scoped_release released;
    measured.emplace(measure(options));
  }
  raised.Rethrow();
  return Take(*std::move(measured));
}

/// The sensitivity as JSON.
nb::object MeasureDirectory(nb::handle source_path, const std::vector<std::string>& formats,
                            const DirectoryOptions& directory, const OpenDevice& opened,
                            double target) {
  const std::string source = PathOf("source", source_path);
  SensitivityOptions options;
  options.formats = ChoicesOf(formats);
  options.target = target;
  const Sensitivity sensitivity =
      MeasureText(directory, options, [&](const SensitivityOptions& of_text) {
        return MeasureSensitivity(source, opened.device, of_text);
      });
  return TextObject(sensitivity.ToJson());
}

/// The importance matrix as a GGUF file, and its summary as JSON.
nb::tuple MeasureInputs(nb::handle source_path, const std::string& dataset,
                        const DirectoryOptions& directory, const OpenDevice& opened) {
  const std::string source = PathOf("source", source_path);
  const ImportanceMatrix matrix =
      MeasureText(directory, ImportanceOptions(), [&](const ImportanceOptions& options) {
        return MeasureImportance(source, opened.device, options);
      });
  const std::string file = matrix.ToGguf(dataset);
  return nb::make_tuple(nb::bytes(file.data(), file.size()), TextObject(matrix.SummaryJson()));
}

/// The recipe, and the sum of the divergences that it is predicted to cause. `file` is None, or the
/// file to read instead of `json`.
nb::tuple AssignTo(nb::handle source_path, nb::handle file, const std::string& json, double target,
                   const std::vector<std::string>& formats) {
  const Checkpoint source = Take(Checkpoint::Open(PathOf("source", source_path)));
  const Sensitivity sensitivity =
      Take(file.is_none() ? Sensitivity::FromJson(json, "sensitivity")
                          : Sensitivity::FromFile(PathOf("sensitivity", file)));
  std::vector<TensorShape> tensors;
  for (const TensorInfo& tensor : source.tensors()) tensors.push_back({tensor.name, tensor.shape});
  FormatAssignment assigned = Take(AssignFormats(sensitivity, tensors, target, ChoicesOf(formats)));
  return nb::make_tuple(std::move(assigned.recipe), assigned.predicted_kl);
}

nb::list TensorNames(const Checkpoint& checkpoint) {
  nb::list names;
  for (const TensorInfo& tensor : checkpoint.tensors()) names.append(TextObject(tensor.name));
  return names;
}

nb::tuple TensorBytes(nb::handle self, const std::string& name) {
  const TensorView view = Take(nb::cast<const Checkpoint&>(self).Tensor(name));
  nb::list shape;
  for (int i = 0; i < view.rank(); ++i) shape.append(view.dim(i));
  const TensorView bytes(view.data(), DType::kU8, {view.ByteCount()});
  return nb::make_tuple(std::string(DTypeName(view.dtype())), nb::tuple(shape),
                        ToNumPy(bytes, self));
}

nb::list ModulesOf(const Checkpoint& checkpoint) {
  const Checkpoint::Impl& impl = CheckpointAccess::Get(checkpoint);
  nb::list modules;
  for (size_t i = 0; i < checkpoint.modules().size(); ++i) {
    const QuantizedModule& module = checkpoint.modules()[i];
    nb::list tensors;
    for (const PartTensor& part : impl.reader->Parts(impl.reader->modules()[i])) {
      tensors.append(TextObject(checkpoint.tensors()[part.tensor].name));
    }
    nb::dict row;
    row["tensors"] = tensors;
    row["name"] = TextObject(module.name);
    row["format"] = std::string(FormatName(module.spec.format));
    row["experts"] = module.spec.experts;
    row["k"] = module.spec.k;
    row["n"] = module.spec.n;
    row["group_size"] = module.spec.group_size;
    row["scale_type"] = std::string(ScaleTypeName(module.spec.scale_type));
    row["zeros"] = module.spec.has_zeros;
    row["zero_type"] = std::string(ScaleTypeName(module.spec.zero_type));
    row["biases"] = module.spec.has_biases;
    row["global_scale"] = module.spec.has_global_scale;
    row["global_scale_divides"] = module.spec.global_scale_divides;
    row["sparsity"] = std::string(SparsityName(module.spec.sparsity));
    row["permutation"] = module.spec.has_permutation;
    row["input_scale"] = module.spec.has_input_scale;
    row["input_hadamard"] = module.spec.input_hadamard;
    row["super_group_size"] = module.spec.super_group_size;
    row["layer_class"] = std::string(LayerClassName(module.layer_class));
    modules.append(row);
  }
  return modules;
}

void BindConversions(nb::module_& module) {
  nb::class_<DirectoryOptions>(module, "DirectoryOptions", "Options of quantizing a directory.")
      .def(nb::init<>())
      .def_rw("method", &DirectoryOptions::method)
      .def_rw("overwrite", &DirectoryOptions::overwrite)
      .def_rw("strict", &DirectoryOptions::strict)
      .def_rw("resume", &DirectoryOptions::resume)
      .def_rw("model_card", &DirectoryOptions::model_card)
      .def_rw("allow_extra_tensors", &DirectoryOptions::allow_extra_tensors)
      .def_rw("shard_bytes", &DirectoryOptions::shard_bytes)
      .def_rw("layout", &DirectoryOptions::layout)
      .def_rw("progress", &DirectoryOptions::progress)
      .def_rw("calibration", &DirectoryOptions::calibration)
      .def_rw("calibration_tokens", &DirectoryOptions::calibration_tokens)
      .def_rw("seed", &DirectoryOptions::seed)
      .def_rw("pruning", &DirectoryOptions::pruning)
      .def_rw("imatrix", &DirectoryOptions::imatrix, nb::arg().none());
  module.def("quantize_model", &QuantizeDirectory, nb::arg("source").none(),
             nb::arg("output").none(), nb::arg("recipe"), nb::arg("options"), nb::arg("device"));
  module.def(
      "needs_calibration",
      [](const std::string& method) { return NeedsCalibration(Take(ParseQuantizeMethod(method))); },
      nb::arg("method"), "Whether a method runs the model over data.");
  module.def("measure_sensitivity", &MeasureDirectory, nb::arg("source").none(), nb::arg("formats"),
             nb::arg("options"), nb::arg("device"), nb::arg("target") = 0.0);
  module.def("measure_importance", &MeasureInputs, nb::arg("source").none(), nb::arg("dataset"),
             nb::arg("options"), nb::arg("device"));
  module.def(
      "default_recipe",
      [](nb::handle source) {
        return MixedPrecisionConfig::Default(
            HasExperts(Take(Checkpoint::Open(PathOf("source", source)))));
      },
      nb::arg("source").none(), "The recipe that quantize takes unless another one is named.");
  module.def("assign_formats", &AssignTo, nb::arg("source").none(), nb::arg("file").none(),
             nb::arg("json"), nb::arg("target"), nb::arg("formats"));
}

void BindRecipes(nb::module_& module) {
  nb::class_<MixedPrecisionConfig>(module, "MixedPrecisionConfig",
                                   "A recipe: which tensor gets which format.")
      .def_static("default_dense", &MixedPrecisionConfig::DefaultDense,
                  "The recipe of models without experts: FP4 in groups of 128.")
      .def_static("default_moe", &MixedPrecisionConfig::DefaultMoe,
                  "The recipe of models with experts: FP4, finer groups where errors cost more.")
      .def_static("aggressive_moe", &MixedPrecisionConfig::AggressiveMoe,
                  "Experts in NF3, for the smallest models.")
      .def_static(
          "uniform",
          [](const std::string& choice) { return Take(MixedPrecisionConfig::Uniform(choice)); },
          nb::arg("choice"),
          "One choice for every attention, MLP and expert matrix: \"fp4_e2m1/g64\".")
      .def_static(
          "from_json",
          [](const std::string& text) { return Take(MixedPrecisionConfig::FromJson(text)); },
          nb::arg("text"), "Parses a recipe; docs/howto/recipes.md has the keys.")
      .def_static(
          "from_file",
          [](nb::handle path) {
            return Take(MixedPrecisionConfig::FromFile(PathOf("path", path)));
          },
          nb::arg("path").none(), "Reads a recipe file. Errors: FileError, InvalidArgumentError.")
      .def_static(
          "from_name_or_file",
          [](nb::handle name) {
            return Take(MixedPrecisionConfig::FromNameOrFile(PathOf("name", name)));
          },
          nb::arg("name").none(), "A preset's name, \"uniform:FORMAT/gN\" or the path of a file.")
      .def_prop_ro(
          "name", [](const MixedPrecisionConfig& self) { return TextObject(self.name()); },
          "The name that quantized models record.")
      .def(
          "with_sparsity",
          [](const MixedPrecisionConfig& self, const std::string& sparsity) {
            return Take(self.WithSparsity(Take(ParseSparsity(sparsity))));
          },
          nb::arg("sparsity"),
          "The recipe with sparsity \"2:4\" or \"dense\" in every quantized class.")
      .def(
          "to_json", [](const MixedPrecisionConfig& self) { return TextObject(self.ToJson()); },
          "The recipe as a JSON document, which from_json parses.")
      .def("__repr__", &RecipeText);
}

bool StoresInOut(const Checkpoint& self, const std::string& name) {
  const TensorInfo* const tensor = self.Find(name);
  if (tensor == nullptr) Check(self.Tensor(name).status());
  return Take(SourceLayoutOf(CheckpointAccess::Get(self), *tensor)) == SourceLayout::kInOut;
}

}  // namespace

void BindCheckpoints(nb::module_& module) {
  BindRecipes(module);
  BindConversions(module);
  module.def(
      "check_model_file",
      [](nb::handle directory, const std::string& name) {
        SystemIo io;
        Check(CheckModelFile(io, PathOf("directory", directory), name));
      },
      nb::arg("directory"), nb::arg("name"));
  nb::class_<Checkpoint>(module, "Checkpoint", "An opened checkpoint; files are mapped.")
      .def(
          "__init__",
          [](Checkpoint* self, nb::handle path) {
            // A name of the Hub becomes a path.
            const nb::object local =
                nb::module_::import_("metal_marlin.hub").attr("local_path")(path);
            new (self) Checkpoint(Take(Checkpoint::Open(PathOf("path", local))));
          },
          nb::arg("path").none())
      .def_prop_ro("quantized", &Checkpoint::quantized, "Whether `quantize` wrote it.")
      .def_prop_ro(
          "recipe_name", [](const Checkpoint& self) { return TextObject(self.recipe_name()); },
          "The name of the recipe; empty if it is not quantized.")
      .def_prop_ro(
          "notes", [](const Checkpoint& self) { return self.notes(); },
          "Lines about what is read otherwise than it is stored.")
      .def_prop_ro(
          "config_json", [](const Checkpoint& self) { return TextObject(self.config_json()); },
          "The text of config.json; empty if there is none.")
      .def_prop_ro(
          "quant_method", [](const Checkpoint& self) { return TextObject(self.quant_method()); },
          "\"metal_marlin\", \"gptq\", \"gguf\" ...; empty if it is not quantized.")
      .def_prop_ro("modules", &ModulesOf,
                   "A dict for each quantized matrix: name, format, sizes and stored tensors.")
      .def("is_module_part", &Checkpoint::IsModulePart, nb::arg("tensor"),
           "Whether a stored tensor belongs to a quantized matrix.")
      .def("stores_in_out", &StoresInOut, nb::arg("tensor"),
           "Whether a plain matrix is stored as [in, out], experts in front.")
      .def_prop_ro("tensors", &TensorNames, "The names of all stored tensors.")
      .def("tensor", &TensorBytes, nb::arg("name"), "(type, shape, uint8 [bytes])")
      .def(
          "weights",
          [](const Checkpoint& self, const std::string& name) { return Take(self.Weights(name)); },
          nb::arg("module"), "The QuantizedWeights of a matrix, by the name in `modules`.")
      .def(
          "read_file",
          [](const Checkpoint& self, const std::string& name) -> nb::object {
            const std::optional<std::string> text = Take(self.ReadFile(name));
            if (!text) return nb::none();
            return nb::bytes(text->data(), text->size());
          },
          nb::arg("name"), "A small file of the model, \"tokenizer.json\", as bytes; or None.")
      .def(
          "verify_checksums", [](const Checkpoint& self) { Check(self.VerifyChecksums()); },
          "Checks every checksum. Errors: MalformedFileError naming the first bad tensor.");
}

}  // namespace marlin::python
