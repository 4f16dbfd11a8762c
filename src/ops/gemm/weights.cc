// Prepared weights: preparation, metadata, images.
#include "marlin/weights.h"

#include <fmt/core.h>

#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "layout/input_transform.h"
#include "layout/permutation.h"
#include "layout/plain_weights.h"
#include "marlin/gemm.h"
#include "marlin/layout.h"
#include "ops/device/checks.h"
#include "ops/device/device.h"
#include "ops/gemm/prepare_columns.h"
#include "ops/gemm/transformed_gemm.h"
#include "plan/gemm/transform_columns.h"

namespace marlin {
Status Dequantize(const Device& device, const PreparedWeights& weights,
                  const MutableTensorView& out, int64_t expert, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckWeights(device, weights));
  const WeightsSpec& spec = weights.spec();
  MARLIN_RETURN_IF_ERROR(CheckExpert(spec, expert));
  MARLIN_RETURN_IF_ERROR(CheckActivationType("out", out.dtype()));
  if (out.rank() != 2 || out.shape()[0] != spec.k || out.shape()[1] != spec.n) {
    return Invalid(
        fmt::format("out: expected [{}, {}], got {}", spec.k, spec.n, out.shape().ToString()));
  }
  MARLIN_RETURN_IF_ERROR(CheckData("out", out));
  MARLIN_RETURN_IF_ERROR(CheckDistinctElements("out", out, false));
  if (out.ElementCount() == 0) return Status();
  const Backend& backend = Internals::Impl(device).backend();
  if (!TransformsInput(spec)) {
    return backend.Dequantize(*Internals::Storage(weights), expert, out, stream);
  }
  const InputTransform transform = InputOf(*Internals::Storage(weights), expert);
  const DType dtype = transform.keeps_values() ? out.dtype() : DType::kF32;
  MARLIN_ASSIGN_OR_RETURN(
      const Workspace workspace,
      Internals::Impl(device).TakeWorkspace(stream, out.ElementCount() * DTypeBytes(dtype)));
  const MutableTensorView stored(workspace.data, dtype, out.shape());
  Status status = backend.Dequantize(*Internals::Storage(weights), expert, stored, stream);
  if (status.ok()) {
    status = backend.TransformColumns(
        {TensorView(stored).Transposed(), out.Transposed(), transform, true}, stream);
  }
  Internals::Impl(device).ReturnWorkspace(workspace);
  return status;
}

const WeightsSpec& PreparedWeights::spec() const {
  static constexpr WeightsSpec kNone{};
  return storage_ == nullptr ? kNone : storage_->spec;
}
int64_t PreparedWeights::bytes() const {
  if (storage_ == nullptr) return 0;
  const WeightsSpec& spec = storage_->spec;
  return storage_->bytes + InputTransformBytes(spec);
}

namespace {

using SharedStorage = std::shared_ptr<const PreparedWeights::Storage>;

/// A shared pointer to the weights' storage.
SharedStorage StorageOf(const PreparedWeights& weights) {
  auto kept = std::make_shared<const PreparedWeights>(weights);
  return {kept, Internals::Storage(*kept)};
}

/// The storage with the device as a co-owner: weights are matched by their backend's address, which
/// no other device may reuse while they live.
SharedStorage KeepingOpen(const Device& device, SharedStorage storage) {
  struct Kept {
    std::shared_ptr<Device::Impl> device;
    SharedStorage storage;
  };
  auto kept = std::make_shared<const Kept>(Kept{Internals::Shared(device), std::move(storage)});
  return {kept, kept->storage.get()};
}

}  // namespace

Result<PreparedWeights> Prepare(const QuantizedWeights& weights, const Device& device,
                                const PrepareOptions& options) {
  MARLIN_RETURN_IF_ERROR(Validate(weights));
  try {
    const Backend& backend = Internals::Impl(device).backend();
    MARLIN_ASSIGN_OR_RETURN(
        const QuantizedWeights taken,
        ConvertTo(backend.TakenSpec(weights.spec, PreparedFor::kProducts), weights));
    MARLIN_ASSIGN_OR_RETURN(auto storage, backend.Prepare(taken, options));
    MARLIN_RETURN_IF_ERROR(
        AttachInput(backend, {weights.permutation, weights.input_scale}, *storage));
    return Internals::Make<PreparedWeights>(KeepingOpen(device, std::move(storage)));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "prepare: cannot allocate");
  }
}

Result<PreparedWeights> PrepareColumns(std::span<const WeightColumns> columns,
                                       const Device& device) {
  try {
    const Backend& backend = Internals::Impl(device).backend();
    std::vector<QuantizedWeights> converted;
    converted.reserve(columns.size());
    std::vector<WeightColumns> taken(columns.begin(), columns.end());
    for (size_t i = 0; i < columns.size(); ++i) {
      WeightColumns& part = taken[i];
      const WeightsSpec spec = backend.TakenSpec(part.weights->spec, PreparedFor::kModel);
      if (spec == part.weights->spec) continue;
      // Columns of one matrix that alternate are several parts.
      if (i > 0 && columns[i].weights == columns[i - 1].weights) {
        part.weights = taken[i - 1].weights;
        continue;
      }
      MARLIN_ASSIGN_OR_RETURN(QuantizedWeights weights, ConvertTo(spec, *part.weights));
      converted.push_back(std::move(weights));
      part.weights = &converted.back();
    }
    MARLIN_ASSIGN_OR_RETURN(auto storage, backend.PrepareColumns(taken));
    const QuantizedWeights& first = *columns.front().weights;
    MARLIN_RETURN_IF_ERROR(AttachInput(backend, {first.permutation, first.input_scale}, *storage));
    return Internals::Make<PreparedWeights>(KeepingOpen(device, std::move(storage)));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "prepare: cannot allocate");
  }
}

Status FinishPreparing(const Device& device) {
  return Internals::Impl(device).backend().FinishPreparing();
}

int64_t PreparedBytes(const WeightsSpec& spec, const Device& device) {
  return StoredBytes(Internals::Impl(device).backend().TakenSpec(spec, PreparedFor::kModel));
}

Result<std::string> ImageLayout(const Device& device) {
  const Backend& backend = Internals::Impl(device).backend();
  if (!backend.ImageLayout().empty()) return std::string(backend.ImageLayout());
  return Status(
      Code::kUnsupported,
      fmt::format("{}: prepared weights of this device cannot be written", backend.Info().name));
}

Result<PreparedImage> ImageOf(const PreparedWeights& weights, const Device& device) {
  const Backend& backend = Internals::Impl(device).backend();
  MARLIN_ASSIGN_OR_RETURN(PreparedImage image, backend.ImageOf(StorageOf(weights)));
  const WeightsSpec& spec = weights.spec();
  if (InputTransformBytes(spec) == 0) return image;
  struct Kept {
    std::shared_ptr<const void> matrix;
    std::vector<std::byte> input;
  };
  auto kept = std::make_shared<Kept>();
  kept->matrix = std::move(image.owner);
  kept->input.resize(static_cast<size_t>(InputTransformBytes(spec)));
  const PreparedWeights::Storage::Input& input = Internals::Storage(weights)->input;
  std::byte* to = kept->input.data();
  for (const void* const from : {static_cast<const void*>(input.permutation.get()),
                                 static_cast<const void*>(input.scale.get())}) {
    if (from == nullptr) continue;
    const int64_t bytes = spec.experts * spec.k * 4;
    MARLIN_RETURN_IF_ERROR(backend.CopyToHost(to, from, bytes));
    to += bytes;
  }
  image.input = kept->input;
  image.owner = std::move(kept);
  return image;
}

Result<PreparedWeights> FromImage(const PreparedImage& image, const Device& device) {
  const Backend& backend = Internals::Impl(device).backend();
  const WeightsSpec& spec = image.spec;
  const WeightsSpec taken = backend.TakenSpec(spec, PreparedFor::kModel);
  if (taken.format != spec.format || taken.super_group_size != spec.super_group_size) {
    return Status(
        Code::kMalformedFile,
        fmt::format(
            "prepared weights: this device holds {} as {}{}", FormatName(spec.format),
            FormatName(taken.format),
            taken.super_group_size != spec.super_group_size ? ", with one level of scales" : ""));
  }
  if (InputTransformBytes(spec) != static_cast<int64_t>(image.input.size())) {
    return Status(Code::kMalformedFile,
                  fmt::format("prepared weights: expected {} bytes of input transform, got {}",
                              InputTransformBytes(spec), image.input.size()));
  }
  InputArrays arrays;
  const std::byte* from = image.input.data();
  const Shape shape{spec.experts, spec.k};
  if (spec.has_permutation) {
    arrays.permutation = TensorView(from, DType::kI32, shape);
    MARLIN_RETURN_IF_ERROR(CheckPermutation(arrays.permutation));
    from += arrays.permutation.ByteCount();
  }
  if (spec.has_input_scale) {
    arrays.scale = TensorView(from, DType::kF32, shape);
    MARLIN_RETURN_IF_ERROR(CheckInputScale(arrays.scale));
  }
  MARLIN_ASSIGN_OR_RETURN(auto storage, backend.FromImage(image));
  MARLIN_RETURN_IF_ERROR(AttachInput(backend, arrays, *storage));
  return Internals::Make<PreparedWeights>(KeepingOpen(device, std::move(storage)));
}

}  // namespace marlin
