// inspect: lists the content of a checkpoint, quantized or not.
#include <fmt/core.h>

#include <array>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "base/printable.h"
#include "base/text_table.h"
#include "cli/checkpoint_listing.h"
#include "cli/command.h"
#include "marlin/checkpoint.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Totals {
  int64_t tensors = 0;
  int64_t parameters = 0;
  int64_t bytes = 0;

  void Add(const ListedTensor& tensor) {
    ++tensors;
    parameters += tensor.parameters;
    bytes += tensor.bytes;
  }
  double BitsPerWeight() const {
    return parameters == 0 ? 0.0
                           : 8.0 * static_cast<double>(bytes) / static_cast<double>(parameters);
  }
};

Json ShapeJson(const Shape& shape) {
  Json dims = Json::array();
  for (int i = 0; i < shape.rank(); ++i) dims.push_back(shape[i]);
  return dims;
}

Json TensorJson(const ListedTensor& tensor) {
  return {{"name", tensor.name},
          {"format", tensor.format},
          {"shape", ShapeJson(tensor.shape)},
          {"group_size", tensor.group_size == 0 ? Json() : Json(tensor.group_size)},
          {"sparsity", tensor.group_size == 0 ? Json() : Json(SparsityName(tensor.sparsity))},
          {"permutation", tensor.group_size == 0 ? Json() : Json(tensor.permuted)},
          {"input_scale", tensor.group_size == 0 ? Json() : Json(tensor.input_scaled)},
          {"input_hadamard", tensor.group_size == 0 ? Json() : Json(tensor.input_hadamard)},
          {"bits_per_weight", tensor.BitsPerWeight()},
          {"bytes", tensor.bytes},
          {"layer_class", LayerClassName(tensor.layer_class)}};
}

std::string FormatText(const ListedTensor& tensor) {
  std::string text = tensor.format;
  if (tensor.sparsity != Sparsity::kDense)
    text += fmt::format(" {}", SparsityName(tensor.sparsity));
  if (tensor.permuted) text += " permuted";
  if (tensor.input_scaled) text += " scaled";
  if (tensor.input_hadamard > 0) text += fmt::format(" h{}", tensor.input_hadamard);
  return text;
}

std::string BitsText(double bits) { return fmt::format("{:.3f}", bits); }

class InspectCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("PATH", &path_, "A model's directory, a .safetensors or a GGUF file");
    arguments.Model(&path_, ModelPart::kHeaders);
    arguments.Flag("--allow-extra-tensors", &allow_extra_tensors_,
                   "Leave out tensors that the index does not list or the model does not have");
  }

  Status Run(Console& console) override {
    MARLIN_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                            Checkpoint::Open(path_, {allow_extra_tensors_}));
    const std::vector<ListedTensor> tensors = ListTensors(checkpoint);
    Totals total;
    std::array<Totals, kLayerClassCount> classes;
    for (const ListedTensor& tensor : tensors) {
      total.Add(tensor);
      classes[static_cast<size_t>(tensor.layer_class)].Add(tensor);
    }
    return console.json() ? PrintDocument(console, checkpoint, tensors, total)
                          : PrintTables(console, checkpoint, tensors, classes, total);
  }

 private:
  static Status PrintDocument(Console& console, const Checkpoint& checkpoint,
                              const std::vector<ListedTensor>& tensors, const Totals& total) {
    Json document = {{"path", checkpoint.path()},
                     {"quantized", checkpoint.quantized()},
                     {"method", checkpoint.quant_method()},
                     {"recipe", checkpoint.quantized() ? Json(checkpoint.recipe_name()) : Json()},
                     {"notes", checkpoint.notes()},
                     {"tensors", Json::array()}};
    document["parameters"] = total.parameters;
    document["bits_per_weight"] = total.BitsPerWeight();
    document["bytes"] = total.bytes;
    return console.PrintJson(document, "tensors", tensors.size(),
                             [&tensors](size_t i) { return TensorJson(tensors[i]); });
  }

  static Status PrintTables(Console& console, const Checkpoint& checkpoint,
                            const std::vector<ListedTensor>& tensors,
                            const std::array<Totals, kLayerClassCount>& classes,
                            const Totals& total) {
    Table list({"tensor", "format", "shape", "group", "bits/weight", "size"}, 3);
    for (const ListedTensor& tensor : tensors) {
      list.AddRow({tensor.name, FormatText(tensor), tensor.shape.ToString(),
                   tensor.group_size == 0 ? "" : std::to_string(tensor.group_size),
                   BitsText(tensor.BitsPerWeight()), FormatBytes(tensor.bytes)});
    }
    Table summary({"layer class", "tensors", "parameters", "bits/weight", "size"});
    const auto add = [&summary](std::string name, const Totals& totals) {
      summary.AddRow({std::move(name), std::to_string(totals.tensors),
                      FormatCount(totals.parameters), BitsText(totals.BitsPerWeight()),
                      FormatBytes(totals.bytes)});
    };
    for (size_t i = 0; i < classes.size(); ++i) {
      if (classes[i].tensors == 0) continue;
      add(std::string(LayerClassName(static_cast<LayerClass>(i))), classes[i]);
    }
    add("total", total);
    std::string kind = "not quantized";
    if (checkpoint.quantized()) {
      kind = fmt::format("quantized, recipe {}", EscapeUnprintable(checkpoint.recipe_name()));
    } else if (!checkpoint.quant_method().empty()) {
      kind = fmt::format("quantized, {}; the formats are those of `import`",
                         checkpoint.quant_method());
    }
    return console.Print(fmt::format("{}: {}\n{}\n{}\n{}", EscapeUnprintable(checkpoint.path()),
                                     kind, NoteLines(checkpoint.notes()), list.ToString(),
                                     summary.ToString()));
  }

  std::string path_;
  bool allow_extra_tensors_ = false;
};

}  // namespace

std::unique_ptr<Command> Make_inspect() { return std::make_unique<InspectCommand>(); }

}  // namespace marlin::cli
