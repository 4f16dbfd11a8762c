#include "model/placement.h"

#include <fmt/format.h>

#include <vector>

#include "base/macros.h"
#include "ops/device.h"

namespace marlin {
namespace {

using enum DecoderOperation;

/// The operations that a pass calls one by one.
std::vector<DecoderOperation> OperationsOf(const DecoderConfig& config) {
  std::vector<DecoderOperation> operations = {kLookUpRows,  kLookUpWeightRows, kRmsNorm,
                                              kApplyRotary, kConvert,          kAttention,
                                              kAddTo,       kApplyGate};
  if (config.shape.experts > 0) {
    operations.push_back(kRouteTokens);
    operations.push_back(kApplySigmoid);
  }
  return operations;
}

}  // namespace

Status CheckDevice(const Device& device, const DecoderConfig& config) {
  const std::string model(config.family->model_type);
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
  for (const DecoderOperation operation : OperationsOf(config)) {
    const Status has = DecoderOf(device, operation).status();
    if (!has.ok())
      return Status(has.code(), fmt::format("{}, which {} needs", has.message(), model));
  }
  if (config.shape.experts > 0 && !decoder->reads_host_memory()) {
    return Status(Code::kUnsupported, fmt::format("{}: sorts no tokens by expert, which {} needs",
                                                  device.info().name, model));
  }
  return {};
}

Status UploadTables(const Device& device, Decoder* decoder) {
  MARLIN_ASSIGN_OR_RETURN(decoder->inverse_frequencies,
                          DeviceVector::Upload(device, decoder->config.rotary.inverse_frequencies));
  const TensorView table = decoder->embedding;
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* backend, DecoderOf(device));
  if (table.empty() || backend->reads_host_memory()) return {};
  MARLIN_ASSIGN_OR_RETURN(decoder->embedding_memory,
                          DeviceBuffer::Allocate(device, table.ByteCount()));
  MARLIN_RETURN_IF_ERROR(decoder->embedding_memory.CopyFrom(table.data(), table.ByteCount()));
  decoder->embedding = TensorView(decoder->embedding_memory.data(), table.dtype(), table.shape());
  return {};
}

}  // namespace marlin
