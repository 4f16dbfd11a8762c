// The layers of a loaded decoder.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "marlin/checkpoint.h"
#include "marlin/expert_placement.h"
#include "marlin/moe.h"
#include "marlin/tensor.h"
#include "model/decoder_config.h"
#include "model/prepared_file.h"
#include "model/projection.h"
#include "model/weight_source.h"
#include "recipe/decoder_tensors.h"

namespace marlin {

class Mixer;

/// Parameters that a mixer converts to another form than projections and vectors at load.
class ConvertedParameters {
 public:
  virtual ~ConvertedParameters() = default;
  virtual int64_t bytes() const = 0;
};

/// The loaded MixerTensors of a layer.
struct MixerLayer {
  const Mixer* mixer = nullptr;
  std::vector<Projection> projections;  ///< Empty: absent or converted.
  Projection out;
  std::vector<DeviceVector> vectors;
  std::unique_ptr<const ConvertedParameters> converted;
};

struct MlpLayer {
  Projection gate_up;  ///< Gate and up fused.
  Projection down;
};

struct HostExperts;
struct HostLayers;

struct ExpertsLayer {
  Projection router;
  DeviceVector router_norm;  ///< The router's own; empty: it reads what the experts read.
  DeviceVector norm;         ///< NormNames::experts; empty: DecoderLayer::mlp_norm.
  DeviceVector out_norm;     ///< NormNames::experts_out; perhaps empty.
  DeviceVector choice_bias;  ///< Score-correction bias [experts], or empty.
  DeviceVector scales;       ///< RouterOptions::scales, or empty.
  std::vector<MlpLayer> experts;
  MlpLayer shared;         ///< Empty if there is none.
  Projection shared_gate;  ///< [hidden, 1] (qwen2_moe), or empty.
  ExpertSet set;           ///< All of them; refers to their biases. Empty if `placed` is not.
  PlacedExperts placed;    ///< Where some stay on the host: all of them.

  int64_t count() const { return std::max(set.count(), placed.count()); }
};

struct DecoderLayer {
  DeviceVector input_norm;
  MixerLayer mixer;
  DeviceVector attention_out_norm;  ///< Family::norms; perhaps empty.
  DeviceVector mlp_norm;
  MlpLayer mlp;  ///< Either mlp or experts, or both (Family::mlp_beside).
  ExpertsLayer experts;
  DeviceVector beside_out_norm;  ///< NormNames::beside_out, if there are both.
  DeviceVector mlp_out_norm;     ///< Family::norms; perhaps empty.
  Projection embedding_gate;     ///< LayerTensors::embedding_gate; perhaps empty, as the next ones.
  Projection embedding_projection;
  DeviceVector embedding_norm;
  float scale = 1.0F;  ///< Factor of the hidden states after the layer.

  /// Whether it has an MLP next to experts.
  bool has_both() const { return !mlp.down.empty() && !experts.experts.empty(); }
};

/// The embeddings that every layer has of its own; empty without any.
struct LayerEmbeddings {
  TensorView table;       ///< [vocabulary, layers * features]; empty if it is quantized.
  DeviceBuffer memory;    ///< A copy, if the device cannot read the mapping.
  Projection weights;     ///< The table as weights, if it is quantized.
  Projection projection;  ///< LayerEmbeddingTensors.
  DeviceVector norm;

  bool empty() const { return projection.empty(); }
};

/// The modules before a layer that predicts further tokens (MTP): the layer's input is the
/// projection of a token's embedding and the hidden state after its predecessor, both normalized.
struct JoinLayer {
  DeviceVector embedding_norm;
  DeviceVector hidden_norm;
  Projection projection;
};

/// The part of a decoder that one device runs: the layers [first, end), after the embeddings if
/// these are the first ones, and before the head.
struct DecoderPart {
  int64_t first = 0;
  int64_t end = INT64_MAX;
  bool head = true;

  bool embeds() const { return first == 0; }
  bool Has(int64_t layer) const { return layer >= first && layer < end; }
};

struct Decoder {
  DecoderConfig config;
  Checkpoint checkpoint;            ///< Keeps the embedding table mapped.
  TensorView embedding;             ///< [vocab, hidden]; empty if it is quantized.
  DeviceBuffer embedding_memory;    ///< A copy, if the device cannot read the mapping.
  Projection embedding_projection;  ///< The table as weights, if quantized or tied.
  Projection head;                  ///< Empty if tied.
  std::vector<DecoderLayer> layers;
  DeviceVector norm;
  std::vector<DeviceVector> inverse_frequencies;  ///< One vector per DecoderConfig::rotaries.
  DeviceVector ones;                              ///< The weight of norms without one; or empty.
  int64_t parameters = 0;
  int64_t bytes = 0;
  int64_t host_bytes = 0;    ///< Size of the experts on the host; not in `bytes`.
  int64_t host_experts = 0;  ///< Experts on the host.
  LayerEmbeddings layer_embeddings = {};
  JoinLayer join = {};    ///< Empty, except after LoadDraft.
  DecoderPart part = {};  ///< Loaded; the other layers are empty.
  /// After LoadDecoder: the part before, on the host; or null.
  std::unique_ptr<Decoder> host_part = nullptr;

  bool joins() const { return !join.projection.empty(); }
  const Projection& lm_head() const { return head.empty() ? embedding_projection : head; }
};

/// Loads layers of a checkpoint one by one, some matrices replaced. Everything given must outlive
/// it.
class LayerSource {
 public:
  LayerSource(const Checkpoint& checkpoint, const DecoderConfig& config, const Device& device,
              const ReplacedMatrices* replaced)
      : checkpoint_(checkpoint), config_(config), device_(device), replaced_(replaced) {}

  /// The parts of a layer that are loaded; the others stay empty.
  struct Parts {
    bool attention = true;
    bool mlp = true;
    bool matrices = true;  ///< Otherwise only the norms.
  };
  /// Errors: as LoadDecoder.
  Result<DecoderLayer> Layer(int64_t index, const Parts& parts) const;
  /// One expert of a layer with experts.
  Result<MlpLayer> Expert(int64_t index, int64_t expert) const;
  /// A decoder without layers: embedding, head and final norm.
  Result<Decoder> Ends() const;
  /// The names of a layer's tensors in the checkpoint.
  LayerTensors Tensors(int64_t index) const;

 private:
  const Checkpoint& checkpoint_;
  const DecoderConfig& config_;
  const Device& device_;
  const ReplacedMatrices* replaced_;
};

/// How the projections of a decoder are loaded.
struct LoadOptions {
  std::shared_ptr<const PreparedFile> prepared;  ///< Source of mapped projections, if given.
  PreparedFileWriter* write = nullptr;  ///< Destination of projections, which are then not kept.
  Progress progress;                    ///< Counts layers.
  const HostExperts* host_experts = nullptr;  ///< Experts that are prepared for the host.
  const HostLayers* host_layers = nullptr;    ///< Layers that become Decoder::host_part.
  bool exact = true;                          ///< Mixers round no parameter that they convert.
  LoadSeconds* seconds = nullptr;             ///< If given, receives times.
};

/// Loads a decoder from a checkpoint. Errors: kMalformedFile and kUnsupported naming the tensor,
/// kOutOfMemory.
Result<Decoder> LoadDecoder(const Checkpoint& checkpoint, DecoderConfig config,
                            const Device& device, const LoadOptions& options = {});

/// Loads the layer of a loaded model that predicts further tokens (MTP) as a decoder of one layer,
/// which shares the model's embedding and head. `exact` as LoadOptions::exact. Errors: kUnsupported
/// for a checkpoint without such a layer, for more than one, and for a model with layers on the
/// host; as LoadDecoder, naming a tensor that is missing.
Result<Decoder> LoadDraft(const Decoder& model, const Device& device, bool exact);

}  // namespace marlin
