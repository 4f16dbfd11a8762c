#include "bench/gemm.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "base/split_mix64.h"
#include "bench/timed_device.h"

namespace marlin::bench {
namespace {

constexpr int kCeilingRuns = 15;

double MedianOf(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double MedianOfRuns(const std::function<double()>& measure) {
  std::vector<double> values(kCeilingRuns);
  for (double& value : values) value = measure();
  return MedianOf(std::move(values));
}

Result<double> MedianOfResults(const std::function<Result<double>()>& measure) {
  std::vector<double> values;
  for (int run = 0; run < kCeilingRuns; ++run) {
    MARLIN_ASSIGN_OR_RETURN(const double value, measure());
    values.push_back(value);
  }
  return MedianOf(std::move(values));
}

/// Memory that views point into.
struct Buffers {
  std::vector<AlignedBuffer> buffers;

  Result<void*> Add(int64_t bytes) {
    MARLIN_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Allocate(bytes));
    buffers.push_back(std::move(buffer));
    return static_cast<void*>(buffers.back().data());
  }
};

void FillRandomWords(void* data, int64_t bytes, uint64_t seed) {
  // This generator makes weights of a GiB in a second.
  SplitMix64 random(seed);
  for (int64_t i = 0; i < bytes / 8; ++i) static_cast<uint64_t*>(data)[i] = random.Next();
}

/// Metadata of 2:4 weights, every pattern equally often.
void FillMetadata(uint32_t* words, int64_t count) {
  constexpr uint32_t kNibbles[] = {4, 8, 9, 12, 13, 14};
  FillRandomWords(words, count / 2 * 8, 3);
  if (count % 2 != 0) words[count - 1] = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t random = words[i];
    words[i] = 0;
    // Multiplied by 6, the high bits are a pattern, and the low ones are random for the next.
    for (int block = 0; block < 8; ++block) {
      const uint64_t product = uint64_t{random} * 6;
      words[i] |= kNibbles[product >> 32] << (4 * block);
      random = static_cast<uint32_t>(product);
    }
  }
}

/// Makes random codes ordinary numbers: finite in every 8-bit format, and about 2^-7 in the
/// unquantized ones, because each subnormal operand costs a microcode assist.
void MakeOrdinary(Format format, void* codes, int64_t bytes) {
  if (GetFormatInfo(format).bits == 8) {
    for (int64_t i = 0; i < bytes; ++i) static_cast<uint8_t*>(codes)[i] &= 0xbb;
    return;
  }
  if (format == Format::kFp32) {
    for (int64_t i = 0; i < bytes / 4; ++i) {
      uint32_t& code = static_cast<uint32_t*>(codes)[i];
      code = (code & 0x807fffffu) | 120u << 23;
    }
    return;
  }
  const auto keep = static_cast<uint16_t>(format == Format::kBf16 ? 0x807f : 0x83ff);
  const auto exponent = static_cast<uint16_t>(format == Format::kBf16 ? 120 << 7 : 8 << 10);
  for (int64_t i = 0; i < bytes / 2; ++i) {
    uint16_t& code = static_cast<uint16_t*>(codes)[i];
    code = static_cast<uint16_t>((code & keep) | exponent);
  }
}

void FillScales(void* data, ScaleType type, int64_t count) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, 0.3f);
  for (int64_t i = 0; i < count; ++i) {
    const float scale = 0.01f * (1.0f + std::clamp(normal(random), -0.9f, 0.9f));
    switch (type) {
      case ScaleType::kF16:
        static_cast<uint16_t*>(data)[i] = FloatToHalf(scale);
        break;
      case ScaleType::kBf16:
        static_cast<uint16_t*>(data)[i] = FloatToBf16(scale);
        break;
      case ScaleType::kF32:
        static_cast<float*>(data)[i] = scale;
        break;
      case ScaleType::kE8M0:
        static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(118 + i % 4);
        break;
      case ScaleType::kE4M3:
        static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(0x30 + i % 16);
        break;
    }
  }
}

struct DenseMatrix {
  AlignedBuffer f32;
  AlignedBuffer bf16;
};

/// A dense matrix of normal numbers in both types that baselines take.
Result<DenseMatrix> RandomDense(int64_t count) {
  DenseMatrix matrix;
  MARLIN_ASSIGN_OR_RETURN(matrix.f32, AlignedBuffer::Allocate(count * 4));
  MARLIN_ASSIGN_OR_RETURN(matrix.bf16, AlignedBuffer::Allocate(count * 2));
  const std::vector<float> values = NormalPattern(count);
  for (int64_t i = 0; i < count; ++i) {
    matrix.bf16.As<uint16_t>()[i] = FloatToBf16(values[static_cast<size_t>(i)]);
    matrix.f32.As<float>()[i] = Bf16ToFloat(matrix.bf16.As<uint16_t>()[i]);
  }
  return matrix;
}

/// The operands of a case on a device, and its calls.
class TimedCase {
 public:
  static Result<TimedCase> Make(const Device& device, const PreparedCase& prepared) {
    TimedCase made(device, prepared);
    const auto [m, n, k] = made.bench_.shape;
    MARLIN_ASSIGN_OR_RETURN(made.a_, RandomDense(std::max<int64_t>(m * k, 1)));
    const int64_t out_elements = std::max(m * n, made.dequantizes() ? k * n : 0);
    MARLIN_ASSIGN_OR_RETURN(made.c_, DeviceBuffer::Allocate(device, out_elements * 4));
    const bool fp32 = made.bench_.activation_type == DType::kF32;
    const AlignedBuffer& chosen = fp32 ? made.a_.f32 : made.a_.bf16;
    MARLIN_ASSIGN_OR_RETURN(made.input_, DeviceBuffer::Allocate(device, chosen.size()));
    MARLIN_RETURN_IF_ERROR(made.input_.CopyFrom(chosen.data(), chosen.size()));
    MARLIN_RETURN_IF_ERROR(made.Plan(prepared.prepare_rate));
    return made;
  }

  /// Runs `i` of the calls that one wait ends. Errors are ignored: Make has run one call.
  void Run(int64_t i) {
    const int64_t calls = CallsOfRun(device_);
    for (int64_t call = 0; call < calls; ++call) {
      (void)Call((i * calls + call) % weights_.spec().experts);
    }
    (void)device_.Synchronize();
  }

  /// All but the times.
  const BenchResult& result() const { return result_; }

  Result<std::vector<BaselineTiming>> TimeBaselines(const OpenBlas& blas) const {
    const auto [m, n, k] = bench_.shape;
    MARLIN_ASSIGN_OR_RETURN(const DenseMatrix b, RandomDense(n * k));
    auto* const c = static_cast<float*>(c_.data());
    const auto fp32 = [&, m = m, n = n, k = k](int64_t) {
      blas.Sgemm(m, n, k, a_.f32.As<float>(), b.f32.As<float>(), c);
    };
    const auto bf16 = [&, m = m, n = n, k = k](int64_t) {
      blas.Sbgemm(m, n, k, a_.bf16.As<uint16_t>(), b.bf16.As<uint16_t>(), c);
    };
    std::vector<BaselineTiming> baselines = {{"openblas_fp32", Measure(fp32, bench_.timing)}};
    if (blas.has_bf16()) baselines.push_back({"openblas_bf16", Measure(bf16, bench_.timing)});
    return baselines;
  }

 private:
  TimedCase(const Device& device, const PreparedCase& prepared)
      : device_(device),
        weights_(prepared.weights),
        bench_(prepared.bench),
        options_(prepared.bench.options) {}

  bool dequantizes() const { return bench_.op == "dequantize"; }
  TensorView Input() const {
    return {input_.data(), bench_.activation_type, {bench_.shape.m, bench_.shape.k}};
  }
  MutableTensorView Output() const {
    const int64_t rows = dequantizes() ? bench_.shape.k : bench_.shape.m;
    return {c_.data(), bench_.activation_type, {rows, bench_.shape.n}};
  }

  Status Call(int64_t expert) {
    if (dequantizes()) return Dequantize(device_, weights_, Output(), expert);
    options_.expert = expert;
    return Gemm(device_, Input(), weights_, Output(), options_);
  }

  /// Fills in the result's plan and sizes, and runs one call, which passes every check.
  Status Plan(double prepare_rate) {
    const auto [m, n, k] = bench_.shape;
    const WeightsSpec& spec = weights_.spec();
    result_.bench = bench_;
    result_.prepare_rate = prepare_rate;
    result_.weight_bytes =
        static_cast<double>(StoredBytes(spec)) / static_cast<double>(spec.experts);
    const double elements = static_cast<double>(n) * static_cast<double>(k);
    result_.operations = dequantizes() ? elements : 2.0 * static_cast<double>(m) * elements;
    result_.kernel = "marlin_dequantize";
    result_.accuracy = "exact";
    if (!dequantizes()) {
      MARLIN_ASSIGN_OR_RETURN(const GemmPlan plan,
                              PlanGemm(device_, Input(), weights_, Output(), options_));
      result_.kernel = plan.kernel();
      result_.accuracy = plan.accuracy();
    }
    MARLIN_RETURN_IF_ERROR(Call(0));
    return device_.Synchronize();
  }

  Device device_;
  PreparedWeights weights_;
  BenchCase bench_;
  GemmOptions options_;
  BenchResult result_;
  DenseMatrix a_;
  DeviceBuffer input_;
  DeviceBuffer c_;
};

}  // namespace

std::vector<float> NormalPattern(int64_t count) {
  constexpr int64_t kTile = 4096;
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::vector<float> tile(kTile);
  for (float& value : tile) value = normal(random);
  std::vector<float> pattern(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    pattern[static_cast<size_t>(i)] = tile[static_cast<size_t>((i * 31 + i / kTile) % kTile)];
  }
  return pattern;
}

MachineCeilings MeasureCeilings(cpu::Roofline& roofline) {
  const double bytes = static_cast<double>(cpu::Roofline::kPassBytes);
  MachineCeilings ceilings;
  const double plain = bytes / MedianOfRuns([&] { return roofline.ReadSeconds(1); });
  ceilings.read = bytes / MedianOfRuns([&] { return roofline.ReadSeconds(4); });
  ceilings.fp32 = MedianOfRuns([&] { return roofline.FmaFlops(); });
  const double tiles = MedianOfRuns([&] { return roofline.TileFlops(); });
  const double dots = MedianOfRuns([&] { return roofline.DotFlops(); });
  ceilings.bf16 = std::max(tiles, dots);
  const double fork_join = MedianOfRuns([&] { return roofline.ForkJoinSeconds(); });
  ceilings.figures = {{"read_gbps", plain * 1e-9},
                      {"read_streams_gbps", ceilings.read * 1e-9},
                      {"fp32_fma_tflops", ceilings.fp32 * 1e-12},
                      {"bf16_tile_tflops", tiles * 1e-12},
                      {"bf16_dot_tflops", dots * 1e-12},
                      {"fork_join_us", fork_join * 1e6}};
  ceilings.text = fmt::format(
      "read {:.1f} GB/s (one stream {:.1f}), fork+join {:.2f} us\nfp32 FMA {:.0f} GFLOP/s{}{}",
      ceilings.read * 1e-9, plain * 1e-9, fork_join * 1e6, ceilings.fp32 * 1e-9,
      tiles > 0 ? fmt::format(", bf16 tiles {:.0f}", tiles * 1e-9) : "",
      dots > 0 ? fmt::format(", bf16 dot products {:.0f}", dots * 1e-9) : "");
  return ceilings;
}

Result<MachineCeilings> MeasureCeilings(metal::GpuRoofline& roofline) {
  MachineCeilings ceilings;
  MARLIN_ASSIGN_OR_RETURN(const double read,
                          MedianOfResults([&] { return roofline.ReadSeconds(); }));
  MARLIN_ASSIGN_OR_RETURN(ceilings.fp32, MedianOfResults([&] { return roofline.MatrixFlops(); }));
  MARLIN_ASSIGN_OR_RETURN(const double call,
                          MedianOfResults([&] { return roofline.CallSeconds(); }));
  ceilings.read = static_cast<double>(roofline.read_bytes()) / read;
  ceilings.figures = {{"read_gbps", ceilings.read * 1e-9},
                      {"fp32_matrix_tflops", ceilings.fp32 * 1e-12},
                      {"call_us", call * 1e6}};
  ceilings.text =
      fmt::format("read {:.1f} GB/s, fp32 matrices {:.0f} GFLOP/s, empty call {:.2f} us",
                  ceilings.read * 1e-9, ceilings.fp32 * 1e-9, call * 1e6);
  return ceilings;
}

double RooflineFraction(const BenchResult& result, const MachineCeilings& ceilings) {
  const double peak =
      result.accuracy == "bf16_compute" && ceilings.bf16 > 0 ? ceilings.bf16 : ceilings.fp32;
  const double compute =
      result.bench.op != "dequantize" && peak > 0 ? result.operations / peak : 0.0;
  return std::max(result.weight_bytes / ceilings.read, compute) / result.timing.median;
}

ReadProbe ProbeOf(cpu::Roofline& roofline) {
  return {[&roofline] { roofline.ReadSeconds(1); }, static_cast<double>(cpu::Roofline::kPassBytes)};
}
ReadProbe ProbeOf(metal::GpuRoofline& roofline) {
  // Errors are ignored: the GEMMs timed in turn with this report them.
  return {[&roofline] { (void)roofline.ReadSeconds(); },
          static_cast<double>(metal::GpuRoofline::kReadPasses * roofline.read_bytes())};
}

int64_t CopiesBeyond(int64_t bytes, const WeightsSpec& one) {
  return std::clamp<int64_t>(CeilDivide(bytes, std::max<int64_t>(StoredBytes(one), 1)), 1, 1024);
}

Result<QuantizedWeights> RandomWeights(const WeightsSpec& spec) {
  auto buffers = std::make_shared<Buffers>();
  const FormatInfo& info = GetFormatInfo(spec.format);
  QuantizedWeights weights;
  weights.spec = spec;
  const int64_t rows = info.quantized ? WordsAlongK(spec) : spec.k;
  const DType type = info.quantized ? DType::kU32 : UnquantizedDType(spec.format);
  const int64_t code_bytes = RoundUp(spec.experts * rows * spec.n * DTypeBytes(type), 8);
  MARLIN_ASSIGN_OR_RETURN(void* codes, buffers->Add(code_bytes));
  FillRandomWords(codes, code_bytes, 1);
  if (info.bits >= 8) MakeOrdinary(spec.format, codes, code_bytes);
  weights.codes = TensorView(codes, type, {spec.experts, rows, spec.n});
  if (spec.sparsity == Sparsity::k24) {
    const Shape shape{spec.experts, MetadataWordsAlongK(spec.k), spec.n};
    MARLIN_ASSIGN_OR_RETURN(void* metadata, buffers->Add(shape.ElementCount() * 4));
    FillMetadata(static_cast<uint32_t*>(metadata), shape.ElementCount());
    weights.metadata = TensorView(metadata, DType::kU32, shape);
  }
  if (info.quantized) {
    const Shape shape{spec.experts, GroupCount(spec), spec.n};
    const DType scale_type = ScaleDType(spec.scale_type);
    MARLIN_ASSIGN_OR_RETURN(void* scales,
                            buffers->Add(shape.ElementCount() * DTypeBytes(scale_type)));
    FillScales(scales, spec.scale_type, shape.ElementCount());
    weights.scales = TensorView(scales, scale_type, shape);
    if (spec.has_zeros) {
      MARLIN_ASSIGN_OR_RETURN(void* zeros, buffers->Add(shape.ElementCount() * 2));
      for (int64_t i = 0; i < shape.ElementCount(); ++i) {
        static_cast<uint16_t*>(zeros)[i] = FloatToHalf(static_cast<float>(6 + i % 4));
      }
      weights.zeros = TensorView(zeros, DType::kF16, shape);
    }
    if (spec.has_global_scale) {
      MARLIN_ASSIGN_OR_RETURN(void* global, buffers->Add(spec.experts * 4));
      std::fill_n(static_cast<float*>(global), spec.experts, 0.01f);
      weights.global_scale = TensorView(global, DType::kF32, {spec.experts});
    }
  }
  weights.owner = std::move(buffers);
  return weights;
}

Result<std::vector<BenchResult>> RunTogether(const Device& device,
                                             std::span<const PreparedCase> cases,
                                             const ReadProbe& probe, const OpenBlas* blas) {
  std::vector<TimedCase> timed;
  timed.reserve(cases.size());  // The bodies below point into it.
  std::vector<std::function<void(int64_t)>> bodies;
  for (const PreparedCase& each : cases) {
    MARLIN_ASSIGN_OR_RETURN(TimedCase made, TimedCase::Make(device, each));
    timed.push_back(std::move(made));
    bodies.emplace_back([&run = timed.back()](int64_t i) { run.Run(i); });
  }
  bodies.emplace_back([&](int64_t) { probe.read(); });
  const std::vector<Timing> timings = MeasureTogether(bodies, cases.front().bench.timing);
  std::vector<BenchResult> results;
  for (size_t i = 0; i < timed.size(); ++i) {
    BenchResult result = timed[i].result();
    result.timing = PerCall(timings[i], CallsOfRun(device));
    result.probe_rate = probe.bytes / timings.back().median;
    // Baselines run on their own afterwards: their threads keep spinning after a call.
    if (blas != nullptr && result.bench.op != "dequantize") {
      MARLIN_ASSIGN_OR_RETURN(result.baselines, timed[i].TimeBaselines(*blas));
    }
    results.push_back(std::move(result));
  }
  return results;
}

Result<BenchResult> RunBench(const Device& device, const PreparedWeights& weights,
                             const BenchCase& bench, const ReadProbe& probe, const OpenBlas* blas) {
  const PreparedCase one{bench, weights, 0};
  MARLIN_ASSIGN_OR_RETURN(std::vector<BenchResult> results,
                          RunTogether(device, std::span(&one, 1), probe, blas));
  return std::move(results.front());
}

}  // namespace marlin::bench
