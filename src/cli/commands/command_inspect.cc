// inspect: lists the content of a checkpoint, quantized or not.
#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "base/printable.h"
#include "base/text_table.h"
#include "checkpoint/checkpoint_impl.h"
#include "cli/checkpoint_listing.h"
#include "cli/command.h"
#include "cli/name_ranges.h"
#include "marlin/checkpoint.h"
#include "recipe/text_config.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

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

std::string BitsText(double bits) { return fmt::format("{:.3f}", bits); }

/// A text of a configuration; empty if it has none.
std::string TextAt(const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

/// The shape of one expert of a stack that stands for several tensors.
Shape MatrixShape(const ListedTensor& tensor) {
  if (tensor.name.find('*') == std::string::npos || tensor.shape.rank() != 3) return tensor.shape;
  return {tensor.shape[1], tensor.shape[2]};
}

/// Norms and biases, which would be most of the lines of a list.
bool IsSmallVector(const ListedTensor& tensor) {
  const bool is_float = tensor.format == DTypeName(DType::kBf16) ||
                        tensor.format == DTypeName(DType::kF16) ||
                        tensor.format == DTypeName(DType::kF32);
  return !tensor.quantized() && tensor.shape.rank() <= 1 && is_float;
}

/// Rows of totals, with each row's share of the parameters, and their sum.
std::string TotalsTable(const char* what,
                        const std::vector<std::pair<std::string, ListedTotals>>& rows,
                        const ListedTotals& total) {
  Table table({what, "tensors", "parameters", "share", "bits/weight", "size"});
  const auto add = [&](const std::string& name, const ListedTotals& totals) {
    const double share = total.parameters == 0 ? 0.0
                                               : static_cast<double>(totals.parameters) /
                                                     static_cast<double>(total.parameters);
    table.AddRow({name, FormatInteger(totals.tensors), FormatCount(totals.parameters),
                  FormatPercent(share), BitsText(totals.BitsPerWeight()),
                  FormatBytes(totals.bytes)});
  };
  for (const auto& [name, totals] : rows) add(name, totals);
  add("total", total);
  return table.ToString();
}

std::string FormatTable(const std::vector<ListedTensor>& tensors, const ListedTotals& total) {
  std::map<std::string, ListedTotals> formats;
  for (const ListedTensor& tensor : tensors) formats[tensor.FormatText()].Add(tensor);
  std::vector<std::pair<std::string, ListedTotals>> rows(formats.begin(), formats.end());
  std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) {
    return a.second.parameters > b.second.parameters;
  });
  return TotalsTable("format", rows, total);
}

std::string ClassTable(const std::vector<ListedTensor>& tensors, const ListedTotals& total) {
  std::map<LayerClass, ListedTotals> classes;
  for (const ListedTensor& tensor : tensors) classes[tensor.layer_class].Add(tensor);
  std::vector<std::pair<std::string, ListedTotals>> rows;
  rows.reserve(classes.size());
  for (const auto& [layer_class, totals] : classes) {
    rows.emplace_back(LayerClassName(layer_class), totals);
  }
  return TotalsTable("layer class", rows, total);
}

/// Every tensor; experts that are stored together are one.
std::string WholeList(const std::vector<ListedTensor>& tensors) {
  Table list({"tensor", "format", "shape", "bits/weight", "size"}, 3);
  for (const ListedTensor& tensor : tensors) {
    list.AddRow({tensor.name, tensor.FormatText(), tensor.shape.ToString(),
                 BitsText(tensor.BitsPerWeight()), FormatBytes(tensor.bytes)});
  }
  return list.ToString();
}

/// A name with the range of its experts for "*".
std::string WithExperts(std::string name, const ListedTensor& tensor) {
  const size_t star = name.find('*');
  if (star != std::string::npos) {
    name.replace(star, 1, tensor.tensors == 1 ? "0" : fmt::format("0-{}", tensor.tensors - 1));
  }
  return name;
}

/// Equal tensors of all layers and experts in one row, without small vectors.
std::string MergedList(const std::vector<ListedTensor>& tensors) {
  std::vector<NamedKind> names;
  std::vector<const ListedTensor*> named;
  ListedTotals vectors;
  for (const ListedTensor& tensor : tensors) {
    if (IsSmallVector(tensor)) {
      vectors.Add(tensor);
      continue;
    }
    named.push_back(&tensor);
    // Scales and zeros are no part of the format's text.
    names.push_back({tensor.name, fmt::format("{} {} {}", tensor.FormatText(),
                                              tensor.shape.ToString(), tensor.BitsPerWeight())});
  }
  Table list({"tensor", "format", "shape", "tensors", "bits/weight", "size"}, 3);
  for (const NameRange& range : MergeNames(names)) {
    const ListedTensor& first = *named[range.members.front()];
    ListedTotals totals;
    for (const size_t member : range.members) totals.Add(*named[member]);
    list.AddRow({WithExperts(range.name, first), first.FormatText(), MatrixShape(first).ToString(),
                 FormatInteger(totals.tensors), BitsText(totals.BitsPerWeight()),
                 FormatBytes(totals.bytes)});
  }
  std::string text = list.ToString();
  if (vectors.tensors > 0) {
    text += fmt::format("and {}, such as norms and biases: {}\n",
                        FormatCounted(vectors.tensors, "vector"), FormatBytes(vectors.bytes));
  }
  return text + "\n--all lists every tensor\n";
}

class InspectCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("PATH", &path_, "A model's directory, a .safetensors or a GGUF file");
    arguments.Model(&path_, ModelPart::kHeaders);
    arguments.Flag("--allow-extra-tensors", &allow_extra_tensors_,
                   "Leave out tensors that the index does not list or the model does not have");
    arguments.Flag("--all", &all_, "List every tensor instead of ranges of layers and experts");
  }

  Status Run(Console& console) override {
    MARLIN_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                            Checkpoint::Open(path_, {allow_extra_tensors_}));
    const std::vector<ListedTensor> tensors = ListTensors(checkpoint);
    ListedTotals total;
    for (const ListedTensor& tensor : tensors) total.Add(tensor);
    if (console.json()) return PrintDocument(console, checkpoint, tensors, total);
    return console.Print(fmt::format("{}\n{}\n{}\n{}", Summary(checkpoint, total),
                                     FormatTable(tensors, total), ClassTable(tensors, total),
                                     all_ ? WholeList(tensors) : MergedList(tensors)));
  }

 private:
  static Status PrintDocument(Console& console, const Checkpoint& checkpoint,
                              const std::vector<ListedTensor>& tensors, const ListedTotals& total) {
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

  static std::string Summary(const Checkpoint& checkpoint, const ListedTotals& total) {
    const nlohmann::json& config = CheckpointAccess::Get(checkpoint).config();
    std::string text = EscapeUnprintable(checkpoint.path()) + "\n";
    const auto add = [&text](const char* name, const std::string& value) {
      text += fmt::format("  {:<12}{}\n", name, value);
    };
    const std::string type = TextAt(config, "model_type");
    const std::string text_type = TextModelType(config);
    if (!type.empty()) {
      add("model type", text_type == type ? Printable(type)
                                          : fmt::format("{}, with the text model {}",
                                                        Printable(type), Printable(text_type)));
    }
    add("parameters", fmt::format("{} in {}", FormatCount(total.parameters),
                                  FormatCounted(total.tensors, "tensor")));
    add("size", fmt::format("{}, {} bits per weight", FormatBytes(total.bytes),
                            BitsText(total.BitsPerWeight())));
    if (checkpoint.quantized()) {
      const std::string method = TextAt(config.at("quantization_config"), "method");
      add("recipe", Printable(checkpoint.recipe_name()) +
                        (method.empty() ? "" : ", method " + Printable(method)));
    } else if (checkpoint.quant_method().empty()) {
      add("recipe", "none: not quantized");
    } else {
      add("recipe", fmt::format("none: quantized as {}; the formats are those after `import`",
                                Printable(checkpoint.quant_method())));
    }
    return text + NoteLines(checkpoint.notes());
  }

  std::string path_;
  bool allow_extra_tensors_ = false;
  bool all_ = false;
};

}  // namespace

std::unique_ptr<Command> Make_inspect() { return std::make_unique<InspectCommand>(); }

}  // namespace marlin::cli
