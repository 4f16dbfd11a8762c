// Embedding, final norm and head of a decoder, for hidden states in host memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "calibrate/layer_run.h"
#include "engine/forward.h"
#include "marlin/device.h"
#include "model/layers.h"

namespace marlin {

class DecoderEnds {
 public:
  /// `source` must outlive this. Errors: as LayerSource::Ends and
  /// UploadTables.
  static Result<std::unique_ptr<DecoderEnds>> Make(const Device& device, const LayerSource& source);

  /// hidden [all rows, hidden features] receives the embeddings of the texts in the chunks.
  Status Embed(std::span<const std::vector<int32_t>> texts, std::span<const WindowChunk> chunks,
               float* hidden);
  /// embeddings [all rows, features] receives what a layer has of its own; nothing without such.
  Status EmbedLayer(std::span<const std::vector<int32_t>> texts,
                    std::span<const WindowChunk> chunks, int64_t layer, float* embeddings);
  /// The final norm of hidden [rows, hidden features].
  Result<HostRows> Normalize(int64_t rows, const float* hidden);
  /// logits [rows, vocabulary] of hidden [rows, hidden features]. At most kPassTokens rows.
  Status Logits(int64_t rows, const float* hidden, float* logits);

 private:
  DecoderEnds(const Device& device, Decoder ends)
      : device_(device), ends_(std::move(ends)), arena_(device) {}
  /// Gives each chunk the embeddings of its texts, f32 [chunk.rows, hidden features].
  Status ForEach(
      std::span<const std::vector<int32_t>> texts, std::span<const WindowChunk> chunks,
      FunctionRef<Status(const WindowChunk&, const TensorView& ids, const MutableTensorView& rows)>
          body);
  Result<MutableTensorView> Normed(int64_t rows, const float* hidden);

  Device device_;
  Decoder ends_;
  Arena arena_;
};

}  // namespace marlin
