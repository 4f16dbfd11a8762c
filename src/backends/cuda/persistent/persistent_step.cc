#include "backends/cuda/persistent/persistent_step.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "backends/cuda/common/launch.h"
#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/layout/code_kind.h"
#include "backends/cuda/persistent/persistent_description.h"
#include "backends/cuda/persistent/persistent_plan.h"
#include "backends/cuda/plan/kernel_instances.h"
#include "backends/cuda/weights/dequantize_prepared.h"
#include "backends/cuda/weights/prepared_tiles.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

class PersistentSteps final : public FusedOperations {
 public:
  PersistentSteps(std::shared_ptr<DeviceHandle> device, const ValueErrors& errors, int blocks)
      : device_(std::move(device)), errors_(errors), blocks_(blocks) {}

  /// Uploads what the kernel reads.
  Status Load(PersistentDescription& model, const Schedules& schedules,
              const PersistentArguments& args, bool hybrid) {
    const DeviceScope scope(device_->index);
    arguments_ = args;
    function_ = FunctionOf<PersistentKernels>({model.kind()}, {hybrid});
    MARLIN_RETURN_IF_ERROR(Check(AllowAllShared(function_), "persistent"));
    const auto layer_bytes = static_cast<int64_t>(model.layers().size() * sizeof(PersistentLayer));
    const auto expert_bytes =
        static_cast<int64_t>(model.experts().size() * sizeof(PersistentExpert));
    const int64_t features = args.features;
    MARLIN_ASSIGN_OR_RETURN(routers_, LoadRows(model.routers(), features));
    MARLIN_ASSIGN_OR_RETURN(delta_rows_, LoadRows(model.delta_rows(), features));
    if (expert_bytes > 0) {
      MARLIN_ASSIGN_OR_RETURN(experts_, DeviceMemory::Allocate(device_, expert_bytes));
      MARLIN_RETURN_IF_ERROR(Upload(experts_, model.experts().data(), expert_bytes));
    }
    int64_t routed = 0;
    int64_t deltas = 0;
    for (PersistentLayer& layer : model.layers()) {
      if (layer.delta_rows != nullptr) {
        layer.delta_rows = reinterpret_cast<const float*>(delta_rows_.data()) +
                           deltas++ * 2 * args.delta.value_heads * features;
      }
      if (layer.experts == nullptr) continue;
      layer.experts =
          reinterpret_cast<const PersistentExpert*>(experts_.data()) + routed * args.router.table();
      layer.router =
          reinterpret_cast<const float*>(routers_.data()) + routed * args.router.rows() * features;
      ++routed;
    }
    MARLIN_ASSIGN_OR_RETURN(layers_, DeviceMemory::Allocate(device_, layer_bytes));
    MARLIN_RETURN_IF_ERROR(Upload(layers_, model.layers().data(), layer_bytes));
    if (!hybrid) MARLIN_RETURN_IF_ERROR(CopyHeadNorms(model.layers()));
    const auto schedule_bytes = static_cast<int64_t>(schedules.data.size());
    MARLIN_ASSIGN_OR_RETURN(schedules_, DeviceMemory::Allocate(device_, schedule_bytes));
    MARLIN_RETURN_IF_ERROR(Upload(schedules_, schedules.data.data(), schedule_bytes));
    arguments_.schedules = schedules_.data();
    arguments_.layers = reinterpret_cast<const PersistentLayer*>(layers_.data());
    arguments_.layer_count = static_cast<int>(model.layers().size());
    const PersistentLayer& last = model.layers().back();
    const bool ends = last.mlp_norm == nullptr;
    arguments_.first_phase = static_cast<int>(
        model.layers().front().attention_norm == nullptr ? Phase::kOut : Phase::kQkv);
    arguments_.end_phase = arguments_.layer_count * kPhases - (ends ? kPhases - 1 : 0);
    arguments_.errors = errors_.view();
    return Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  bool Takes(const StepValues& values) const override {
    if (values.rows() != 1 || values.first_rows.dim(0) != 2) return false;
    const DType mixed = values.mixed.dtype();
    if (mixed != DType::kBf16 && mixed != DType::kF32) return false;
    return values.pages.size() <= kMostCacheGroups &&
           std::ranges::all_of(values.pages, [](const StepPages& pages) {
             return pages.slabs.size() <= kMostCacheSlabs;
           });
  }

  Status Run(const StepValues& values, void* stream) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    PersistentArguments args = arguments_;
    MARLIN_ASSIGN_OR_RETURN(args.words, WordsOf(static_cast<cudaStream_t>(stream)));
    args.clock = args.words + 2 * args.exchange.words;
    args.hidden = values.hidden.As<float>();
    args.position = values.positions.As<int32_t>();
    // In several steps of one recording a row that has ended changes no state.
    args.moves =
        values.advance.tokens.empty() ? args.position : values.advance.state_rows.As<int32_t>();
    args.mixed = values.mixed.data();
    args.mixed_is_bf16 = values.mixed.dtype() == DType::kBf16;
    args.projected = values.projected.As<float>();
    for (size_t i = 0; i < values.pages.size(); ++i) {
      const StepPages& pages = values.pages[i];
      CacheGroup& group = args.groups[i];
      std::ranges::copy(pages.slabs, group.slabs);
      group.slab_count = static_cast<int>(pages.slabs.size());
      group.block_table = pages.block_tables.As<int32_t>();
      group.blocks = static_cast<int>(pages.block_tables.dim(1));
    }
    return Check(Launch(args, static_cast<cudaStream_t>(stream)), "persistent");
  }

 private:
  Status Check(cudaError_t error, const char* what) const {
    return device_->errors.Check(error, what);
  }
  Status Upload(const DeviceMemory& to, const void* from, int64_t bytes) const {
    return Check(cudaMemcpy(to.data(), from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice),
                 "cudaMemcpy");
  }

  /// Puts the norms of queries and keys in the layers' tables.
  Status CopyHeadNorms(std::span<const PersistentLayer> layers) {
    auto* const tables = reinterpret_cast<PersistentLayer*>(layers_.data());
    const auto bytes = static_cast<size_t>(arguments_.key_dim) * sizeof(float);
    for (size_t i = 0; i < layers.size(); ++i) {
      for (const int side : {0, 1}) {
        const float* const norm = side == 0 ? layers[i].query_norm : layers[i].key_norm;
        if (norm == nullptr) continue;
        MARLIN_RETURN_IF_ERROR(
            Check(cudaMemcpy(tables[i].head_norms[side], norm, bytes, cudaMemcpyDeviceToDevice),
                  "cudaMemcpy"));
      }
    }
    return {};
  }

  /// Matrices in fp32, a row for every output, one after another.
  Result<DeviceMemory> LoadRows(std::span<const PreparedTiles* const> matrices,
                                int64_t features) const {
    int64_t rows = 0;
    for (const PreparedTiles* matrix : matrices) rows += matrix->spec.n;
    if (rows == 0) return DeviceMemory();
    MARLIN_ASSIGN_OR_RETURN(DeviceMemory memory,
                            DeviceMemory::Allocate(device_, rows * features * 4));
    auto* to = reinterpret_cast<float*>(memory.data());
    for (const PreparedTiles* matrix : matrices) {
      const DenseView dense = {to, Element::kF32, 1, features};
      MARLIN_RETURN_IF_ERROR(
          Check(LaunchDequantizePrepared(*matrix, 0, dense, nullptr), "persistent"));
      to += matrix->spec.n * features;
    }
    return memory;
  }

  /// The exchange buffers of a stream: launches on one stream follow each other.
  Result<uint32_t*> WordsOf(cudaStream_t stream) const {
    const std::lock_guard lock(mutex_);
    DeviceMemory& memory = words_[stream];
    if (memory.data() == nullptr) {
      const AllowAllocation allow;
      const auto bytes =
          (2 * int64_t{arguments_.exchange.words} + kClocks) * int64_t{sizeof(uint32_t)};
      MARLIN_ASSIGN_OR_RETURN(memory, DeviceMemory::Allocate(device_, bytes));
      const std::vector<uint8_t> zeros(static_cast<size_t>(bytes));
      MARLIN_RETURN_IF_ERROR(Upload(memory, zeros.data(), bytes));
      // The copy may return before it is done, and other streams do not wait for it.
      MARLIN_RETURN_IF_ERROR(Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize"));
    }
    return reinterpret_cast<uint32_t*>(memory.data());
  }

  /// Cooperative: the CTAs wait for each other.
  cudaError_t Launch(PersistentArguments& args, cudaStream_t stream) const {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(blocks_));
    config.blockDim = dim3(kPersistentBlock);
    config.dynamicSmemBytes = static_cast<size_t>(args.shared.bytes);
    config.stream = stream;
    cudaLaunchAttribute cooperative = {};
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
    config.attrs = &cooperative;
    config.numAttrs = 1;
    void* parameters[] = {&args};
    return cudaLaunchKernelExC(&config, function_, parameters);
  }

  const std::shared_ptr<DeviceHandle> device_;
  const ValueErrors& errors_;
  const int blocks_;
  PersistentArguments arguments_;
  const void* function_ = nullptr;
  DeviceMemory layers_;
  DeviceMemory schedules_;
  DeviceMemory experts_;
  DeviceMemory routers_;
  DeviceMemory delta_rows_;
  mutable std::mutex mutex_;
  mutable std::map<cudaStream_t, DeviceMemory> words_;
};

/// Whether any layer has a gated delta net.
bool IsHybrid(const StepDescription& step) {
  return std::ranges::any_of(step.operations, [](const StepOperation& operation) {
    return std::holds_alternative<GatedDeltaStep>(operation);
  });
}

int64_t LayerOf(const LayerSteps& steps) {
  return steps.out != nullptr ? steps.out->layer : steps.project->layer;
}

FusedRun Refuse(int64_t layer, const Support& support) {
  return {0, nullptr, fmt::format("layer {}: {}", layer, support.reason())};
}

}  // namespace

Result<FusedRun> FusePersistent(const std::shared_ptr<DeviceHandle>& device,
                                const ValueErrors& errors, const DeviceShape& shape,
                                const StepDescription& step,
                                std::span<const StepOperation> operations) {
  if (const auto* const latent = std::get_if<LatentProjectStep>(&operations.front())) {
    return Refuse(latent->layer, {"latent attention"});
  }
  if (const auto* const mix = std::get_if<MixStep>(&operations.front())) {
    return Refuse(mix->layer, {"a mixer other than attention"});
  }
  const bool hybrid = IsHybrid(step);
  size_t count = 0;
  const auto take = [&] {
    const auto rest = operations.subspan(count);
    return hybrid ? TakeHybridLayer(rest, count == 0) : TakeLayer(rest);
  };
  std::optional<LayerSteps> steps = take();
  if (!steps.has_value()) return FusedRun();
  const int64_t first = LayerOf(*steps);
  if (step.accuracy != Accuracy::kDefault || !step.allow_bf16_activations) {
    return Refuse(first, {"exact products or activations in fp32"});
  }
  if (step.determinism != Determinism::kDefault) return Refuse(first, {"batch invariance"});
  PersistentDescription model(shape.multiprocessors);
  for (bool ends = false; !ends && steps.has_value(); steps = take()) {
    const Support support = model.AddLayer(*steps, step.hidden);
    if (!support.ok()) return Refuse(LayerOf(*steps), support);
    count += steps->count;
    ends = steps->ends();
  }
  // A run that ends in the middle of the model would leave its later layers to a second one.
  if (!hybrid &&
      (count == operations.size() || !std::holds_alternative<HeadStep>(operations[count]))) {
    return Refuse(first, {"later layers of other operations"});
  }
  if (FunctionOf<PersistentKernels>({model.kind()}, {hybrid}) == nullptr) {
    return Refuse(first, {"codes that it does not read"});
  }
  const Schedules schedules = ScheduleLayers(model.layers(), shape.multiprocessors);
  const std::optional<PersistentArguments> args = LayOutPersistent(
      model.shape(), model.layers(), schedules, shape.multiprocessors, shape.shared_bytes);
  if (!args.has_value()) return Refuse(first, {"phases that do not fit in shared memory"});
  auto run = std::make_unique<PersistentSteps>(device, errors, shape.multiprocessors);
  MARLIN_RETURN_IF_ERROR(run->Load(model, schedules, *args, hybrid));
  return FusedRun{count, std::move(run), {}};
}

}  // namespace marlin::cuda
