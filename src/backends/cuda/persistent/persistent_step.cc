#include "backends/cuda/persistent/persistent_step.h"

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/common/launch.h"
#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/layout/code_kind.h"
#include "backends/cuda/persistent/persistent_description.h"
#include "backends/cuda/persistent/persistent_plan.h"
#include "backends/cuda/persistent/persistent_pool.h"
#include "backends/cuda/plan/kernel_instances.h"
#include "backends/cuda/weights/dequantize_prepared.h"
#include "backends/cuda/weights/prepared_tiles.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

/// The layers in device memory, for a number of rows.
struct PersistentForRows {
  PersistentArguments arguments;
  const void* function = nullptr;
  DeviceMemory layers;
  std::shared_ptr<const DeviceMemory> schedules;
  std::shared_ptr<StreamMemory> buffers;
};

/// The layers of a number of rows, and how the kernel runs them.
struct PersistentPlan {
  std::vector<PersistentLayer> layers;
  Schedules schedules = {};
  PersistentArguments arguments = {};
};

class PersistentSteps final : public FusedOperations {
 public:
  PersistentSteps(std::shared_ptr<DeviceHandle> device, const ValueErrors& errors, int blocks)
      : device_(std::move(device)), errors_(errors), blocks_(blocks) {}

  /// Uploads what the kernel reads. `plans`: of one row, then of as many as there are.
  Status Load(const PersistentDescription& model, std::span<PersistentPlan> plans,
              PersistentPool& pool) {
    const DeviceScope scope(device_->index);
    const PersistentArguments& shape = plans[0].arguments;
    const auto expert_bytes =
        static_cast<int64_t>(model.experts().size() * sizeof(PersistentExpert));
    MARLIN_ASSIGN_OR_RETURN(routers_, LoadRows(model.routers(), shape.features));
    MARLIN_ASSIGN_OR_RETURN(delta_rows_, LoadRows(model.delta_rows(), shape.features));
    if (expert_bytes > 0) {
      MARLIN_ASSIGN_OR_RETURN(experts_, DeviceMemory::Allocate(device_, expert_bytes));
      MARLIN_RETURN_IF_ERROR(Upload(experts_, model.experts().data(), expert_bytes));
    }
    for (PersistentPlan& plan : plans) {
      MARLIN_RETURN_IF_ERROR(LoadPlan(model.kind(), &plan, pool));
    }
    return Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  /// The rows are next tokens, one of a sequence or several. Where the kernel has the states, those
  /// of a sequence leave one, without turns.
  bool Takes(const StepValues& values) const override {
    const int64_t rows = values.rows();
    const int64_t sequences = values.first_rows.dim(0) - 1;
    if (Find(rows) == nullptr || sequences < 1 || sequences > rows) return false;
    const DType mixed = values.mixed.dtype();
    if (mixed != DType::kBf16 && mixed != DType::kF32) return false;
    if (!HasPages(*Find(rows))) return true;
    return values.turns.empty() && values.pages.size() <= kMostCacheGroups &&
           std::ranges::all_of(values.pages, [](const StepPages& pages) {
             return pages.slabs.size() <= kMostCacheSlabs;
           });
  }

  Status Run(const StepValues& values, const OperationContext& context) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    const PersistentForRows& found = *Find(values.rows());
    PersistentArguments args = found.arguments;
    const auto stream = static_cast<cudaStream_t>(context.stream);
    MARLIN_ASSIGN_OR_RETURN(uint8_t* const words, found.buffers->Of(stream));
    args.words = reinterpret_cast<uint32_t*>(words);
    args.clock = args.words + 2 * args.exchange.words;
    args.hidden = values.hidden.As<float>();
    args.position = values.positions.As<int32_t>();
    args.first_rows = values.first_rows.As<int32_t>();
    args.sequences = static_cast<int>(values.first_rows.dim(0)) - 1;
    // In several steps of one recording a row that has ended changes no state.
    args.moves =
        values.advance.tokens.empty() ? args.position : values.advance.state_rows.As<int32_t>();
    args.mixed = values.mixed.data();
    args.mixed_is_bf16 = values.mixed.dtype() == DType::kBf16;
    args.projected = values.projected.As<float>();
    args.latent = values.latent.As<float>();
    for (size_t i = 0; HasPages(found) && i < values.pages.size(); ++i) {
      const StepPages& pages = values.pages[i];
      CacheGroup& group = args.groups[i];
      std::ranges::copy(pages.slabs, group.slabs);
      group.slab_count = static_cast<int>(pages.slabs.size());
      group.block_table = pages.block_tables.As<int32_t>();
      group.blocks = static_cast<int>(pages.block_tables.dim(1));
    }
    return Check(Launch(args, found.function, stream), "persistent");
  }

 private:
  Status Check(cudaError_t error, const char* what) const {
    return device_->errors.Check(error, what);
  }
  Status Upload(const DeviceMemory& to, const void* from, int64_t bytes) const {
    return Check(cudaMemcpy(to.data(), from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice),
                 "cudaMemcpy");
  }

  /// Whether the kernel reads caches or states.
  static bool HasPages(const PersistentForRows& plan) { return !IsBetween(plan.arguments.form); }
  /// Null: the kernel takes no such number of rows.
  const PersistentForRows* Find(int64_t rows) const {
    const auto found = std::ranges::find(
        plans_, rows, [](const PersistentForRows& plan) { return plan.arguments.rows; });
    return found == plans_.end() ? nullptr : &*found;
  }

  Status LoadPlan(CodeKind kind, PersistentPlan* plan, PersistentPool& pool) {
    PersistentForRows loaded;
    PersistentArguments& args = loaded.arguments;
    args = plan->arguments;
    loaded.function = FunctionOf<PersistentKernels>({kind}, {args.form, args.limb_stride > 0});
    MARLIN_RETURN_IF_ERROR(Check(AllowAllShared(loaded.function), "persistent"));
    SetAddresses(args, plan->layers);
    const auto layer_bytes = static_cast<int64_t>(plan->layers.size() * sizeof(PersistentLayer));
    MARLIN_ASSIGN_OR_RETURN(loaded.layers, DeviceMemory::Allocate(device_, layer_bytes));
    MARLIN_RETURN_IF_ERROR(Upload(loaded.layers, plan->layers.data(), layer_bytes));
    if (args.form != PersistentForm::kHybrid && args.kv_heads > 0) {
      MARLIN_RETURN_IF_ERROR(CopyHeadNorms(plan->layers, args.key_dim, loaded.layers));
    }
    MARLIN_ASSIGN_OR_RETURN(loaded.schedules, pool.Copy(plan->schedules.data));
    const int64_t words = 2 * int64_t{args.exchange.words} + kClocks;
    loaded.buffers =
        pool.Memory(ExchangeKey(args, plan->layers), words * int64_t{sizeof(uint32_t)});
    args.schedules = loaded.schedules->data();
    args.layers = reinterpret_cast<const PersistentLayer*>(loaded.layers.data());
    args.errors = errors_.view();
    plans_.push_back(std::move(loaded));
    return {};
  }

  /// Sets the layers' parts of the memory that all numbers of rows share.
  void SetAddresses(const PersistentArguments& args, std::span<PersistentLayer> layers) const {
    int64_t routed = 0;
    int64_t deltas = 0;
    for (PersistentLayer& layer : layers) {
      if (layer.delta_rows != nullptr) {
        layer.delta_rows = reinterpret_cast<const float*>(delta_rows_.data()) +
                           deltas++ * 2 * args.delta.value_heads * args.features;
      }
      if (layer.experts == nullptr) continue;
      layer.experts =
          reinterpret_cast<const PersistentExpert*>(experts_.data()) + routed * args.router.table();
      layer.router = reinterpret_cast<const float*>(routers_.data()) +
                     routed * args.router.rows() * args.features;
      ++routed;
    }
  }

  /// Puts the norms of queries and keys in the layers' tables.
  Status CopyHeadNorms(std::span<const PersistentLayer> layers, int key_dim,
                       const DeviceMemory& to) const {
    auto* const tables = reinterpret_cast<PersistentLayer*>(to.data());
    const auto bytes = static_cast<size_t>(key_dim) * sizeof(float);
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

  /// Cooperative: the CTAs wait for each other.
  cudaError_t Launch(PersistentArguments& args, const void* function, cudaStream_t stream) const {
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
    return cudaLaunchKernelExC(&config, function, parameters);
  }

  const std::shared_ptr<DeviceHandle> device_;
  const ValueErrors& errors_;
  const int blocks_;
  std::vector<PersistentForRows> plans_;
  DeviceMemory experts_;
  DeviceMemory routers_;
  DeviceMemory delta_rows_;
};

/// Which layers a model has: in the order in which their operations are taken.
enum class ModelLayers : uint8_t { kAttention, kHybrid, kBetween };

template <typename Step>
bool HasStep(const StepDescription& step) {
  return std::ranges::any_of(step.operations, [](const StepOperation& operation) {
    return std::holds_alternative<Step>(operation);
  });
}

ModelLayers LayersOf(const StepDescription& step) {
  if (HasStep<LatentProjectStep>(step)) return ModelLayers::kBetween;
  return HasStep<GatedDeltaStep>(step) ? ModelLayers::kHybrid : ModelLayers::kAttention;
}

int64_t LayerOf(const LayerSteps& steps) {
  if (steps.latent != nullptr) return steps.latent->layer;
  return steps.out != nullptr ? steps.out->layer : steps.project->layer;
}

/// The plan of one row; nothing if it does not fit.
std::optional<PersistentPlan> PlanOne(const PersistentDescription& model,
                                      const DeviceShape& shape) {
  PersistentPlan plan = {.layers = model.layers()};
  PersistentArguments of_one = model.shape();
  of_one.kind = model.kind();
  plan.schedules = ScheduleLayers(plan.layers, shape.multiprocessors);
  const std::optional<PersistentArguments> args = LayOutPersistent(
      of_one, plan.layers, plan.schedules, shape.multiprocessors, shape.shared_bytes);
  if (!args.has_value()) return std::nullopt;
  plan.arguments = *args;
  return plan;
}

/// The rows up to which the kernel is faster than the operations: with dense layers those read
/// weights once, too, and no CTA gathers the inputs of all rows
/// (docs/log/2026-11-29-persistent-rows.md).
int MostRows(const PersistentDescription& model) {
  constexpr int kMostDenseRows = 3;
  if (model.shape().form == PersistentForm::kHybrid) return 1;
  return model.experts().empty() ? kMostDenseRows : kMostPersistentRows;
}

/// The form of several rows.
PersistentForm RowsFormOf(const PersistentDescription& model) {
  if (model.shape().form == PersistentForm::kBetween) return PersistentForm::kBetweenRows;
  const PersistentRouter& router = model.shape().router;
  const bool by_logits = router.groups == 1 &&
                         router.scoring != static_cast<int>(RouterOptions::Scoring::kSigmoid) &&
                         std::ranges::all_of(model.layers(), [](const PersistentLayer& layer) {
                           return layer.choice_bias == nullptr;
                         });
  const bool plain = by_logits && model.shape().form == PersistentForm::kToken;
  return plain ? PersistentForm::kRows : PersistentForm::kGeneralRows;
}

/// The same of several rows.
std::optional<PersistentPlan> PlanRows(int rows, const PersistentDescription& model,
                                       const DeviceShape& shape) {
  PersistentPlan plan = {.layers = model.layers()};
  PersistentArguments of_rows = model.shape();
  of_rows.kind = model.kind();
  of_rows.form = RowsFormOf(model);
  of_rows.rows = rows;
  for (PersistentLayer& layer : plan.layers) {
    // The last projections' sums are not the residual's.
    if (layer.mlp_norm == nullptr) continue;
    SplitRows(rows, of_rows.router, shape.multiprocessors, &layer);
  }
  plan.schedules = ScheduleLayers(plan.layers, shape.multiprocessors, rows);
  const std::optional<PersistentArguments> args = LayOutPersistent(
      of_rows, plan.layers, plan.schedules, shape.multiprocessors, shape.shared_bytes);
  if (!args.has_value()) return std::nullopt;
  plan.arguments = *args;
  return plan;
}

std::string Reason(int64_t layer, const Support& support) {
  return fmt::format("layer {}: {}", layer, support.reason());
}
FusedRun Refuse(int64_t layer, const Support& support) {
  return {0, nullptr, Reason(layer, support)};
}

/// The layers that a run of operations begins with.
class RunLayers {
 public:
  RunLayers(const StepDescription& step, std::span<const StepOperation> operations,
            ModelLayers layers)
      : step_(step), operations_(operations), layers_(layers), next_(Take()) {}

  /// Whether there is one.
  bool empty() const { return !next_.has_value(); }
  int64_t first_layer() const { return LayerOf(*next_); }
  /// Operations that were added.
  size_t count() const { return count_; }
  /// Why the last projections were not; else empty.
  const std::string& rest() const { return rest_; }

  /// Adds them all. Returns why the kernel does not run one of them; empty: it does.
  std::string AddTo(PersistentDescription* model) {
    for (bool ends = false; !ends && next_.has_value(); next_ = Take()) {
      const Support support = model->AddLayer(*next_, step_.hidden);
      if (!support.ok()) {
        std::string reason = Reason(LayerOf(*next_), support);
        if (next_->latent == nullptr) return reason;
        rest_ = std::move(reason);
        return {};
      }
      count_ += next_->count;
      ends = next_->ends();
    }
    return {};
  }

 private:
  std::optional<LayerSteps> Take() const {
    const auto rest = operations_.subspan(count_);
    if (layers_ == ModelLayers::kBetween) return TakeLayerBetween(rest, count_ == 0);
    if (layers_ == ModelLayers::kHybrid) return TakeHybridLayer(rest, count_ == 0);
    return TakeLayer(rest);
  }

  const StepDescription& step_;
  std::span<const StepOperation> operations_;
  ModelLayers layers_;
  size_t count_ = 0;
  std::optional<LayerSteps> next_;
  std::string rest_;
};

Result<FusedRun> FuseLayers(PersistentPool& pool, const ValueErrors& errors,
                            const DeviceShape& shape, const StepDescription& step,
                            std::span<const StepOperation> operations, ModelLayers layers) {
  RunLayers run_layers(step, operations, layers);
  if (run_layers.empty()) return FusedRun();
  const int64_t first = run_layers.first_layer();
  if (step.accuracy != Accuracy::kDefault || !step.allow_bf16_activations) {
    return Refuse(first, {"exact products or activations in fp32"});
  }
  if (step.determinism != Determinism::kDefault) return Refuse(first, {"batch invariance"});
  PersistentDescription model(shape.multiprocessors);
  if (std::string reason = run_layers.AddTo(&model); !reason.empty()) {
    return FusedRun{0, nullptr, std::move(reason)};
  }
  const size_t count = run_layers.count();
  if (layers == ModelLayers::kBetween) model.AddAhead(operations.subspan(count));
  // A run that ends in the middle of the model would leave its later layers to a second one.
  if (layers == ModelLayers::kAttention &&
      (count == operations.size() || !std::holds_alternative<HeadStep>(operations[count]))) {
    return Refuse(first, {"later layers of other operations"});
  }
  const PersistentForm form = model.shape().form;
  if (FunctionOf<PersistentKernels>({model.kind()}, {form}) == nullptr) {
    return Refuse(first, {"codes that it does not read"});
  }
  std::vector<PersistentPlan> plans;
  std::optional<PersistentPlan> one = PlanOne(model, shape);
  if (!one.has_value()) return Refuse(first, {"phases that do not fit in shared memory"});
  plans.push_back(*std::move(one));
  for (int rows = 2; rows <= MostRows(model); ++rows) {
    std::optional<PersistentPlan> more = PlanRows(rows, model, shape);
    if (more.has_value()) plans.push_back(*std::move(more));
  }
  auto run = std::make_unique<PersistentSteps>(pool.device(), errors, shape.multiprocessors);
  MARLIN_RETURN_IF_ERROR(run->Load(model, plans, pool));
  return FusedRun{count, std::move(run), run_layers.rest()};
}

}  // namespace

Result<FusedRun> FusePersistent(PersistentPool& pool, const ValueErrors& errors,
                                const DeviceShape& shape, const StepDescription& step,
                                std::span<const StepOperation> operations) {
  if (const auto* const mix = std::get_if<MixStep>(&operations.front())) {
    return Refuse(mix->layer, {"a mixer other than attention"});
  }
  const ModelLayers layers = LayersOf(step);
  MARLIN_ASSIGN_OR_RETURN(FusedRun run, FuseLayers(pool, errors, shape, step, operations, layers));
  if (run.count > 0 || layers == ModelLayers::kBetween) return run;
  // Where a mixer has to run elsewhere, what comes after it need not.
  MARLIN_ASSIGN_OR_RETURN(FusedRun between,
                          FuseLayers(pool, errors, shape, step, operations, ModelLayers::kBetween));
  return between.count > 0 ? std::move(between) : std::move(run);
}

Result<FusedRun> FuseWithin(PersistentPool& pool, const ValueErrors& errors,
                            const DeviceShape& shape, const StepDescription& step,
                            std::span<const StepOperation> operations) {
  if (LayersOf(step) != ModelLayers::kHybrid) return FusedRun();
  return FuseLayers(pool, errors, shape, step, operations, ModelLayers::kBetween);
}

}  // namespace marlin::cuda
