#include "calibrate/decoder_ends.h"

#include <algorithm>
#include <utility>

#include "base/macros.h"
#include "engine/forward.h"
#include "marlin/decoder.h"
#include "model/placement.h"

namespace marlin {

Result<std::unique_ptr<DecoderEnds>> DecoderEnds::Make(const Device& device,
                                                       const LayerSource& source) {
  MARLIN_ASSIGN_OR_RETURN(Decoder decoder, source.Ends());
  std::unique_ptr<DecoderEnds> ends(new DecoderEnds(device, std::move(decoder)));
  MARLIN_RETURN_IF_ERROR(UploadTables(device, &ends->ends_));
  return ends;
}

Status DecoderEnds::ForEach(
    std::span<const std::vector<int32_t>> texts, std::span<const WindowChunk> chunks,
    FunctionRef<Status(const WindowChunk&, const TensorView& ids, const MutableTensorView& rows)>
        body) {
  auto text = texts.begin();
  for (const WindowChunk& chunk : chunks) {
    const ArenaScope scope(arena_);
    std::vector<int32_t> ids;
    for (size_t i = 0; i < chunk.windows.size(); ++i, ++text) {
      ids.insert(ids.end(), text->begin(), text->end());
    }
    MARLIN_ASSIGN_OR_RETURN(const TensorView tokens, arena_.Upload(ids));
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView rows,
                            arena_.Take(DType::kF32, {chunk.rows, ends_.config.shape.hidden}));
    MARLIN_RETURN_IF_ERROR(marlin::Embed(device_, ends_, tokens, rows, nullptr));
    MARLIN_RETURN_IF_ERROR(body(chunk, tokens, rows));
  }
  return {};
}

Status DecoderEnds::Embed(std::span<const std::vector<int32_t>> texts,
                          std::span<const WindowChunk> chunks, float* hidden) {
  return ForEach(texts, chunks,
                 [&](const WindowChunk& chunk, const TensorView&, const MutableTensorView& rows) {
                   Status finished = device_.Synchronize();
                   if (!finished.ok()) return finished;
                   return arena_.Download(rows, hidden + chunk.first * rows.dim(1));
                 });
}

Status DecoderEnds::EmbedLayer(std::span<const std::vector<int32_t>> texts,
                               std::span<const WindowChunk> chunks, int64_t layer,
                               float* embeddings) {
  const int64_t features = ends_.config.shape.layer_features;
  if (features == 0) return {};
  const auto embed = [&](const WindowChunk& chunk, const TensorView& ids,
                         const MutableTensorView& rows) -> Status {
    const int64_t width = ends_.layer_embeddings.projection.out;
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView all,
                            arena_.Take(DType::kF32, {chunk.rows, width}));
    MARLIN_RETURN_IF_ERROR(EmbedLayers(device_, ends_, ids, rows, ExactProducts(), &arena_, all));
    MARLIN_RETURN_IF_ERROR(device_.Synchronize());
    std::vector<float> values(static_cast<size_t>(all.ElementCount()));
    MARLIN_RETURN_IF_ERROR(arena_.Download(all, values.data()));
    for (int64_t row = 0; row < chunk.rows; ++row) {
      std::copy_n(values.data() + row * width + layer * features, features,
                  embeddings + (chunk.first + row) * features);
    }
    return {};
  };
  return ForEach(texts, chunks, embed);
}

Result<MutableTensorView> DecoderEnds::Normed(int64_t rows, const float* hidden) {
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x,
                          arena_.Take(DType::kF32, {rows, ends_.config.shape.hidden}));
  MARLIN_RETURN_IF_ERROR(arena_.Fill(x, hidden));
  if (ends_.config.family->layer_norms) {
    MARLIN_RETURN_IF_ERROR(CenterRows(device_, x, nullptr));
  }
  MARLIN_RETURN_IF_ERROR(
      RmsNorm(device_, x, ends_.norm.view(), ends_.config.hidden_epsilon(), x, nullptr));
  return x;
}

Result<HostRows> DecoderEnds::Normalize(int64_t rows, const float* hidden) {
  const ArenaScope scope(arena_);
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x, Normed(rows, hidden));
  MARLIN_RETURN_IF_ERROR(device_.Synchronize());
  HostRows normed;
  normed.width = x.dim(1);
  normed.values.resize(static_cast<size_t>(x.ElementCount()));
  MARLIN_RETURN_IF_ERROR(arena_.Download(x, normed.values.data()));
  return normed;
}

Status DecoderEnds::Logits(int64_t rows, const float* hidden, float* logits) {
  const ArenaScope scope(arena_);
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x, Normed(rows, hidden));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView out,
                          arena_.Take(DType::kF32, {rows, ends_.config.shape.vocabulary}));
  MARLIN_RETURN_IF_ERROR(ApplyHead(device_, ends_, x, ExactProducts(), out));
  MARLIN_RETURN_IF_ERROR(device_.Synchronize());
  return arena_.Download(out, logits);
}

}  // namespace marlin
