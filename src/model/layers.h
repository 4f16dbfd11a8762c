// The layers of a loaded decoder.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "marlin/checkpoint.h"
#include "marlin/tensor.h"
#include "model/decoder_config.h"
#include "model/prepared_file.h"
#include "model/projection.h"

namespace marlin {

/// Grouped-query attention.
struct AttentionLayer {
  Projection qkv;  ///< Queries, keys, values side by side.
  Projection out;
  DeviceVector q_norm;  ///< [head_dim] each, or empty.
  DeviceVector k_norm;
  DeviceVector sinks;  ///< [heads], or empty.
};

/// DeepSeek's attention with keys and values behind a low-rank bottleneck.
struct LatentAttentionLayer {
  Projection q;    ///< From the hidden state; empty when the two below are there.
  Projection q_a;  ///< To the low rank.
  DeviceVector q_a_norm;
  Projection q_b;
  Projection kv_a;  ///< To the low rank, and the turned part of all keys.
  DeviceVector kv_a_norm;
  Projection kv_b;  ///< Per head: unturned key, value.
  Projection out;
};

struct MlpLayer {
  Projection gate_up;  ///< Gate and up side by side.
  Projection down;
};

struct ExpertsLayer {
  Projection router;
  DeviceVector choice_bias;  ///< [experts], or empty.
  std::vector<MlpLayer> experts;
  MlpLayer shared;         ///< Empty where there is none.
  Projection shared_gate;  ///< [hidden, 1] (qwen2_moe), or empty.
};

struct DecoderLayer {
  DeviceVector input_norm;
  AttentionLayer attention;
  LatentAttentionLayer latent;
  DeviceVector attention_out_norm;  ///< glm4, else empty.
  DeviceVector mlp_norm;
  MlpLayer mlp;  ///< One of the two.
  ExpertsLayer experts;
  DeviceVector mlp_out_norm;  ///< glm4, else empty.
};

struct Decoder {
  DecoderConfig config;
  Checkpoint checkpoint;            ///< Keeps the mapping of the embedding table.
  TensorView embedding;             ///< [vocab, hidden]; empty when it is quantized.
  DeviceBuffer embedding_memory;    ///< The table, where the device does not read the mapping.
  Projection embedding_projection;  ///< The table as weights, when quantized or tied.
  Projection head;                  ///< Empty when tied.
  std::vector<DecoderLayer> layers;
  DeviceVector norm;
  DeviceVector inverse_frequencies;  ///< Of the rotary embedding.
  int64_t parameters = 0;
  int64_t bytes = 0;

  const Projection& lm_head() const { return head.empty() ? embedding_projection : head; }
};

/// How the projections of a decoder are loaded.
struct LoadOptions {
  std::shared_ptr<const PreparedFile> prepared;  ///< Maps them from here, where it is given;
  PreparedFileWriter* write = nullptr;           ///< or writes them here and keeps none.
  Progress progress;                             ///< In layers.
};

/// Fills a decoder from a checkpoint. Errors: kMalformedFile and kUnsupported naming the tensor,
/// kOutOfMemory.
Result<Decoder> LoadDecoder(const Checkpoint& checkpoint, DecoderConfig config,
                            const Device& device, const LoadOptions& options = {});

}  // namespace marlin
