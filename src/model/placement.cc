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
  MARLIN_RETURN_IF_ERROR(DecoderOf(device).status());
  for (const DecoderOperation operation : OperationsOf(config)) {
    const Status has = DecoderOf(device, operation).status();
    if (!has.ok())
      return Status(has.code(), fmt::format("{}, which {} needs", has.message(), model));
  }
  if (config.shape.experts > 0 && !ReadsHostMemory(device)) {
    return Status(Code::kUnsupported, fmt::format("{}: sorts no tokens by expert, which {} needs",
                                                  device.info().name, model));
  }
  return {};
}

bool ReadsHostMemory(const Device& device) {
  const DecoderBackend* const decoder = device.impl().decoder();
  return decoder != nullptr && decoder->reads_host_memory();
}

Status UploadTables(const Device& device, Decoder* decoder) {
  MARLIN_ASSIGN_OR_RETURN(decoder->inverse_frequencies,
                          DeviceVector::Upload(device, decoder->config.rotary.inverse_frequencies));
  const TensorView table = decoder->embedding;
  if (table.empty() || ReadsHostMemory(device)) return {};
  MARLIN_ASSIGN_OR_RETURN(decoder->embedding_memory,
                          DeviceBuffer::Allocate(device, table.ByteCount()));
  MARLIN_RETURN_IF_ERROR(decoder->embedding_memory.CopyFrom(table.data(), table.ByteCount()));
  decoder->embedding = TensorView(decoder->embedding_memory.data(), table.dtype(), table.shape());
  return {};
}

}  // namespace marlin
