#include "backends/cuda/persistent/persistent_step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "backends/cuda/common/launch.h"
#include "backends/cuda/common/tile_gemm.h"
#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/persistent/persistent_plan.h"
#include "backends/cuda/plan/kernel_instances.h"
#include "backends/cuda/weights/dequantize_prepared.h"
#include "backends/cuda/weights/prepared_tiles.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

constexpr int kOperationsOfLayer = 5;

/// A layer's operations.
struct LayerSteps {
  const ProjectStep* project = nullptr;
  const AttentionStep* attention = nullptr;
  const ProjectAddStep* out = nullptr;
  const GateUpStep* gate_up = nullptr;
  const ProjectAddStep* down = nullptr;
  const RouteStep* route = nullptr;
  const ExpertsStep* experts = nullptr;
};

std::optional<LayerSteps> TakeLayer(std::span<const StepOperation> operations) {
  if (operations.size() < kOperationsOfLayer) return std::nullopt;
  LayerSteps steps;
  steps.project = std::get_if<ProjectStep>(&operations[0]);
  steps.attention = std::get_if<AttentionStep>(&operations[1]);
  steps.out = std::get_if<ProjectAddStep>(&operations[2]);
  steps.gate_up = std::get_if<GateUpStep>(&operations[3]);
  steps.down = std::get_if<ProjectAddStep>(&operations[4]);
  steps.route = std::get_if<RouteStep>(&operations[3]);
  steps.experts = std::get_if<ExpertsStep>(&operations[4]);
  const bool dense = steps.gate_up != nullptr && steps.down != nullptr;
  const bool routed = steps.route != nullptr && steps.experts != nullptr;
  if (steps.project == nullptr || steps.attention == nullptr || steps.out == nullptr) return {};
  if (!dense && !routed) return std::nullopt;
  return steps;
}

/// Whether tiles of two matrices of one shape are read alike.
bool SameTiles(const TileView& a, const TileView& b) { return a.n == b.n && SameTileLayout(a, b); }

/// Describes a model's layers for the kernel. A false result of a method: the kernel does not run
/// them.
class Describer {
 public:
  explicit Describer(int blocks) : blocks_(blocks) {}

  bool AddLayer(const LayerSteps& steps, const StepDescription& step) {
    const bool first = layers_.empty();
    layers_.emplace_back();
    PersistentLayer& layer = layers_.back();
    if (!AddAttention(steps, first, step.hidden, &layer)) return false;
    return steps.experts != nullptr ? AddExperts(steps, first, &layer)
                                    : AddMlp(steps, first, &layer);
  }

  CodeKind kind() const { return *kind_; }
  const PersistentArguments& shape() const { return shape_; }
  std::vector<PersistentLayer>& layers() { return layers_; }
  /// All layers' experts, one layer after another.
  const std::vector<PersistentExpert>& experts() const { return experts_; }
  const std::vector<const PreparedTiles*>& routers() const { return routers_; }

 private:
  /// The tiles of a part, if they are of the kind of all.
  std::optional<TileView> TilesOf(const PreparedWeights& part) {
    // Experts may be on the host.
    if (backend_ == nullptr) backend_ = Internals::Storage(part)->backend;
    if (Internals::Storage(part)->backend != backend_) return std::nullopt;
    const auto& prepared = static_cast<const PreparedTiles&>(*Internals::Storage(part));
    if (!prepared.traits.tiled || prepared.traits.sparse || prepared.traits.marlin_w4 ||
        TransformsInput(prepared.spec)) {
      return std::nullopt;
    }
    if (!kind_.has_value()) kind_ = prepared.kind();
    if (*kind_ != prepared.kind()) return std::nullopt;
    TileView tiles = prepared.Tiles(0);
    tiles.multiplier *= std::ldexp(1.0F, ExponentsOf(*kind_, true).shift + tiles.table_exponent);
    return tiles;
  }

  /// A linear map of one part, or of two equal ones: gate and up.
  bool AddGemm(const StepLinear& linear, PhaseGemm* gemm) {
    const size_t parts = linear.parts.size();
    if (parts != 1 && parts != 2) return false;
    const std::optional<TileView> tiles = TilesOf(linear.parts[0]);
    if (!tiles.has_value() || tiles->k == 0 || tiles->n % 4 != 0) return false;
    gemm->weights = *tiles;
    gemm->use = UseOf(*tiles, *kind_);
    gemm->sides = static_cast<int>(parts);
    if (parts == 2) {
      const std::optional<TileView> up = TilesOf(linear.parts[1]);
      if (!up.has_value() || !SameTiles(*tiles, *up)) return false;
      gemm->up_tiles = up->tiles;
      gemm->up_multiplier = up->multiplier;
    }
    gemm->bias = linear.bias.As<float>();
    gemm->n = tiles->n;
    gemm->strips = (tiles->n + kStripOutputs - 1) / kStripOutputs;
    gemm->k_tiles = tiles->tiles_of_strip;
    return true;
  }

  bool AddAttention(const LayerSteps& steps, bool first, int64_t hidden, PersistentLayer* layer) {
    const AttentionStep& attention = *steps.attention;
    PersistentArguments shape = shape_;
    shape.features = static_cast<int>(hidden);
    shape.heads = static_cast<int>(attention.heads);
    shape.kv_heads = static_cast<int>(attention.kv_heads);
    shape.key_dim = static_cast<int>(attention.key_dim);
    shape.value_dim = static_cast<int>(attention.value_dim);
    shape.scale = attention.options.scale != 0.0F
                      ? attention.options.scale
                      : 1.0F / std::sqrt(static_cast<float>(attention.key_dim));
    shape.frequencies = attention.rotary.inverse_frequencies.As<float>();
    shape.pairs = static_cast<int>(attention.rotary.inverse_frequencies.ElementCount());
    shape.rotary_factor = attention.rotary.attention_factor;
    shape.interleaved = attention.rotary.interleaved;
    shape.cache_bytes = attention.cache.type == DType::kF8E4M3 ? 1 : 2;
    if (!first && !SameAttention(shape)) return false;
    shape_ = shape;
    const auto fits = [](int64_t features, int64_t unit) {
      return features > 0 && features % unit == 0 && features <= kMostHeadFeatures;
    };
    const PagedCache& cache = attention.cache;
    // Rows of the cache are aligned to 16 bytes.
    const int64_t elements = 16 / shape.cache_bytes;
    // A lane rotates four features.
    if (shape.pairs % 4 != 0 || !fits(attention.key_dim, 16) || !fits(attention.value_dim, 32) ||
        attention.rope_dim != 0 || attention.heads % attention.kv_heads != 0 ||
        attention.heads / attention.kv_heads > kMostGroupHeads ||
        (cache.type != DType::kBf16 && cache.type != DType::kF8E4M3) ||
        cache.page_tokens != kCachePageTokens || cache.values_in_keys ||
        cache.page_stride % elements != 0 || cache.first_element % elements != 0 ||
        attention.cache_group >= kMostCacheGroups || hidden % 4 != 0 ||
        hidden > kMostPersistentHidden || !steps.out->out_norm.weight.empty() ||
        steps.out->from != ProjectAddStep::From::kMixed ||
        !AddGemm(steps.project->linear, &layer->gemms[static_cast<int>(Phase::kQkv)]) ||
        !AddGemm(steps.out->linear, &layer->gemms[static_cast<int>(Phase::kOut)])) {
      return false;
    }
    // The words of queries, keys and values are adjacent, as the outputs of one part are.
    if (layer->gemms[static_cast<int>(Phase::kQkv)].sides != 1 ||
        layer->gemms[static_cast<int>(Phase::kOut)].sides != 1) {
      return false;
    }
    for (const Phase phase : {Phase::kQkv, Phase::kOut}) {
      SplitPhase(phase, blocks_, &layer->gemms[static_cast<int>(phase)]);
    }
    layer->attention_norm = steps.project->norm.weight.As<float>();
    layer->attention_epsilon = steps.project->norm.epsilon;
    layer->query_norm = attention.q_norm.weight.As<float>();
    layer->key_norm = attention.k_norm.weight.As<float>();
    layer->query_epsilon = attention.q_norm.epsilon;
    layer->key_epsilon = attention.k_norm.epsilon;
    layer->sinks = attention.options.sinks.As<float>();
    layer->cache_group = static_cast<int>(attention.cache_group);
    layer->first_element = cache.first_element;
    CacheGroup& group = shape_.groups[layer->cache_group];
    group.window = static_cast<int>(std::min<int64_t>(attention.options.window, 1 << 30));
    std::optional<int>& window = windows_[attention.cache_group];
    if (window.value_or(group.window) != group.window) return false;
    window = group.window;
    group.page_stride = cache.page_stride;
    group.slab_pages = static_cast<uint32_t>(std::min<int64_t>(cache.slab_pages, 1U << 31));
    return layer->attention_norm != nullptr;
  }

  bool SameAttention(const PersistentArguments& other) const {
    return shape_.features == other.features && shape_.heads == other.heads &&
           shape_.kv_heads == other.kv_heads && shape_.key_dim == other.key_dim &&
           shape_.value_dim == other.value_dim && shape_.scale == other.scale &&
           shape_.frequencies == other.frequencies && shape_.pairs == other.pairs &&
           shape_.rotary_factor == other.rotary_factor && shape_.interleaved == other.interleaved &&
           shape_.cache_bytes == other.cache_bytes;
  }

  bool SetGate(const GateOptions& gate, bool first) {
    const GateView view = {static_cast<int>(gate.activation), gate.limit, gate.alpha};
    if (first) shape_.gate = view;
    return shape_.gate.activation == view.activation && shape_.gate.limit == view.limit &&
           shape_.gate.alpha == view.alpha;
  }

  static bool FitTogether(const PhaseGemm& gates, const PhaseGemm& down) {
    return gates.n * gates.sides == 2 * down.weights.k && down.sides == 1 &&
           down.weights.k % 4 == 0;
  }

  bool AddMlp(const LayerSteps& steps, bool first, PersistentLayer* layer) {
    PhaseGemm& gates = layer->gemms[static_cast<int>(Phase::kGates)];
    PhaseGemm& down = layer->gemms[static_cast<int>(Phase::kDown)];
    if (!SetGate(steps.gate_up->gate, first) || !AddGemm(steps.gate_up->gate_up, &gates) ||
        !AddGemm(steps.down->linear, &down) || !steps.down->out_norm.weight.empty() ||
        steps.down->from != ProjectAddStep::From::kInner || !FitTogether(gates, down)) {
      return false;
    }
    SplitPhase(Phase::kGates, blocks_, &gates);
    SplitPhase(Phase::kDown, blocks_, &down);
    layer->mlp_norm = steps.gate_up->norm.weight.As<float>();
    layer->mlp_epsilon = steps.gate_up->norm.epsilon;
    return layer->mlp_norm != nullptr;
  }

  bool SetRouter(const RouterOptions& options, int64_t experts) {
    PersistentRouter router;
    router.experts = static_cast<int>(experts);
    router.top_k = static_cast<int>(options.top_k);
    router.scoring = static_cast<int>(options.scoring);
    router.groups = static_cast<int>(options.groups);
    router.top_groups = static_cast<int>(options.top_groups);
    router.normalize = options.normalize;
    router.scaling_factor = static_cast<double>(options.scaling_factor);
    if (routers_.empty()) shape_.router = router;
    return shape_.router.experts == router.experts && shape_.router.top_k == router.top_k &&
           shape_.router.scoring == router.scoring && shape_.router.groups == router.groups &&
           shape_.router.top_groups == router.top_groups &&
           shape_.router.normalize == router.normalize &&
           shape_.router.scaling_factor == router.scaling_factor;
  }

  bool AddExperts(const LayerSteps& steps, bool first, PersistentLayer* layer) {
    const ExpertsStep& step = *steps.experts;
    const auto count = static_cast<int64_t>(step.experts.size());
    if (count == 0 || !step.shared.gate_up.parts.empty() || !step.out_norm.weight.empty() ||
        steps.route->router.parts.size() != 1 || steps.route->options.top_k > kMostChosenExperts ||
        steps.route->options.top_k > count || !SetGate(step.gate, first) ||
        !SetRouter(steps.route->options, count)) {
      return false;
    }
    PhaseGemm& gates = layer->gemms[static_cast<int>(Phase::kGates)];
    PhaseGemm& down = layer->gemms[static_cast<int>(Phase::kDown)];
    for (int64_t e = 0; e < count; ++e) {
      PhaseGemm its_gates;
      PhaseGemm its_down;
      const StepMlp& mlp = step.experts[static_cast<size_t>(e)];
      if (!AddGemm(mlp.gate_up, &its_gates) || !AddGemm(mlp.down, &its_down) ||
          !FitTogether(its_gates, its_down)) {
        return false;
      }
      if (e == 0) {
        gates = its_gates;
        down = its_down;
      }
      if (!SameTiles(gates.weights, its_gates.weights) || gates.sides != its_gates.sides ||
          gates.use != its_gates.use || !SameTiles(down.weights, its_down.weights) ||
          down.use != its_down.use) {
        return false;
      }
      experts_.push_back({its_gates.weights.tiles, its_gates.up_tiles, its_down.weights.tiles,
                          its_gates.bias, its_down.bias, its_gates.weights.multiplier,
                          its_gates.up_multiplier, its_down.weights.multiplier});
    }
    // Each expert has its own.
    gates.bias = nullptr;
    down.bias = nullptr;
    gates.copies = shape_.router.top_k;
    down.segments = shape_.router.top_k;
    down.k_tiles *= down.segments;
    SplitPhase(Phase::kGates, blocks_, &gates);
    SplitPhase(Phase::kDown, blocks_, &down);
    layer->mlp_norm = steps.route->norm.weight.As<float>();
    layer->mlp_epsilon = steps.route->norm.epsilon;
    layer->router_bias = steps.route->router.bias.As<float>();
    layer->choice_bias = steps.route->options.choice_bias.As<float>();
    // Replaced by addresses, once there is memory.
    layer->experts = reinterpret_cast<const PersistentExpert*>(experts_.data());
    routers_.push_back(
        static_cast<const PreparedTiles*>(Internals::Storage(steps.route->router.parts[0])));
    return layer->mlp_norm != nullptr;
  }

  const int blocks_;
  const void* backend_ = nullptr;  ///< The one that prepared the first layer.
  std::optional<CodeKind> kind_;
  PersistentArguments shape_;
  std::array<std::optional<int>, kMostCacheGroups> windows_;
  std::vector<PersistentLayer> layers_;
  std::vector<PersistentExpert> experts_;
  std::vector<const PreparedTiles*> routers_;
};

class PersistentSteps final : public FusedOperations {
 public:
  PersistentSteps(std::shared_ptr<DeviceHandle> device, const ValueErrors& errors, int blocks)
      : device_(std::move(device)), errors_(errors), blocks_(blocks) {}

  /// Uploads what the kernel reads.
  Status Load(Describer& model, const Schedules& schedules, const PersistentArguments& args) {
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
  Status LoadRouters(const Describer& model) {
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

}  // namespace

Result<FusedRun> FusePersistent(const std::shared_ptr<DeviceHandle>& device,
                                const ValueErrors& errors, const DeviceShape& shape,
                                const StepDescription& step,
                                std::span<const StepOperation> operations) {
  if (step.accuracy != Accuracy::kDefault || step.determinism != Determinism::kDefault ||
      !step.allow_bf16_activations) {
    return FusedRun();
  }
  Describer model(shape.multiprocessors);
  size_t count = 0;
  while (const std::optional<LayerSteps> steps = TakeLayer(operations.subspan(count))) {
    if (!model.AddLayer(*steps, step)) return FusedRun();
    count += kOperationsOfLayer;
  }
  // A run that ends in the middle of the model would leave its later layers to a second one.
  if (count == 0 || count == operations.size() ||
      !std::holds_alternative<HeadStep>(operations[count])) {
    return FusedRun();
  }
  if (FunctionOf<PersistentKernels>({model.kind()}, {}) == nullptr) return FusedRun();
  const Schedules schedules = ScheduleLayers(model.layers(), shape.multiprocessors);
  const std::optional<PersistentArguments> args = LayOutPersistent(
      model.shape(), model.layers(), schedules, shape.multiprocessors, shape.shared_bytes);
  if (!args.has_value()) return FusedRun();
  auto steps = std::make_unique<PersistentSteps>(device, errors, shape.multiprocessors);
  MARLIN_RETURN_IF_ERROR(steps->Load(model, schedules, *args));
  return FusedRun{count, std::move(steps)};
}

}  // namespace marlin::cuda
