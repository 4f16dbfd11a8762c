#include "checkpoint/writers/gguf_parts.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/macros.h"
#include "checkpoint/readers/gguf/gguf_blocks.h"
#include "checkpoint/readers/gguf/gguf_row_places.h"
#include "layout/move_runs.h"

namespace marlin {
namespace {

Status SetPlaces(const GgufHeads& heads, int64_t rows, GgufOutput* output) {
  using Rows = GgufPlace::Rows;
  const Rows kind = output->place.rows;
  output->rows = rows;
  if (output->place.value_columns) output->columns = UntiledHeads(heads);
  if (kind == Rows::kStraight) return {};
  output->places = GgufWrittenPlaces(kind, heads, rows);
  if (!output->places.empty()) {
    output->rows = std::count_if(output->places.begin(), output->places.end(),
                                 [](int64_t place) { return place >= 0; });
    return {};
  }
  std::string expected = "gate and up";
  if (kind == Rows::kEven || kind == Rows::kOdd) expected += " in turn";
  if (kind == Rows::kQueryHeads || kind == Rows::kKeyHeads) {
    expected = fmt::format("{} heads of even size",
                           kind == Rows::kQueryHeads ? heads.queries : heads.keys);
  } else if (kind >= Rows::kValueHeads) {
    expected = fmt::format("{} key heads and {} value heads", heads.delta_keys, heads.delta_values);
  }
  return Status(Code::kMalformedFile, fmt::format("{} rows are not {}", rows, expected));
}

}  // namespace

Result<std::vector<GgufOutput>> GgufOutputsOf(const GgufModelFacts& facts, const std::string& name,
                                              int64_t rows) {
  std::vector<GgufOutput> outputs;
  for (GgufTensorOf& tensor : GgufTensorsOf(facts.naming, name)) {
    GgufOutput& output = outputs.emplace_back();
    output.name = std::move(tensor.name);
    output.place = std::move(tensor.place);
    MARLIN_RETURN_IF_ERROR(SetPlaces(facts.heads, rows, &output));
  }
  if (!outputs.empty()) return outputs;
  return Status(Code::kUnsupported,
                fmt::format("gguf has no name for it in a model of the architecture {}",
                            facts.naming.architecture->name));
}

Result<QuantizedWeights> GgufColumns(const GgufOutput& output, const QuantizedWeights& weights) {
  if (output.columns.empty()) return weights;
  const int64_t run = weights.spec.k / std::ssize(output.columns);
  if (run * std::ssize(output.columns) != weights.spec.k || !CanMoveRuns(weights.spec, run)) {
    return Status(Code::kUnsupported,
                  fmt::format("gguf has value heads in another order: heads of {} are no whole "
                              "groups of {}",
                              run, weights.spec.group_size));
  }
  MARLIN_ASSIGN_OR_RETURN(QuantizedWeights moved, MoveRuns(weights, run, output.columns));
  return WidenSuperGroups(std::move(moved), kSuperBlock);
}

void ToGgufValues(const GgufOutput& output, int64_t columns, std::vector<std::byte>* bytes) {
  using Values = GgufPlace::Values;
  if (output.place.values != Values::kSame) {
    auto* const values = reinterpret_cast<float*>(bytes->data());
    for (size_t i = 0; i < bytes->size() / sizeof(float); ++i) {
      values[i] = output.place.values == Values::kPlusOne
                      ? values[i] + 1.0F
                      : static_cast<float>(-std::exp(static_cast<double>(values[i])));
    }
  }
  const size_t parts = output.columns.size();
  const auto row_bytes = static_cast<size_t>(columns * output.type.bytes);
  if (parts == 0 || row_bytes % parts != 0) return;
  const size_t part_bytes = row_bytes / parts;
  std::vector<std::byte> row(row_bytes);
  for (size_t at = 0; at < bytes->size(); at += row_bytes) {
    std::memcpy(row.data(), bytes->data() + at, row_bytes);
    for (size_t part = 0; part < parts; ++part) {
      std::memcpy(bytes->data() + at + part * part_bytes,
                  row.data() + static_cast<size_t>(output.columns[part]) * part_bytes, part_bytes);
    }
  }
}

}  // namespace marlin
