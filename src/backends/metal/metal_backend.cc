#include "backends/metal/metal_backend.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "backends/metal/driver.h"
#include "backends/metal/kernel_table.h"
#include "backends/metal/launch_plan.h"
#include "backends/metal/prepared_strips.h"
#include "base/checked.h"
#include "base/macros.h"
#include "base/thread_pool.h"
#include "plan/select.h"

namespace marlin::metal {
namespace {

using kernels::GroupSpan;

/// Threads of marlin_finish, along the columns.
constexpr int64_t kFinishThreads = 256;
constexpr uint32_t kDequantizeSimdgroups = 4;

GroupSpan SpanOf(const WeightsSpec& spec) {
  if (!GetFormatInfo(spec.format).quantized) return kernels::kSpanNone;
  if (spec.group_size >= spec.k || spec.group_size % kernels::kChunkK == 0) {
    return kernels::kSpanChunk;
  }
  return kernels::kSpanBlock;
}

FunctionConstants WeightConstants(const WeightsSpec& spec) {
  FunctionConstants constants{};
  constants[MARLIN_CONSTANT_CODE_KIND] = CodeKindOf(spec.format);
  constants[MARLIN_CONSTANT_CODE_BITS] = GetFormatInfo(spec.format).bits;
  constants[MARLIN_CONSTANT_SCALE_TYPE] = ElementTypeOf(spec.scale_type);
  constants[MARLIN_CONSTANT_GROUP_EXTRA] =
      spec.has_zeros ? kernels::kExtraZeros
                     : (spec.has_biases ? kernels::kExtraBiases : kernels::kExtraNone);
  constants[MARLIN_CONSTANT_GROUP_SPAN] = SpanOf(spec);
  return constants;
}

kernels::Parameters WeightParameters(const PreparedStrips& weights, int64_t expert) {
  const WeightsSpec& spec = weights.spec;
  kernels::Parameters parameters{};
  parameters.n = static_cast<int32_t>(spec.n);
  parameters.k = static_cast<int32_t>(spec.k);
  parameters.chunks = static_cast<int32_t>(weights.chunks());
  if (GetFormatInfo(spec.format).quantized) {
    parameters.groups = static_cast<int32_t>(GroupCount(spec));
    parameters.group_size = static_cast<int32_t>(std::min(spec.group_size, spec.k));
  }
  parameters.code_offset = CodeOffsetOf(spec.format);
  parameters.global_scale = weights.global_scale(expert);
  return parameters;
}

/// Binds the weights; parts that a format does not have are the codes again, which nobody reads.
void BindWeights(const PreparedStrips& weights, int64_t expert, KernelLaunch* launch) {
  const StripPart codes = weights.codes(expert);
  const auto bind = [&](int index, const StripPart& part) {
    const StripPart& bound = part.bytes > 0 ? part : codes;
    launch->buffers.push_back({index, bound.data, bound.bytes});
  };
  bind(MARLIN_BUFFER_CODES, codes);
  bind(MARLIN_BUFFER_SCALES, weights.scales(expert));
  bind(MARLIN_BUFFER_EXTRAS, weights.extras(expert));
  bind(MARLIN_BUFFER_TABLE, weights.table());
}

/// Bytes from the first element of rows to behind the last one.
int64_t ExtentBytes(int64_t rows, int64_t columns, int64_t stride, DType type) {
  return rows == 0 ? 0 : ((rows - 1) * stride + columns) * DTypeBytes(type);
}

class MetalBackend final : public Backend {
 public:
  explicit MetalBackend(std::unique_ptr<Driver> driver) : driver_(std::move(driver)), pool_(0) {}

  DeviceInfo Info() const override {
    const DriverInfo driver = driver_->Info();
    DeviceInfo info;
    info.name = driver.name;
    info.backend = "metal";
    info.model = driver.model;
    info.features = driver.features;
    for (const KernelDesc& kernel : MetalKernels()) {
      GemmDesc any;
      any.m = 1;
      Support support = CheckSupport(kernel, any, Facts());
      // Some kernels are for the formats of integers, or for what the others leave.
      for (const Format format : {Format::kU4, Format::kNf4}) {
        any.format = format;
        if (!support.ok()) support = CheckSupport(kernel, any, Facts());
      }
      info.kernels.push_back(
          {kernel.name, kernel.op, support.ok(), support.reason, kernel.chosen == Chosen::kByName});
    }
    return info;
  }

  std::string Model() const override { return driver_->Info().model; }

  DeviceFacts Facts() const override {
    DeviceFacts facts;
    facts.level = Isa::kMetal;
    facts.known_fragments = driver_->Shape().known_fragments;
    return facts;
  }

  std::span<const KernelDesc> Kernels() const override { return MetalKernels(); }

  Result<std::shared_ptr<const PreparedWeights::Storage>> Prepare(
      const QuantizedWeights& weights, const PrepareOptions& options) const override {
    if (options.marlin_w4) {
      return Status(Code::kUnsupported, "prepare: no kernel of Metal reads marlin_w4");
    }
    MARLIN_ASSIGN_OR_RETURN(auto strips, PreparedStrips::Make(weights, this, driver_, pool_));
    return std::shared_ptr<const PreparedWeights::Storage>(std::move(strips));
  }

  int64_t WorkspaceBytes(const KernelDesc& kernel, const GemmDesc& desc,
                         const KernelVariant& /*variant*/) const override {
    if (desc.m == 0 || desc.n == 0) return 0;
    return PartialBytes(PlanLaunch(kernel, desc, driver_->Shape()), desc);
  }

  Status Run(const GemmCall& call) const override {
    if (call.desc.m == 0 || call.desc.n == 0) return Status();
    return driver_->Run(LaunchesOf(call), call.stream);
  }

  Status Dequantize(const PreparedWeights::Storage& weights, int64_t expert,
                    const MutableTensorView& out, void* stream) const override {
    const auto& strips = static_cast<const PreparedStrips&>(weights);
    const WeightsSpec& spec = weights.spec;
    if (spec.k == 0 || spec.n == 0) return Status();
    KernelLaunch launch = DecodingLaunch(strips, expert, out, spec.k, spec.n);
    launch.source = "dequantize.metal";
    launch.function = "marlin_dequantize";
    launch.threadgroups[1] = static_cast<uint32_t>(strips.strips());
    return driver_->Run({&launch, 1}, stream);
  }

  const DecoderBackend* decoder() const override { return nullptr; }
  bool shares_memory() const override { return true; }

  Status LookUpRows(const PreparedWeights::Storage& weights, std::span<const int32_t> ids,
                    const MutableTensorView& out) const override {
    const auto& strips = static_cast<const PreparedStrips&>(weights);
    const auto rows = static_cast<int64_t>(ids.size());
    KernelLaunch launch = DecodingLaunch(strips, 0, out, rows, weights.spec.k);
    launch.source = "look_up.metal";
    launch.function = "marlin_look_up";
    launch.buffers.push_back(
        {MARLIN_BUFFER_INPUT, ids.data(), static_cast<int64_t>(ids.size_bytes())});
    launch.threadgroups[1] = static_cast<uint32_t>(rows);
    return driver_->Run({&launch, 1}, nullptr);
  }

  Result<void*> Allocate(int64_t bytes) const override { return driver_->Allocate(bytes); }
  void Free(void* data) const override { driver_->Free(data); }
  Status CopyToDevice(void* device, const void* host, int64_t bytes) const override {
    MARLIN_RETURN_IF_ERROR(driver_->Synchronize(nullptr));
    std::memcpy(device, host, static_cast<size_t>(bytes));
    return Status();
  }
  Status CopyToHost(void* host, const void* device, int64_t bytes) const override {
    MARLIN_RETURN_IF_ERROR(driver_->Synchronize(nullptr));
    std::memcpy(host, device, static_cast<size_t>(bytes));
    return Status();
  }
  Status Synchronize(void* stream) const override { return driver_->Synchronize(stream); }
  bool calls_block() const override { return driver_->calls_block(); }

 private:
  /// Weights without a product: a simdgroup takes a chunk.
  static KernelLaunch DecodingLaunch(const PreparedStrips& strips, int64_t expert,
                                     const MutableTensorView& out, int64_t rows, int64_t columns) {
    KernelLaunch launch;
    launch.constants = WeightConstants(strips.spec);
    launch.constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(out.dtype());
    launch.parameters = WeightParameters(strips, expert);
    launch.parameters.output_stride = out.stride(0);
    BindWeights(strips, expert, &launch);
    launch.buffers.push_back({MARLIN_BUFFER_OUTPUT, out.data(),
                              ExtentBytes(rows, columns, out.stride(0), out.dtype()), true, false});
    const int64_t groups = CeilDivide(strips.chunks(), int64_t{kDequantizeSimdgroups});
    launch.threadgroups[0] = static_cast<uint32_t>(groups);
    launch.threads = kDequantizeSimdgroups * kernels::kLanes;
    return launch;
  }

  std::vector<KernelLaunch> LaunchesOf(const GemmCall& call) const {
    const LaunchPlan plan = PlanLaunch(*call.kernel, call.desc, driver_->Shape());
    const KernelLaunch sums = SumsOf(call, plan);
    std::vector<KernelLaunch> launches;
    if (plan.zeroes) launches.push_back(ZeroesOf(sums, plan));
    launches.push_back(sums);
    if (plan.partial) launches.push_back(FinishOf(call, sums));
    return launches;
  }

  /// The product itself.
  static KernelLaunch SumsOf(const GemmCall& call, const LaunchPlan& plan) {
    const auto& weights = static_cast<const PreparedStrips&>(*call.weights);
    KernelLaunch launch;
    launch.source = plan.source;
    launch.function = plan.function;
    launch.threadgroups = plan.threadgroups;
    launch.threads = plan.threads;
    launch.constants = WeightConstants(weights.spec);
    launch.constants[MARLIN_CONSTANT_INPUT_TYPE] = ElementTypeOf(call.desc.a_type);
    launch.constants[MARLIN_CONSTANT_ALIGNED_INPUT] = call.desc.aligned ? 1 : 0;
    launch.constants[MARLIN_CONSTANT_PARTIAL] = plan.partial ? 1 : 0;
    launch.parameters = WeightParameters(weights, call.expert);
    launch.parameters.m = static_cast<int32_t>(call.desc.m);
    launch.parameters.input_stride = call.a_stride;
    launch.parameters.output_stride = call.c_stride;
    launch.parameters.splits = plan.splits;
    launch.parameters.steps_of_split = plan.steps_of_split;
    launch.parameters.units = plan.units;
    launch.parameters.units_of_group = plan.units_of_group;
    BindWeights(weights, call.expert, &launch);
    launch.buffers.push_back(
        {MARLIN_BUFFER_INPUT, call.a,
         ExtentBytes(call.desc.m, call.desc.k, call.a_stride, call.desc.a_type)});
    SetEpilogue(call, &launch);
    if (plan.partial) {
      // The finishing steps are marlin_finish's.
      launch.constants[MARLIN_CONSTANT_HAS_BIAS] = 0;
      launch.constants[MARLIN_CONSTANT_HAS_ROW_WEIGHT] = 0;
      launch.buffers.push_back(
          {MARLIN_BUFFER_OUTPUT, call.workspace, PartialBytes(plan, call.desc), true, plan.zeroes});
    } else {
      launch.buffers.push_back(OutputOf(call));
    }
    return launch;
  }

  static KernelBuffer OutputOf(const GemmCall& call) {
    const int64_t columns = call.desc.gated ? call.desc.n / 2 : call.desc.n;
    return {MARLIN_BUFFER_OUTPUT, call.c,
            ExtentBytes(call.desc.m, columns, call.c_stride, call.desc.c_type), true, false};
  }

  /// Constants and buffers of the finishing steps; what is not there is the codes again.
  static void SetEpilogue(const GemmCall& call, KernelLaunch* launch) {
    const auto& weights = static_cast<const PreparedStrips&>(*call.weights);
    const Epilogue& epilogue = call.epilogue;
    const StripPart codes = weights.codes(call.expert);
    FunctionConstants& constants = launch->constants;
    constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(call.desc.c_type);
    constants[MARLIN_CONSTANT_BIAS_TYPE] = ElementTypeOf(epilogue.bias_type);
    constants[MARLIN_CONSTANT_HAS_BIAS] = epilogue.bias != nullptr ? 1 : 0;
    constants[MARLIN_CONSTANT_ACTIVATION] = static_cast<int32_t>(epilogue.activation);
    constants[MARLIN_CONSTANT_HAS_ROW_WEIGHT] = epilogue.row_weight != nullptr ? 1 : 0;
    constants[MARLIN_CONSTANT_GATED] = epilogue.gated ? 1 : 0;
    const auto bind = [&](int index, const void* data, int64_t bytes) {
      launch->buffers.push_back(data != nullptr ? KernelBuffer{index, data, bytes}
                                                : KernelBuffer{index, codes.data, codes.bytes});
    };
    bind(MARLIN_BUFFER_BIAS, epilogue.bias, call.desc.n * DTypeBytes(epilogue.bias_type));
    bind(MARLIN_BUFFER_ROW_WEIGHT, epilogue.row_weight, call.desc.m * int64_t{sizeof(float)});
  }

  /// Clears what units that continue the one before leave out. `sums` has its workspace last.
  static KernelLaunch ZeroesOf(const KernelLaunch& sums, const LaunchPlan& plan) {
    KernelLaunch launch;
    launch.source = sums.source;
    launch.function = "marlin_zero_reduction";
    launch.constants = sums.constants;
    launch.parameters = sums.parameters;
    launch.buffers = {sums.buffers.back()};
    launch.buffers.back().cleared = false;
    launch.threadgroups = {static_cast<uint32_t>(plan.units), 1, 1};
    launch.threads = static_cast<uint32_t>(kFinishThreads);
    return launch;
  }

  static KernelLaunch FinishOf(const GemmCall& call, const KernelLaunch& sums) {
    KernelLaunch launch;
    launch.source = "finish.metal";
    launch.function = "marlin_finish";
    launch.parameters = sums.parameters;
    SetEpilogue(call, &launch);
    const KernelBuffer& partials = sums.buffers.back();
    launch.buffers.push_back({MARLIN_BUFFER_PARTIALS, partials.data, partials.bytes});
    launch.buffers.push_back(OutputOf(call));
    const int64_t columns = call.desc.gated ? call.desc.n / 2 : call.desc.n;
    launch.threadgroups = {static_cast<uint32_t>(CeilDivide(columns, kFinishThreads)),
                           static_cast<uint32_t>(call.desc.m), 1};
    launch.threads = static_cast<uint32_t>(kFinishThreads);
    return launch;
  }

  std::shared_ptr<Driver> driver_;
  mutable ThreadPool pool_;
};

}  // namespace

Result<std::unique_ptr<Backend>> OpenMetal(std::string_view name) {
  Result<std::unique_ptr<Driver>> opened =
      name == "metal-sim" ? OpenSimulatedDriver() : OpenAppleDriver();
  MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<Driver> driver, std::move(opened));
  return std::unique_ptr<Backend>(std::make_unique<MetalBackend>(std::move(driver)));
}

}  // namespace marlin::metal
