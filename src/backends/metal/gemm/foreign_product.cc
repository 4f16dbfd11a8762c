#include "backends/metal/gemm/foreign_product.h"

#include <algorithm>
#include <utility>

#include "backends/metal/gemm/strip_layout.h"
#include "backends/metal/kernels/gemm/gather_parameters.h"
#include "backends/metal/plan/kernel_table.h"
#include "backends/metal/plan/kernel_text.h"
#include "backends/metal/plan/launch_plan.h"
#include "backends/metal/runtime/memory_driver.h"
#include "base/macros.h"
#include "base/thread_pool.h"
#include "layout/plain_weights.h"
#include "plan/gemm/select.h"

namespace marlin::metal {
namespace {

GemmDesc Describe(const WeightsSpec& spec, const ForeignCall& call) {
  GemmDesc desc;
  desc.m = call.m;
  desc.n = spec.n;
  desc.k = spec.k;
  desc.format = spec.format;
  desc.group_size = spec.group_size;
  desc.scale_type = spec.scale_type;
  desc.a_type = call.type;
  desc.c_type = call.type;
  desc.has_zeros = spec.has_zeros;
  desc.has_biases = spec.has_biases;
  desc.gated = call.gated;
  desc.activation = call.activation;
  desc.determinism = call.determinism;
  desc.aligned = call.aligned;
  return desc;
}

GemmCall Call(const GemmDesc& desc, const PreparedStrips& weights, const ForeignCall& call) {
  GemmCall made;
  made.desc = desc;
  made.weights = &weights;
  made.expert = call.expert;
  made.a_stride = desc.k;
  made.c_stride = desc.gated ? desc.n / 2 : desc.n;
  // The framework binds the addresses; a non-null pointer only signals that there is a bias.
  if (call.has_bias) made.epilogue.bias = &call;
  made.epilogue.bias_type = call.bias_type;
  return made;
}

Result<KernelChoice> Choose(const PreparedStrips& weights, const ForeignCall& call,
                            const DeviceShape& device) {
  const auto no_variants = [](const KernelDesc&, const GemmDesc&, const KernelVariant&) {
    return false;
  };
  const auto cost = [](const KernelDesc& kernel, const GemmDesc& desc) {
    return CostOf(kernel, desc);
  };
  return SelectKernel(Describe(weights.spec, call),
                      {PropertiesOf(device), MetalKernels(), cost, no_variants}, call.kernel);
}

GemmLaunches LaunchesOf(const KernelChoice& choice, const PreparedStrips& weights,
                        const ForeignCall& call, const DeviceShape& device) {
  const GemmDesc desc = Describe(weights.spec, call);
  return metal::LaunchesOf(PlanLaunch(*choice.kernel, desc, device), Call(desc, weights, call));
}

/// Names and values of the function constants.
Result<std::vector<std::pair<std::string, int>>> Distinctions(const FunctionConstants& constants) {
  std::vector<std::pair<std::string, int>> values;
  MARLIN_ASSIGN_OR_RETURN(const std::vector<FunctionConstant> known, ListFunctionConstants());
  values.reserve(known.size());
  for (const FunctionConstant& constant : known) {
    values.emplace_back(constant.name, constants.at(static_cast<size_t>(constant.number)));
  }
  return values;
}

}  // namespace

Result<std::shared_ptr<PreparedStrips>> PrepareForeign(const QuantizedWeights& weights) {
  MARLIN_RETURN_IF_ERROR(Validate(weights));
  // In the form that strips have, as Backend::TakenSpec says where a backend prepares them.
  WeightsSpec plain = PlainSpec(weights.spec);
  plain.format = WiderFormat(plain.format);
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights taken, ConvertTo(plain, weights));
  ThreadPool pool(0);
  return PreparedStrips::Make(taken, nullptr, std::make_shared<MemoryDriver>(), pool);
}

Result<ForeignKernel> DescribeForeign(const KernelLaunch& launch) {
  ForeignKernel kernel;
  MARLIN_ASSIGN_OR_RETURN(kernel.body,
                          BodyOfKernel(launch.source, launch.function, launch.constants));
  MARLIN_ASSIGN_OR_RETURN(kernel.distinctions, Distinctions(launch.constants));
  kernel.name = launch.function;
  const std::span<const std::byte> parameters = ParameterBytes(launch);
  kernel.parameters.assign(parameters.begin(), parameters.end());
  kernel.threads = launch.threads;
  for (size_t i = 0; i < kernel.grid.size(); ++i) kernel.grid[i] = launch.threadgroups[i];
  kernel.grid[0] *= kernel.threads;
  for (const KernelBuffer& buffer : launch.buffers) {
    if (buffer.written) kernel.output_bytes = buffer.bytes;
  }
  return kernel;
}

Result<GemmLaunches> ForeignLaunches(const PreparedStrips& weights, const ForeignCall& call,
                                     const DeviceShape& device) {
  MARLIN_ASSIGN_OR_RETURN(const KernelChoice choice, Choose(weights, call, device));
  return LaunchesOf(choice, weights, call, device);
}

KernelLaunch ForeignLookUp(const PreparedStrips& weights, int64_t rows, DType type) {
  KernelLaunch launch =
      LookUpLaunch(weights, MutableTensorView(nullptr, type, {rows, weights.spec.k}));
  launch.function = "marlin_look_up_i32";
  launch.buffers.push_back({MARLIN_BUFFER_INPUT, nullptr, rows * int64_t{sizeof(int32_t)}});
  return launch;
}

KernelLaunch ForeignGatherLaunch(const PreparedStrips& weights, const ForeignGather& call) {
  const WeightsSpec& spec = weights.spec;
  kernels::GatherParameters p{};
  p.product = WeightParameters(weights, 0);
  p.product.m = static_cast<int32_t>(call.rows);
  p.product.input_stride = spec.k;
  p.product.output_stride = spec.n;
  p.codes_bytes = weights.codes(0).bytes;
  p.scales_bytes = weights.scales(0).bytes;
  p.extras_bytes = weights.extras(0).bytes;
  p.matrices = static_cast<int32_t>(spec.experts);
  p.ids_of_row = static_cast<int32_t>(call.ids_of_row);

  const int64_t ids = call.rows * call.ids_of_row;
  KernelLaunch launch;
  launch.source = "gather_gemv.metal";
  launch.function = "marlin_gather_gemv";
  launch.constants = WeightConstants(weights);
  launch.constants[MARLIN_CONSTANT_WHOLE_M] = 1;  // No threadgroup is for a row that is not there.
  launch.constants[MARLIN_CONSTANT_INPUT_TYPE] = ElementTypeOf(call.type);
  launch.constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(call.type);
  launch.other_parameters = ParameterBlock(p);
  launch.buffers = {
      {MARLIN_BUFFER_CODES, nullptr, spec.experts * p.codes_bytes},
      {MARLIN_BUFFER_SCALES, nullptr, spec.experts * p.scales_bytes},
      {MARLIN_BUFFER_EXTRAS, nullptr, spec.experts * p.extras_bytes},
      {MARLIN_BUFFER_TABLE, nullptr, weights.table().bytes},
      {MARLIN_BUFFER_INPUT, nullptr, call.rows * spec.k * DTypeBytes(call.type)},
      {MARLIN_BUFFER_MATRIX_IDS, nullptr, ids * int64_t{sizeof(int32_t)}},
      {MARLIN_BUFFER_GLOBAL_SCALES, nullptr, spec.experts * int64_t{sizeof(float)}},
      {MARLIN_BUFFER_OUTPUT, nullptr, ids * spec.n * DTypeBytes(call.type), true, false},
  };
  const int64_t simdgroups = GemvSimdgroups(weights.strips(), p.product.chunks, false);
  launch.threadgroups = {static_cast<uint32_t>(weights.strips()), static_cast<uint32_t>(ids), 1};
  launch.threads = static_cast<uint32_t>(simdgroups * kernels::kLanes);
  return launch;
}

Result<std::vector<ForeignKernel>> PlanForeign(const PreparedStrips& weights,
                                               const ForeignCall& call, const DeviceShape& device) {
  MARLIN_ASSIGN_OR_RETURN(const KernelChoice choice, Choose(weights, call, device));
  std::vector<ForeignKernel> kernels;
  bool cleared = false;
  for (const KernelLaunch& launch : LaunchesOf(choice, weights, call, device)) {
    if (launch.function == "marlin_zero_reduction") {
      cleared = true;
      continue;
    }
    MARLIN_ASSIGN_OR_RETURN(ForeignKernel kernel, DescribeForeign(launch));
    kernel.partial = launch.constants[MARLIN_CONSTANT_PARTIAL] != 0;
    kernel.cleared = cleared && kernel.partial;
    if (launch.function != "marlin_finish") kernel.name = choice.kernel->name;
    kernels.push_back(std::move(kernel));
  }
  return kernels;
}

}  // namespace marlin::metal
