#include "checkpoint/source_layout.h"

#include <fmt/core.h>

#include <array>
#include <optional>
#include <string>

#include "base/printable.h"
#include "recipe/stored_layout.h"
#include "recipe/text_config.h"

namespace marlin {
namespace {

SourceLayout LayoutOf(bool in_out) { return in_out ? SourceLayout::kInOut : SourceLayout::kOutIn; }

}  // namespace

SourceLayout TypeLayoutOf(const Json& config, std::string_view name) {
  return LayoutOf(IsStoredInOut(TextModelType(config), name));
}

Result<SourceLayout> SourceLayoutOf(const Checkpoint::Impl& source, const TensorInfo& tensor) {
  const SourceLayout of_type = TypeLayoutOf(source.config(), tensor.name);
  const std::optional<std::array<std::string, 2>> stacks = ExpertStacks(tensor.name);
  if (!stacks) return of_type;
  const bool is_down = tensor.name == (*stacks)[1];
  const std::string& other = (*stacks)[is_down ? 0 : 1];
  if (const auto module = source.module_index.find(other); module != source.module_index.end()) {
    return source.reader->modules()[module->second].layout;
  }
  const std::optional<size_t> found = source.FindTensor(other);
  if (!found) return of_type;
  const Shape& other_shape = source.tensors[*found].shape;
  const Shape& gate_up = is_down ? other_shape : tensor.shape;
  const Shape& down = is_down ? tensor.shape : other_shape;
  if (const std::optional<bool> in_out = StacksAreInOut(gate_up, down)) return LayoutOf(*in_out);
  return Status(Code::kMalformedFile,
                fmt::format("\"{}\" {} and \"{}\" {} are neither [experts, out, in] nor "
                            "[experts, in, out]",
                            Printable((*stacks)[0]), gate_up.ToString(), Printable((*stacks)[1]),
                            down.ToString()));
}

}  // namespace marlin
