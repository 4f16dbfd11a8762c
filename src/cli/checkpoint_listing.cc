#include "cli/checkpoint_listing.h"

#include <fmt/core.h>

#include <map>
#include <utility>

#include "base/printable.h"
#include "base/text_table.h"
#include "cli/name_ranges.h"

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
  if (module.name.find('*') != std::string::npos) listed.tensors = spec.experts;
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

double BitsEach(int64_t bytes, int64_t parameters) {
  return parameters == 0 ? 0.0 : 8.0 * static_cast<double>(bytes) / static_cast<double>(parameters);
}

}  // namespace

double ListedTensor::BitsPerWeight() const { return BitsEach(bytes, parameters); }

std::string ListedTensor::FormatText() const {
  std::string text = format;
  if (quantized()) text += fmt::format("/g{}", group_size);
  if (sparsity != Sparsity::kDense) text += fmt::format("/{}", SparsityName(sparsity));
  if (input_hadamard > 0) text += fmt::format("/h{}", input_hadamard);
  if (permuted) text += " permuted";
  if (input_scaled) text += " scaled";
  return text;
}

void ListedTotals::Add(const ListedTensor& tensor) {
  tensors += tensor.tensors;
  parameters += tensor.parameters;
  bytes += tensor.bytes;
}

double ListedTotals::BitsPerWeight() const { return BitsEach(bytes, parameters); }

std::vector<ListedTensor> ListTensors(const Checkpoint& checkpoint) {
  std::vector<ListedTensor> tensors;
  for (const QuantizedModule& module : checkpoint.modules()) tensors.push_back(ListModule(module));
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    if (!checkpoint.IsModulePart(tensor.name)) tensors.push_back(ListPlain(tensor));
  }
  return tensors;
}

std::string SkippedLines(const std::vector<SkippedTensor>& skipped) {
  std::vector<NamedKind> names;
  names.reserve(skipped.size());
  for (const SkippedTensor& tensor : skipped) names.push_back({tensor.name, tensor.reason});
  std::vector<std::pair<std::string, NameRange>> groups;  // The first range of each reason.
  std::map<std::string, int64_t> counts;
  for (const NameRange& range : MergeNames(names)) {
    const std::string& reason = names[range.members.front()].kind;
    if (!counts.contains(reason)) groups.emplace_back(reason, range);
    counts[reason] += std::ssize(range.members);
  }
  std::string lines;
  for (const auto& [reason, range] : groups) {
    const int64_t others = counts[reason] - std::ssize(range.members);
    lines +=
        fmt::format("  {}{} ({})\n", Printable(range.name),
                    others == 0 ? "" : fmt::format(" and {} more", FormatInteger(others)), reason);
  }
  return lines;
}

std::string CoverageLines(double coverage, const std::vector<SkippedTensor>& skipped) {
  return fmt::format("{} of parameters quantized{}\n{}", FormatPercent(coverage),
                     skipped.empty() ? "" : "; skipped:", SkippedLines(skipped));
}

std::string EndsLine(const ModelEnds& ends) {
  const ModelEnds::Matrix& embedding = ends.embedding;
  const ModelEnds::Matrix& head = ends.head;
  if (ends.tied) {
    return fmt::format("embedding, also the head: {} ({:.3f} bits per weight)\n", embedding.format,
                       embedding.bits_per_weight);
  }
  if (embedding.format.empty()) {
    if (head.format.empty()) return {};
    return fmt::format("head {} ({:.3f} bits per weight)\n", head.format, head.bits_per_weight);
  }
  return fmt::format("embedding {} ({:.3f} bits per weight), head {} ({:.3f})\n", embedding.format,
                     embedding.bits_per_weight, head.format, head.bits_per_weight);
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
