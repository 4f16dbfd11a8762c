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
              const PersistentArguments& args) {
    const DeviceScope scope(device_->index);
    arguments_ = args;
    function_ = FunctionOf<PersistentKernels>({model.kind()}, {});
    MARLIN_RETURN_IF_ERROR(Check(AllowAllShared(function_), "persistent"));
    const auto layer_bytes = static_cast<int64_t>(model.layers().size() * sizeof(PersistentLayer));
    const auto expert_bytes =
        static_cast<int64_t>(model.experts().size() * sizeof(PersistentExpert));
    MARLIN_RETURN_IF_ERROR(LoadRouters(model));
    if (expert_bytes > 0) {
      MARLIN_ASSIGN_OR_RETURN(experts_, DeviceMemory::Allocate(device_, expert_bytes));
      MARLIN_RETURN_IF_ERROR(Upload(experts_, model.experts().data(), expert_bytes));
    }
    int64_t routed = 0;
    for (PersistentLayer& layer : model.layers()) {
      if (layer.experts == nullptr) continue;
      layer.experts =
          reinterpret_cast<const PersistentExpert*>(experts_.data()) + routed * args.router.experts;
      layer.router = reinterpret_cast<const float*>(routers_.data()) +
                     routed * args.router.experts * args.features;
      ++routed;
    }
    MARLIN_ASSIGN_OR_RETURN(layers_, DeviceMemory::Allocate(device_, layer_bytes));
    MARLIN_RETURN_IF_ERROR(Upload(layers_, model.layers().data(), layer_bytes));
    MARLIN_RETURN_IF_ERROR(CopyHeadNorms(model.layers()));
    const auto schedule_bytes = static_cast<int64_t>(schedules.data.size());
    MARLIN_ASSIGN_OR_RETURN(schedules_, DeviceMemory::Allocate(device_, schedule_bytes));
    MARLIN_RETURN_IF_ERROR(Upload(schedules_, schedules.data.data(), schedule_bytes));
    arguments_.schedules = schedules_.data();
    arguments_.layers = reinterpret_cast<const PersistentLayer*>(layers_.data());
    arguments_.layer_count = static_cast<int>(model.layers().size());
    arguments_.errors = errors_.view();
    return Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  bool Takes(const StepValues& values) const override {
    if (values.rows() != 1 || values.first_rows.dim(0) != 2) return false;
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

  /// The routers' matrices in fp32, a row for every expert.
  Status LoadRouters(const PersistentDescription& model) {
    if (model.routers().empty()) return {};
    const int64_t features = arguments_.features;
    const int64_t elements = arguments_.router.experts * features;
    const auto count = static_cast<int64_t>(model.routers().size());
    MARLIN_ASSIGN_OR_RETURN(routers_, DeviceMemory::Allocate(device_, count * elements * 4));
    auto* to = reinterpret_cast<float*>(routers_.data());
    for (const PreparedTiles* router : model.routers()) {
      const DenseView dense = {to, Element::kF32, 1, features};
      MARLIN_RETURN_IF_ERROR(
          Check(LaunchDequantizePrepared(*router, 0, dense, nullptr), "persistent"));
      to += elements;
    }
    return {};
  }

  /// The exchange buffers of a stream: launches on one stream follow each other.
  Result<uint32_t*> WordsOf(cudaStream_t stream) const {
    const std::lock_guard lock(mutex_);
    DeviceMemory& memory = words_[stream];
    if (memory.data() == nullptr) {
      const AllowAllocation allow;
      const auto bytes = (2 * int64_t{arguments_.exchange.words} + 1) * int64_t{sizeof(uint32_t)};
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
  mutable std::mutex mutex_;
  mutable std::map<cudaStream_t, DeviceMemory> words_;
};

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
  std::optional<LayerSteps> steps = TakeLayer(operations);
  if (!steps.has_value()) return FusedRun();
  const int64_t first = steps->project->layer;
  if (step.accuracy != Accuracy::kDefault || !step.allow_bf16_activations) {
    return Refuse(first, {"exact products or activations in fp32"});
  }
  if (step.determinism != Determinism::kDefault) return Refuse(first, {"batch invariance"});
  PersistentDescription model(shape.multiprocessors);
  size_t count = 0;
  for (; steps.has_value(); steps = TakeLayer(operations.subspan(count))) {
    const Support support = model.AddLayer(*steps, step.hidden);
    if (!support.ok()) return Refuse(steps->project->layer, support);
    count += LayerSteps::kCount;
  }
  // A run that ends in the middle of the model would leave its later layers to a second one.
  if (count == operations.size() || !std::holds_alternative<HeadStep>(operations[count])) {
    return Refuse(first, {"later layers of other operations"});
  }
  if (FunctionOf<PersistentKernels>({model.kind()}, {}) == nullptr) {
    return Refuse(first, {"codes that it does not read"});
  }
  const Schedules schedules = ScheduleLayers(model.layers(), shape.multiprocessors);
  const std::optional<PersistentArguments> args = LayOutPersistent(
      model.shape(), model.layers(), schedules, shape.multiprocessors, shape.shared_bytes);
  if (!args.has_value()) return Refuse(first, {"phases that do not fit in shared memory"});
  auto run = std::make_unique<PersistentSteps>(device, errors, shape.multiprocessors);
  MARLIN_RETURN_IF_ERROR(run->Load(model, schedules, *args));
  return FusedRun{count, std::move(run), {}};
}

}  // namespace marlin::cuda
