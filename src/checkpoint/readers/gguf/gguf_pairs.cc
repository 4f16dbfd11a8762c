#include "checkpoint/readers/gguf/gguf_pairs.h"

#include <fmt/core.h>

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/readers/gguf/gguf_names.h"

namespace marlin {
namespace {

constexpr std::string_view kLatentKeys = ".attn_k_b.weight";
constexpr std::string_view kLatentValues = ".attn_v_b.weight";

bool IsLatent(const GgufTensorList& list) {
  return list.naming().architecture->name == "deepseek2";
}

/// One module has one factor for each expert, so gate and up must agree.
Status CheckSameFactors(const GgufTensorList& list, const GgufFileTensor& gate,
                        const GgufFileTensor& up) {
  MARLIN_ASSIGN_OR_RETURN(const std::vector<float> of_gate, list.FactorsOf(gate));
  MARLIN_ASSIGN_OR_RETURN(const std::vector<float> of_up, list.FactorsOf(up));
  if (of_gate == of_up) return {};
  return list.Fail(
      fmt::format("tensor \"{}\": its factors differ from those of \"{}\", and both are "
                  "rows of one matrix elsewhere",
                  Printable(up.tensor->name), Printable(gate.tensor->name)),
      Code::kUnsupported);
}

}  // namespace

bool IsGgufPartner(const GgufTensorList& list, const GgufFileTensor& tensor) {
  std::string name(tensor.tensor->name);
  if (IsLatent(list) && name.ends_with(kLatentValues)) {
    name.replace(name.size() - kLatentValues.size(), kLatentValues.size(), kLatentKeys);
    return list.tensors().contains(name);
  }
  const size_t at = name.find(".ffn_up_exps.");
  if (at == std::string::npos) return false;
  name.replace(at, 13, ".ffn_gate_exps.");
  return GgufUpPartner(list.naming(), name) && list.tensors().contains(name);
}

const GgufFileTensor* GgufLatentPartner(const GgufTensorList& list, const GgufFileTensor& tensor) {
  std::string name(tensor.tensor->name);
  if (!IsLatent(list) || !name.ends_with(kLatentKeys)) return nullptr;
  name.replace(name.size() - kLatentKeys.size(), kLatentKeys.size(), kLatentValues);
  const auto found = list.tensors().find(name);
  return found == list.tensors().end() ? nullptr : &found->second;
}

Result<GgufLatentPair> PairGgufLatent(const GgufTensorList& list, const GgufFileTensor& keys,
                                      const GgufFileTensor& values) {
  const Shape& k = keys.tensor->dims;
  const Shape& v = values.tensor->dims;
  if (k.rank() != 3 || v.rank() != 3 || k[0] != v[0] || k[1] != v[2]) {
    return list.FailTensor(keys, fmt::format("{} does not fit {} of \"{}\"", k.ToString(),
                                             v.ToString(), Printable(values.tensor->name)));
  }
  for (const GgufFileTensor* part : {&keys, &values}) {
    const DType dtype = part->stored.dtype;
    if (part->stored.quantized() || dtype == DType::kF32 || dtype == DType::kF16 ||
        dtype == DType::kBf16) {
      continue;
    }
    return list.FailTensor(*part, fmt::format("expected floats, got {}", part->stored.name));
  }
  GgufLatent latent{{}, keys.stored, {}, values.stored};
  latent.keys.stacks = {list.Data(keys)};
  latent.values.stacks = {list.Data(values)};
  MARLIN_RETURN_IF_ERROR(list.SetRows(keys, &latent.keys));
  MARLIN_RETURN_IF_ERROR(list.SetRows(values, &latent.values));
  const std::optional<int64_t> rows = (Checked(k[0]) * (Checked(k[2]) + Checked(v[1]))).Take();
  const std::optional<int64_t> bytes =
      rows ? (Checked(*rows) * Checked(k[1]) * Checked(DTypeBytes(DType::kF32))).Take()
           : std::nullopt;
  if (!bytes) return list.FailTensor(keys, fmt::format("the size of {} overflows", k.ToString()));
  const std::string layer(keys.tensor->name.substr(0, keys.tensor->name.find(kLatentKeys)));
  std::string name = PlacesOfGgufTensor(list.naming(), layer + ".attn_kv_b.weight").front().name;
  return GgufLatentPair{std::move(latent), std::move(name), {*rows, k[1]}, *bytes};
}

Result<GgufRows> JoinGguf(const GgufTensorList& list, const GgufFileTensor& gate,
                          const std::string& partner) {
  const auto found = list.tensors().find(partner);
  if (found == list.tensors().end()) {
    return list.FailTensor(gate, fmt::format("there is no \"{}\" beside it", Printable(partner)));
  }
  const GgufFileTensor& up = found->second;
  const Shape& dims = gate.tensor->dims;
  if (!(dims == up.tensor->dims) || gate.tensor->type != up.tensor->type || dims.rank() < 2) {
    return list.FailTensor(
        gate, fmt::format("{} {} beside {} {} of \"{}\"", gate.stored.name, dims.ToString(),
                          up.stored.name, up.tensor->dims.ToString(), Printable(partner)));
  }
  if (gate.tensor->bytes == 0) return list.FailTensor(gate, dims.ToString() + " holds no weights");
  GgufRows rows;
  rows.stacks = {list.Data(gate), list.Data(up)};
  rows.in_turn = gate.place.rows == GgufPlace::Rows::kEven;
  const bool biases = dims.rank() == 2;
  rows.experts = dims[0];
  rows.rows = 2 * dims[1];
  rows.row_bytes = biases ? gate.stored.bytes : dims[2] / gate.stored.elements * gate.stored.bytes;
  if (!gate.stored.quantized()) return rows;
  if (biases) return list.FailTensor(gate, "a quantized bias");
  MARLIN_RETURN_IF_ERROR(CheckSameFactors(list, gate, up));
  return rows;
}

}  // namespace marlin
