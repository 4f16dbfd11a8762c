#include "engine/hidden_rows.h"

#include <algorithm>
#include <vector>

#include "base/macros.h"

namespace marlin {
namespace {

/// The part of an input's elements that belongs to a chunk, `width` for each token.
template <typename T>
std::span<T> Rows(std::span<T> of_input, const PassChunk& chunk, int64_t width) {
  return of_input.subspan(static_cast<size_t>(chunk.first * width),
                          static_cast<size_t>(chunk.count * width));
}

auto Asks(std::span<const SequenceInput> inputs) {
  return [inputs](const PassChunk& chunk) { return !inputs[chunk.input].hidden_out.empty(); };
}

}  // namespace

Status GiveHidden(std::span<const SequenceInput> inputs, std::span<const PassChunk> chunks,
                  Pass* pass) {
  const Shape& shape = pass->values.hidden.shape();
  if (std::any_of(chunks.begin(), chunks.end(), Asks(inputs))) {
    MARLIN_ASSIGN_OR_RETURN(pass->values.hidden_out, pass->arena.Take(DType::kF32, shape));
  }
  if (!pass->decoder.joins()) return {};
  std::vector<float> rows;
  rows.reserve(static_cast<size_t>(shape.ElementCount()));
  for (const PassChunk& chunk : chunks) {
    const auto given = Rows(inputs[chunk.input].hidden, chunk, shape[1]);
    rows.insert(rows.end(), given.begin(), given.end());
  }
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView previous, pass->arena.Take(DType::kF32, shape));
  pass->previous = previous;
  return pass->arena.Fill(previous, rows.data());
}

Status FetchHidden(std::span<const SequenceInput> inputs, std::span<const PassChunk> chunks,
                   Pass* pass) {
  const MutableTensorView& hidden = pass->values.hidden_out;
  if (hidden.empty()) return {};
  const auto asks = Asks(inputs);
  const Shape& shape = hidden.shape();
  MARLIN_RETURN_IF_ERROR(pass->device.Synchronize());
  std::vector<float> rows(static_cast<size_t>(shape.ElementCount()));
  MARLIN_RETURN_IF_ERROR(pass->arena.Download(hidden, rows.data()));
  std::span<const float> left = rows;
  for (const PassChunk& chunk : chunks) {
    const auto count = static_cast<size_t>(chunk.count * shape[1]);
    if (asks(chunk)) {
      const auto out = Rows(inputs[chunk.input].hidden_out, chunk, shape[1]);
      std::copy_n(left.begin(), count, out.begin());
    }
    left = left.subspan(count);
  }
  return {};
}

}  // namespace marlin
