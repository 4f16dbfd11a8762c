#include "cli/checkpoint_listing.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/printable.h"

namespace marlin::cli {
namespace {

ListedTensor ListModule(const QuantizedModule& module) {
  const WeightsSpec& spec = module.spec;
  ListedTensor listed;
  listed.name = module.name;
  listed.format = FormatName(spec.format);
  if (spec.experts != 1) listed.shape.Append(spec.experts);
  listed.shape.Append(spec.k);
  listed.shape.Append(spec.n);
  listed.group_size = spec.group_size;
  listed.sparsity = spec.sparsity;
  listed.permuted = spec.has_permutation;
  listed.input_scaled = spec.has_input_scale;
  listed.input_hadamard = spec.input_hadamard;
  listed.parameters = spec.experts * spec.k * spec.n;
  listed.bytes = StoredBytes(spec);
  listed.layer_class = module.layer_class;
  return listed;
}

ListedTensor ListPlain(const TensorInfo& tensor) {
  ListedTensor listed;
  listed.name = tensor.name;
  listed.format = DTypeName(tensor.dtype);
  listed.shape = tensor.shape;
  listed.parameters = tensor.shape.ElementCount();
  listed.bytes = tensor.bytes;
  listed.layer_class = ClassifyTensor(tensor.name);
  return listed;
}

}  // namespace

double ListedTensor::BitsPerWeight() const {
  return parameters == 0 ? 0.0 : 8.0 * static_cast<double>(bytes) / static_cast<double>(parameters);
}

std::vector<ListedTensor> ListTensors(const Checkpoint& checkpoint) {
  std::vector<ListedTensor> tensors;
  for (const QuantizedModule& module : checkpoint.modules()) tensors.push_back(ListModule(module));
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    if (!checkpoint.IsModulePart(tensor.name)) tensors.push_back(ListPlain(tensor));
  }
  return tensors;
}

std::string SkippedText(const std::vector<SkippedTensor>& skipped) {
  struct Group {
    const SkippedTensor* first = nullptr;
    int64_t count = 0;
  };
  std::vector<Group> groups;
  for (const SkippedTensor& tensor : skipped) {
    auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& candidate) {
      return candidate.first->reason == tensor.reason;
    });
    if (group == groups.end()) group = groups.insert(group, Group{&tensor, 0});
    ++group->count;
  }
  std::string text;
  for (const Group& group : groups) {
    const std::string others = group.count == 1 ? "" : fmt::format(" and {} more", group.count - 1);
    text += fmt::format("{}{}{} ({})", text.empty() ? "" : "; ", Printable(group.first->name),
                        others, group.first->reason);
  }
  return text.empty() ? "none" : text;
}

std::string CoverageLine(double coverage, const std::vector<SkippedTensor>& skipped) {
  return fmt::format("{:.1f} % of parameters quantized; skipped: {}\n", 100 * coverage,
                     SkippedText(skipped));
}

nlohmann::ordered_json SkippedJson(const std::vector<SkippedTensor>& skipped) {
  auto array = nlohmann::ordered_json::array();
  for (const SkippedTensor& tensor : skipped) {
    array.push_back({{"name", tensor.name}, {"reason", tensor.reason}});
  }
  return array;
}

std::string NoteLines(const std::vector<std::string>& notes) {
  std::string lines;
  for (const std::string& note : notes) lines += "note: " + note + "\n";
  return lines;
}

std::string WithoutLine(const SkippedTensor& file) {
  return fmt::format("without {}: {}\n", file.name, file.reason);
}

}  // namespace marlin::cli
