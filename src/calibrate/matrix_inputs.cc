#include "calibrate/matrix_inputs.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include "recipe/mixer.h"

namespace marlin {
namespace {

std::vector<int64_t> Range(int64_t first, int64_t count) {
  std::vector<int64_t> numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

MatrixInput InputAt(InputSlot slot, int64_t k, std::span<const LinearTensors> linears) {
  MatrixInput input;
  input.slot = slot;
  input.k = k;
  for (const LinearTensors& linear : linears) {
    if (linear.present()) input.matrices.push_back({linear.weight()});
  }
  return input;
}

void ProduceByNorm(const VectorTensor& norm, MatrixInput* input) {
  if (!norm.present()) return;
  input->producers.push_back({norm.name, norm.count, Range(0, norm.count), norm.one_plus});
}

/// Feature i of the input is made of output outputs[i] of a linear layer, and of no other; features
/// may share an output.
void ProduceByOutputs(const LinearTensors& linear, const std::vector<int64_t>& outputs,
                      MatrixInput* input) {
  std::vector<int64_t> elements = outputs;
  std::sort(elements.begin(), elements.end());
  elements.erase(std::unique(elements.begin(), elements.end()), elements.end());
  if (elements != outputs) {
    input->sharing.scales = static_cast<int64_t>(elements.size());
    for (const int64_t output : outputs) {
      const auto at = std::lower_bound(elements.begin(), elements.end(), output);
      input->sharing.scale_of.push_back(static_cast<int32_t>(at - elements.begin()));
    }
  }
  input->producers.push_back({linear.weight(), linear.out, elements});
  if (linear.bias) {
    input->producers.push_back({linear.bias_name(), linear.out, std::move(elements)});
  }
}

void ProduceBySource(const InputSource& source, MatrixInput* input) {
  ProduceByNorm(source.norm, input);
  if (source.linear.present()) ProduceByOutputs(source.linear, source.outputs, input);
}

/// The inputs of a layer's mixer, in the order in which it computes them.
std::vector<MatrixInput> MixerInputs(const DecoderConfig& config, int64_t layer,
                                     const LayerTensors& tensors) {
  const MixerTensors& mixer = tensors.mixer;
  std::vector<InputSource> sources = {{tensors.input_norm, {}, {}}};
  for (InputSource& source :
       ParametersOf(config.mixer(layer)).Sources(config.layer(layer).sizes, mixer)) {
    sources.push_back(std::move(source));
  }
  std::vector<MatrixInput> inputs;
  for (InputSlot slot = 0; slot + 1 < sources.size(); ++slot) {
    std::vector<LinearTensors> linears;
    for (const ProjectionTensors& projection : mixer.projections) {
      if (projection.input != slot) continue;
      linears.insert(linears.end(), projection.layers.begin(), projection.layers.end());
    }
    if (linears.empty()) continue;
    inputs.push_back(InputAt(slot, linears.front().in, linears));
    ProduceBySource(sources[slot], &inputs.back());
  }
  inputs.push_back(InputAt(kLastSlot, mixer.out.in, {&mixer.out, 1}));
  ProduceBySource(sources.back(), &inputs.back());
  return inputs;
}

/// The input of a down projection, which a GLU computes from gate and up.
MatrixInput DownInput(const DecoderConfig& config, const MlpTensors& mlp) {
  MatrixInput input = InputAt(kLastSlot, mlp.down.in, {&mlp.down, 1});
  // It clamps up, or multiplies it by itself.
  if (config.gate_limit > 0 || config.family->mlp->gate.empty()) return input;
  // The last outputs, of up's own matrix or of one that holds gate and up.
  const LinearTensors& last = mlp.gate_up.back();
  ProduceByOutputs(last, Range(last.out - mlp.down.in, mlp.down.in), &input);
  return input;
}

/// An expert of two tensors that stack `count` of them.
ExpertMatrices StackedExpert(const DecoderConfig& config, const ExpertsTensors& tensors,
                             int64_t expert) {
  const int64_t count = config.shape.experts;
  const ExpertStack& gate_up = tensors.gate_up;
  ExpertMatrices matrices{expert, InputAt(kNormedSlot, gate_up.in, {}),
                          InputAt(kLastSlot, tensors.down.in, {})};
  matrices.gate_up.matrices = {{gate_up.name, expert, count}};
  matrices.down.matrices = {{tensors.down.name, expert, count}};
  if (config.gate_limit > 0 || config.family->mlp->gate.empty()) return matrices;
  const int64_t width = tensors.down.in;
  const std::vector<int64_t> up = Range(expert * gate_up.out + gate_up.out - width, width);
  for (const std::string& tensor : {gate_up.name, gate_up.bias_name}) {
    if (!tensor.empty()) matrices.down.producers.push_back({tensor, count * gate_up.out, up});
  }
  return matrices;
}

std::vector<ExpertMatrices> ExpertInputs(const DecoderConfig& config,
                                         const ExpertsTensors& tensors) {
  std::vector<ExpertMatrices> experts;
  if (tensors.shared.down.present()) experts.push_back({-1, {}, DownInput(config, tensors.shared)});
  for (int64_t expert = 0; expert < config.shape.experts; ++expert) {
    if (tensors.each.empty()) {
      experts.push_back(StackedExpert(config, tensors, expert));
    } else {
      const MlpTensors& mlp = tensors.each[static_cast<size_t>(expert)];
      experts.push_back(
          {expert, InputAt(kNormedSlot, config.shape.hidden, mlp.gate_up), DownInput(config, mlp)});
    }
  }
  return experts;
}

/// The inputs of the second half of a layer with an MLP next to its experts, without the experts'
/// matrices.
void AddBeside(const DecoderConfig& config, const LayerTensors& tensors, LayerInputs* inputs) {
  const ExpertsTensors& experts = tensors.experts;
  const int64_t hidden = config.shape.hidden;
  inputs->beside.push_back(InputAt(kNormedSlot, hidden, tensors.mlp.gate_up));
  ProduceByNorm(tensors.mlp_norm, &inputs->beside.back());
  inputs->beside.push_back(InputAt(kRouterSlot, hidden, {&experts.router, 1}));
  ProduceByNorm(experts.router_norm, &inputs->beside.back());
  inputs->beside.push_back(DownInput(config, tensors.mlp));
  inputs->mlp.push_back(InputAt(kExpertsSlot, hidden, experts.shared.gate_up));
  ProduceByNorm(experts.norm, &inputs->mlp.back());
}

}  // namespace

std::vector<LayerMatrix> LayerMatrices(const LayerTensors& tensors) {
  std::vector<LayerMatrix> matrices;
  const auto add = [&](const LinearTensors& linear, Half half, bool routes = false) {
    if (linear.present()) matrices.push_back({linear.weight(), half, routes});
  };
  const auto add_mlp = [&](const MlpTensors& mlp) {
    for (const LinearTensors& linear : mlp.gate_up) add(linear, Half::kMlp);
    add(mlp.down, Half::kMlp);
  };
  for (const LinearTensors& linear : tensors.mixer.Linears()) add(linear, Half::kAttention);
  add_mlp(tensors.mlp);
  const ExpertsTensors& experts = tensors.experts;
  for (const MlpTensors& mlp : experts.each) add_mlp(mlp);
  for (const std::string& stack : {experts.gate_up.name, experts.down.name}) {
    if (!stack.empty()) matrices.push_back({stack, Half::kMlp});
  }
  add_mlp(experts.shared);
  add(experts.router, Half::kMlp, true);
  add(experts.shared_gate, Half::kMlp, true);
  return matrices;
}

LayerInputs DescribeInputs(const DecoderConfig& config, int64_t layer,
                           const LayerTensors& tensors) {
  LayerInputs inputs;
  if (HasMixer(config.shape, layer)) inputs.attention = MixerInputs(config, layer, tensors);
  if (!HasMlp(config.shape, layer)) return inputs;
  const ExpertsTensors& experts = tensors.experts;
  std::vector<LinearTensors> first = tensors.mlp.gate_up;
  if (experts.router.present()) {
    first = {experts.router, experts.shared_gate};
    first.insert(first.end(), experts.shared.gate_up.begin(), experts.shared.gate_up.end());
    inputs.experts = ExpertInputs(config, experts);
  }
  if (config.family->parallel) {
    // The matrices of both blocks have one input, which one norm makes.
    MatrixInput& shared = inputs.attention.front();
    const MatrixInput own = InputAt(kNormedSlot, config.shape.hidden, first);
    shared.matrices.insert(shared.matrices.end(), own.matrices.begin(), own.matrices.end());
    inputs.mlp.push_back(DownInput(config, tensors.mlp));
    return inputs;
  }
  if (experts.router.present() && config.family->mlp_beside) {
    AddBeside(config, tensors, &inputs);
  } else {
    inputs.mlp.push_back(InputAt(kNormedSlot, config.shape.hidden, first));
    ProduceByNorm(tensors.mlp_norm, &inputs.mlp.front());
  }
  for (const ExpertMatrices& expert : inputs.experts) {
    std::vector<InputMatrix>& routed = inputs.mlp.front().routed;
    routed.insert(routed.end(), expert.gate_up.matrices.begin(), expert.gate_up.matrices.end());
  }
  if (inputs.experts.empty()) inputs.mlp.push_back(DownInput(config, tensors.mlp));
  return inputs;
}

std::set<std::string> OnePlusNorms(const DecoderConfig& config) {
  std::set<std::string> names;
  const Family& family = *config.family;
  if (!family.one_plus_norms) return names;
  for (int64_t layer = 0; layer < config.shape.layers; ++layer) {
    const LayerNames of_layer(layer);
    for (const std::string_view norm : {family.norms->input, family.norms->mlp}) {
      if (!norm.empty()) names.insert(of_layer.Norm(family, norm, config.shape.hidden).name);
    }
  }
  names.insert(FinalNorm(family, config.shape).name);
  return names;
}

MatrixInput HeadInput(const DecoderConfig& config) {
  MatrixInput input;
  input.k = config.shape.hidden;
  input.matrices = {{std::string(kHeadTensor)}};
  ProduceByNorm(FinalNorm(*config.family, config.shape), &input);
  return input;
}

}  // namespace marlin
