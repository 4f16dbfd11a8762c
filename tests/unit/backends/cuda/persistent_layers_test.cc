// Which of a model's operations the persistent kernel takes, and which layers it runs.
#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

#include "backends/cuda/persistent/persistent_plan.h"

namespace marlin::cuda::persistent_layers_test {
namespace {

/// A dense layer that the kernel runs.
struct DenseLayer {
  DenseLayer() {
    project.norm.weight = gate_up.norm.weight = TensorView(weight, DType::kF32, {4});
    attention.heads = 32;
    attention.kv_heads = 4;
    attention.key_dim = attention.value_dim = 128;
    attention.rotary.inverse_frequencies = TensorView(weight, DType::kF32, {4});
    attention.cache.type = DType::kBf16;
    attention.cache.page_tokens = 64;
    down.from = ProjectAddStep::From::kInner;
  }
  std::string Reason(int64_t hidden = 2048) const {
    const LayerSteps steps = {.project = &project,
                              .attention = &attention,
                              .out = &out,
                              .gate_up = &gate_up,
                              .down = &down};
    return SupportsLayer(steps, hidden).reason();
  }
  std::string RoutedReason() const {
    const LayerSteps steps = {.project = &project,
                              .attention = &attention,
                              .out = &out,
                              .route = &route,
                              .experts = &experts};
    return SupportsLayer(steps, 2048).reason();
  }
  std::string DeltaReason() const {
    const LayerSteps steps = {
        .delta = &delta, .out = &out, .route = &route, .experts = &experts, .hybrid = true};
    return SupportsLayer(steps, 2048).reason();
  }

  float weight[4] = {};
  ProjectStep project;
  AttentionStep attention;
  GatedDeltaStep delta;
  ProjectAddStep out;
  GateUpStep gate_up;
  ProjectAddStep down;
  RouteStep route;
  ExpertsStep experts;
};

/// The reason after a change to the layer.
template <typename Change>
std::string ReasonAfter(Change change) {
  DenseLayer layer;
  change(layer);
  return layer.Reason();
}

TEST(PersistentLayers, SaysWhyItDoesNotRunALayer) {
  EXPECT_EQ(DenseLayer().Reason(), "");
  EXPECT_EQ(DenseLayer().Reason(8196),
            "8196 hidden features; supported: multiples of 4 up to 8192");
  EXPECT_EQ(ReasonAfter([](auto& layer) { layer.attention.rope_dim = 64; }), "latent attention");
  EXPECT_EQ(ReasonAfter([](auto& layer) { layer.attention.cache.type = DType::kF32; }),
            "a KV cache of f32; supported: bf16 and f8_e4m3");
  EXPECT_EQ(ReasonAfter([](auto& layer) { layer.attention.key_dim = 192; }),
            "keys of 192 features; supported: multiples of 16 up to 128");
  EXPECT_EQ(ReasonAfter([](auto& layer) { layer.attention.value_dim = 48; }),
            "values of 48 features; supported: multiples of 32 up to 128");
  EXPECT_EQ(ReasonAfter([](auto& layer) { layer.attention.kv_heads = 5; }),
            "32 query heads, not a multiple of the KV heads");
  EXPECT_EQ(ReasonAfter([](auto& layer) { layer.attention.kv_heads = 1; }),
            "more than 16 query heads for a KV head");
  EXPECT_EQ(ReasonAfter([](auto& layer) {
              layer.attention.q_norm = layer.gate_up.norm;
              layer.attention.norms = AttentionStep::Norms::kAllHeads;
            }),
            "norms of all heads at once");
  EXPECT_EQ(ReasonAfter([](auto& layer) {
              layer.attention.q_norm = layer.gate_up.norm;
              layer.attention.norms = AttentionStep::Norms::kAfterRotary;
            }),
            "");
  EXPECT_EQ(ReasonAfter([](auto& layer) { layer.attention.cache_group = 2; }),
            "more than 2 cache groups");
  EXPECT_EQ(ReasonAfter([](auto& layer) { layer.attention.cache.page_stride = 4; }),
            "KV cache pages that are not aligned to 16 bytes");
  EXPECT_EQ(ReasonAfter([](auto& layer) { layer.down.out_norm = layer.gate_up.norm; }),
            "a norm after a block");
  EXPECT_EQ(ReasonAfter([](auto& layer) { layer.project.norm = {}; }),
            "no RMS norm before a block");
}

TEST(PersistentLayers, SaysWhyItDoesNotRunExperts) {
  DenseLayer layer;
  EXPECT_EQ(layer.RoutedReason(), "no experts");
  layer.experts.experts.resize(64);
  EXPECT_EQ(layer.RoutedReason(), "a router of 0 parts");
  const PreparedWeights router;
  layer.route.router.parts = {&router, 1};
  layer.route.options.top_k = 17;
  EXPECT_EQ(layer.RoutedReason(), "17 experts for a token; supported: up to 16");
  layer.route.options.top_k = 8;
  EXPECT_EQ(layer.RoutedReason(), "no RMS norm before a block");
  layer.route.norm = layer.project.norm;
  EXPECT_EQ(layer.RoutedReason(), "");
  layer.route.options.top_k = 12;
  layer.experts.experts[0].down.in = 128;
  ExpertsStep& experts = layer.experts;
  experts.shared.gate_up.parts = {&router, 1};
  experts.shared.down.in = 128;
  EXPECT_EQ(layer.RoutedReason(), "");
  EXPECT_EQ(SharedParts(experts), 1);
  experts.shared.down.in = 512;
  EXPECT_EQ(layer.RoutedReason(), "");
  EXPECT_EQ(SharedParts(experts), 4);
  experts.shared.down.in = 640;
  EXPECT_EQ(layer.RoutedReason(), "17 experts for a token; supported: up to 16");
  experts.shared.down.in = 192;
  EXPECT_EQ(layer.RoutedReason(), "a shared expert of 192 features, not a multiple of the others'");
  experts.shared.down.in = 64;
  EXPECT_EQ(layer.RoutedReason(), "a shared expert of 64 features, not a multiple of the others'");
  experts.experts[0].down.in = 64;
  EXPECT_EQ(layer.RoutedReason(), "");
  experts.shared.down.in = 128;
  EXPECT_EQ(layer.RoutedReason(),
            "experts of 64 features and a wider shared one; supported: multiples of 128");
  experts.experts[0].down.in = experts.shared.down.in = 256;
  experts.shared.down.bias = TensorView(layer.weight, DType::kF32, {4});
  EXPECT_EQ(layer.RoutedReason(), "");
  experts.shared.down.in = 512;
  EXPECT_EQ(layer.RoutedReason(), "biases of a shared expert that is wider than the others");
  experts.shared.down.bias = {};
  experts.shared_gate.parts = {&router, 1};
  EXPECT_EQ(layer.RoutedReason(), "");
  experts.scales_inputs = true;
  EXPECT_EQ(layer.RoutedReason(), "experts of scaled inputs");
}

TEST(PersistentLayers, SaysWhyItDoesNotRunAGatedDeltaNet) {
  DenseLayer layer;
  const PreparedWeights parts[2];
  layer.delta.weights.sizes = {16, 32, 128, 128, 4};
  layer.delta.linear.parts = parts;
  layer.delta.norm = layer.project.norm;
  layer.route.norm = layer.project.norm;
  layer.route.router.parts = {parts, 1};
  layer.route.options.top_k = 8;
  layer.experts.experts.resize(64);
  layer.experts.shared.gate_up.parts = {parts, 1};
  layer.experts.shared.down.in = layer.experts.experts[0].down.in = 512;
  EXPECT_EQ(layer.DeltaReason(), "");
  const auto after = [&](const auto& change) {
    DenseLayer changed = layer;
    change(changed.delta);
    return changed.DeltaReason();
  };
  EXPECT_EQ(after([](auto& delta) { delta.weights.sizes.conv_width = 3; }),
            "a convolution of 3 tokens; supported: 4");
  EXPECT_EQ(after([](auto& delta) { delta.weights.sizes.key_dim = 48; }),
            "delta rules of 48 key features; supported: multiples of 32 up to 128");
  EXPECT_EQ(after([](auto& delta) { delta.weights.sizes.value_dim = 96; }),
            "delta rules of 96 value features; supported: 32, 64 and 128");
  EXPECT_EQ(after([&](auto& delta) {
              delta.linear.parts = {parts, 1};
            }),
            "inputs of a delta rule in one part");
  EXPECT_EQ(after([](auto& delta) { delta.cache_group = 2; }), "more than 2 cache groups");
  EXPECT_EQ(after([](auto& delta) { delta.states.page_stride = 6; }),
            "states that are not aligned to 16 bytes");
  EXPECT_EQ(after([](auto& delta) { delta.norm = {}; }), "no RMS norm before a block");
  layer.experts.shared_gate.parts = parts;
  EXPECT_EQ(layer.DeltaReason(), "a gate of the shared expert of 2 parts");
  layer.experts.shared_gate = {};
  layer.route.options.top_k = 16;
  EXPECT_EQ(layer.DeltaReason(), "17 experts for a token; supported: up to 16");
}

/// The reason after a change to the projections before latent attention.
template <typename Change>
std::string LatentReasonAfter(Change change) {
  static const float kWeight[4] = {};
  const PreparedWeights part;
  LatentProjectStep latent;
  latent.norm.weight = TensorView(kWeight, DType::kF32, {4});
  latent.kv_norm.weight = TensorView(kWeight, DType::kF32, {512});
  latent.q.parts = {&part, 1};
  latent.kv_a.out = 576;
  change(latent);
  const LayerSteps steps = {.latent = &latent, .between = true};
  EXPECT_TRUE(steps.ends());
  return SupportsLayer(steps, 2048).reason();
}

TEST(PersistentLayers, SaysWhyItDoesNotRunProjectionsOfLatents) {
  const auto of_rank = [](auto& latent) {
    latent.q = {};
    latent.q_a.out = 1536;
    latent.q_norm = latent.norm;
  };
  EXPECT_EQ(LatentReasonAfter([](auto&) {}), "");
  EXPECT_EQ(LatentReasonAfter(of_rank), "");
  EXPECT_EQ(LatentReasonAfter([](auto& latent) { latent.norm.centers = true; }),
            "no RMS norm before a block");
  EXPECT_EQ(LatentReasonAfter([](auto& latent) { latent.kv_norm = {}; }), "no RMS norm of latents");
  EXPECT_EQ(LatentReasonAfter([&](auto& latent) {
              of_rank(latent);
              latent.q_norm = {};
            }),
            "no RMS norm of queries' latents");
  EXPECT_EQ(LatentReasonAfter([](auto& latent) {
              latent.kv_norm.weight = TensorView(latent.norm.weight.data(), DType::kF32, {510});
            }),
            "latents of 510 features; supported: multiples of 4");
  EXPECT_EQ(LatentReasonAfter([](auto& latent) { latent.kv_a.out = 2112; }),
            "latents of 2112 features; supported: up to 2048");
  EXPECT_EQ(LatentReasonAfter([&](auto& latent) {
              of_rank(latent);
              latent.q_a.out = 2052;
            }),
            "latents of 2052 features; supported: up to 2048");
}

TEST(PersistentLayers, TakesTheLayersBetweenLatentAttentions) {
  ProjectAddStep down;
  down.from = ProjectAddStep::From::kInner;
  const std::vector<StepOperation> model = {
      EmbedStep(),         LatentProjectStep(), AttentionStep(),  // 0 to 2
      ProjectAddStep(),    GateUpStep(),        down,             // 3 to 5: a dense layer.
      LatentProjectStep(), AttentionStep(),                       // 6, 7
      ProjectAddStep(),    RouteStep(),         ExpertsStep(),    // 8 to 10
      HeadStep()};
  const std::span<const StepOperation> all(model);
  const auto count = [&](size_t from, bool first) {
    const auto steps = TakeLayerBetween(all.subspan(from), first);
    return steps.has_value() ? steps->count : 0;
  };
  for (const size_t from : std::vector<size_t>{0, 1, 2, 4, 5, 6, 7, 9, 10, 11, 12}) {
    EXPECT_EQ(count(from, true), 0) << from;
  }
  EXPECT_EQ(count(3, true), 3);
  EXPECT_EQ(count(8, true), 3);
  EXPECT_EQ(count(6, false), 1);
  EXPECT_TRUE(TakeLayerBetween(all.subspan(6), false)->ends());
  EXPECT_FALSE(TakeLayerBetween(all.subspan(3), true)->ends());
  for (const size_t from : std::vector<size_t>{3, 7, 8, 11, 12})
    EXPECT_EQ(count(from, false), 0) << from;
}

TEST(PersistentLayers, TakesTheLayersOfAHybridModel) {
  ProjectAddStep down;
  down.from = ProjectAddStep::From::kInner;
  const std::vector<StepOperation> model = {
      GatedDeltaStep(), ProjectAddStep(), GateUpStep(),  down,  // 0 to 3: a layer.
      ProjectStep(),    AttentionStep(),                        // 4, 5: attention,
      ProjectAddStep(), RouteStep(),      ExpertsStep(),        // 6 to 8: and what is after it.
      MixStep(),        ProjectAddStep(), GateUpStep(),  down};
  const std::span<const StepOperation> all(model);
  const auto count = [&](size_t from, bool first) {
    const auto steps = TakeHybridLayer(all.subspan(from), first);
    return steps.has_value() ? steps->count : 0;
  };
  EXPECT_EQ(count(0, true), 4);
  EXPECT_EQ(count(0, false), 4);
  EXPECT_EQ(count(1, true), 3);
  EXPECT_EQ(count(4, false), 1);
  EXPECT_TRUE(TakeHybridLayer(all.subspan(4), false)->ends());
  EXPECT_FALSE(TakeHybridLayer(all, true)->ends());
  EXPECT_EQ(count(4, true), 0) << "projections alone";
  EXPECT_EQ(count(5, true), 0);
  EXPECT_EQ(count(6, true), 3);
  EXPECT_EQ(count(6, false), 0) << "attention in the middle of a run";
  EXPECT_EQ(count(9, true), 0);
  EXPECT_EQ(count(model.size(), false), 0);
  EXPECT_FALSE(TakeLayer(all.subspan(0)).has_value());
  EXPECT_EQ(TakeLayer(all.subspan(4))->count, 5);
}

TEST(PersistentLayers, TakesAttentionThatTheHybridKernelHas) {
  DenseLayer layer;
  const auto count = [&](bool first) {
    const std::vector<StepOperation> model = {layer.project, layer.attention, ProjectAddStep(),
                                              layer.gate_up, layer.down};
    const auto steps = TakeHybridLayer(model, first);
    return steps.has_value() ? steps->count : 0;
  };
  layer.attention.output_gate = true;
  EXPECT_EQ(layer.Reason(), "an output gate of attention");
  EXPECT_EQ(count(true), 5);
  EXPECT_EQ(count(false), 5);
  layer.attention.key_dim = layer.attention.value_dim = 256;
  EXPECT_EQ(count(true), 5);
  const auto elsewhere = [&](const auto& change) {
    const AttentionStep before = layer.attention;
    change(layer.attention);
    const bool ends = count(true) == 0 && count(false) == 1;
    layer.attention = before;
    return ends;
  };
  EXPECT_TRUE(elsewhere([](auto& attention) { attention.key_dim = 272; }));
  EXPECT_TRUE(elsewhere([](auto& attention) { attention.value_dim = 64; }));
  EXPECT_TRUE(elsewhere([](auto& attention) { attention.cache.type = DType::kF8E4M3; }));
  EXPECT_TRUE(elsewhere([](auto& attention) { attention.options.softcap = 30.0F; }));
  EXPECT_TRUE(
      elsewhere([](auto& attention) { attention.norms = AttentionStep::Norms::kAfterRotary; }));
  const float frequencies[68] = {};
  EXPECT_TRUE(elsewhere([&](auto& attention) {
    attention.rotary.inverse_frequencies = TensorView(frequencies, DType::kF32, {68});
  }));
}

}  // namespace
}  // namespace marlin::cuda::persistent_layers_test
