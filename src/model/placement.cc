#include "model/placement.h"

#include <fmt/core.h>

#include <optional>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "model/mixer.h"
#include "ops/device/device.h"
#include "ops/gemm/prepare_columns.h"
#include "recipe/decoder_shape.h"

namespace marlin {
namespace {

using enum DecoderOperation;

/// The unfused operations that make up an operation of a step, which may be the mixer's.
std::vector<DecoderOperation> UnfusedOperations(StepKind kind, const Mixer& mixer) {
  for (MixerOperation& operation : mixer.Operations()) {
    if (operation.kind == kind) return std::move(operation.unfused);
  }
  switch (kind) {
    case StepKind::kEmbed:
      return {kLookUpRows, kLookUpWeightRows, kScaleAndCap};
    case StepKind::kProject:
    case StepKind::kLatentProject:
    case StepKind::kAttention:
    case StepKind::kMix:
    case StepKind::kGatedDelta:
      return {};  // The layer's mixer has none of these.
    case StepKind::kProjectAdd:
      return {kRmsNorm, kAddTo, kScaleAndCap};
    case StepKind::kGateUp:
      return {kAddRmsNorm, kApplyGate};
    case StepKind::kRoute:
      return {kAddRmsNorm, kRouteTokens};
    case StepKind::kExperts:
      return {kLookUpRows, kConvert, kAddTo, kApplyGate, kApplySigmoid, kRmsNorm, kScaleInputs};
    case StepKind::kBeside:
      return {kRmsNorm,    kAddRmsNorm, kAddTo,       kApplyGate,   kRouteTokens,
              kLookUpRows, kConvert,    kScaleAndCap, kApplySigmoid};
    case StepKind::kEmbedLayers:
      return {kLookUpRows, kLookUpWeightRows, kRmsNorm, kAddTo};
    case StepKind::kAddEmbedding:
      return {kApplyGate, kRmsNorm, kAddTo, kScaleAndCap};
    case StepKind::kHead:
      return {kLookUpRows, kRmsNorm, kAddRmsNorm, kScaleAndCap, kCenterRows};
    case StepKind::kSample:
      return {kResetSampler, kSampleTokens};
  }
  return {};
}

/// The operations of a layer's step, and of the step around the layers.
std::vector<StepKind> StepKinds(const DecoderConfig& config, int64_t layer) {
  std::vector<StepKind> kinds = {StepKind::kEmbed};
  if (HasMixer(config.shape, layer)) {
    for (const MixerOperation& operation : MixerOf(config.mixer(layer)).Operations()) {
      kinds.push_back(operation.kind);
    }
  }
  kinds.insert(kinds.end(), {StepKind::kProjectAdd, StepKind::kHead, StepKind::kSample});
  if (!HasMlp(config.shape, layer)) return kinds;
  if (IsSparse(*config.family, config.shape, layer)) {
    if (config.family->mlp_beside) {
      kinds.push_back(StepKind::kBeside);
    } else {
      kinds.insert(kinds.end(), {StepKind::kRoute, StepKind::kExperts});
    }
  } else {
    kinds.push_back(StepKind::kGateUp);
  }
  if (config.shape.layer_features > 0) {
    kinds.insert(kinds.end(), {StepKind::kEmbedLayers, StepKind::kAddEmbedding});
  }
  return kinds;
}

/// Copies a table to memory of the device, unless it is empty.
Status UploadTable(const Device& device, TensorView* table, DeviceBuffer* memory) {
  if (table->empty()) return {};
  MARLIN_ASSIGN_OR_RETURN(*memory, DeviceBuffer::Allocate(device, table->ByteCount()));
  MARLIN_RETURN_IF_ERROR(memory->CopyFrom(table->data(), table->ByteCount()));
  *table = TensorView(memory->data(), table->dtype(), table->shape());
  return {};
}

/// CheckHas or CheckRunsItself.
using CheckOperation = Status (*)(const Device& device, DecoderOperation operation);

Status CheckUnfusedBy(CheckOperation check, const Device& device, StepKind kind,
                      const Mixer& mixer) {
  for (const DecoderOperation operation : UnfusedOperations(kind, mixer)) {
    MARLIN_RETURN_IF_ERROR(check(device, operation));
  }
  // Where the device does not sort tokens by expert, the host must read the top-k selection.
  const bool experts = kind == StepKind::kExperts || kind == StepKind::kBeside;
  if (!experts || ReadsHostMemory(device)) return {};
  if (Internals::Impl(device).backend().plans_experts()) return {};
  return Status(Code::kUnsupported, device.info().name + ": lacks the operation \"experts\"");
}

Status CheckDeviceBy(CheckOperation check, const Device& device, const DecoderConfig& config) {
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
  const auto named = [&](const Status& has) {
    if (has.ok()) return has;
    return Status(has.code(),
                  fmt::format("{}, which {} needs", has.message(), config.family->model_type));
  };
  for (int64_t layer = 0; layer < config.shape.layers; ++layer) {
    const Mixer& mixer = MixerOf(config.mixer(layer));
    for (const StepKind kind : StepKinds(config, layer)) {
      if (decoder->Fuses(kind)) continue;
      MARLIN_RETURN_IF_ERROR(named(CheckUnfusedBy(check, device, kind, mixer)));
    }
    for (const DecoderOperation operation : mixer.OwnOperations(config.layer(layer).sizes)) {
      MARLIN_RETURN_IF_ERROR(named(check(device, operation)));
    }
  }
  return {};
}

}  // namespace

Status CheckUnfused(const Device& device, StepKind kind, const Mixer& mixer) {
  return CheckUnfusedBy(CheckHas, device, kind, mixer);
}

Status CheckDevice(const Device& device, const DecoderConfig& config) {
  return CheckDeviceBy(CheckHas, device, config);
}

Result<Device> DeviceFor(const Device& device, const DecoderConfig& config,
                         const PlacementOptions& options) {
  Device candidate = device;
  while (true) {
    // "auto" leaves a device to a user who names it where the host would run part of a step.
    const bool last = !Internals::Impl(candidate).has_next();
    Status can_run = CheckDeviceBy(last ? CheckHas : CheckRunsItself, candidate, config);
    if (can_run.ok() && options.prepared && !last) can_run = ImageLayout(candidate).status();
    if (options.calibrates && !last && ReadsHostMemory(candidate)) {
      can_run = Status(Code::kUnsupported, candidate.info().name + ": calibrates only by name");
    }
    if (can_run.ok() || last) return can_run.ok() ? Result<Device>(candidate) : can_run;
    if (options.notes != nullptr) options.notes->push_back("not on " + can_run.message());
    MARLIN_ASSIGN_OR_RETURN(const std::optional<Device> next, Internals::Impl(candidate).Next());
    candidate = *next;
  }
}

bool ReadsHostMemory(const Device& device) {
  const DecoderBackend* const decoder = Internals::Impl(device).decoder();
  return decoder != nullptr && decoder->reads_host_memory();
}

bool ComputesInHostMemory(const Device& device) {
  return ReadsHostMemory(device) && !Internals::Impl(device).backend().shares_memory();
}

Status UploadTables(const Device& device, Decoder* decoder) {
  for (const Rotary& rotary : decoder->config.rotaries) {
    MARLIN_ASSIGN_OR_RETURN(DeviceVector frequencies,
                            DeviceVector::Upload(device, rotary.inverse_frequencies));
    decoder->inverse_frequencies.push_back(std::move(frequencies));
  }
  const bool plain_norms = decoder->config.family->qk_norm == QkNormRule::kPlainAfterRotary;
  if (decoder->config.shape.value_norm || plain_norms) {
    int64_t most = 0;
    for (const LayerConfig& layer : decoder->config.layers) {
      most = std::max(most, layer.sizes.head_dim);
    }
    const std::vector<float> ones(static_cast<size_t>(most), 1.0F);
    MARLIN_ASSIGN_OR_RETURN(decoder->ones, DeviceVector::Upload(device, ones));
  }
  if (ComputesInHostMemory(device)) return {};
  LayerEmbeddings& layers = decoder->layer_embeddings;
  MARLIN_RETURN_IF_ERROR(UploadTable(device, &decoder->embedding, &decoder->embedding_memory));
  return UploadTable(device, &layers.table, &layers.memory);
}

}  // namespace marlin
