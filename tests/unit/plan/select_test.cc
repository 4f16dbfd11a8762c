// Kernel selection: a function of the problem, the device properties, the rows and the tuning
// table.
#include "plan/gemm/select.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "backends/cpu/gemm/kernel_table.h"
#include "backends/cuda/plan/kernel_table.h"
#include "backends/cuda/plan/tile_problem.h"
#include "backends/cuda/tuning/shipped_tuning.h"
#include "plan/gemm/kernel_name.h"

namespace marlin::select_test {
namespace {

using ::testing::HasSubstr;

Support Always(const GemmDesc& /*desc*/, const DeviceProperties& /*device*/) { return {}; }
Support FewRows(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  return desc.m <= 8 ? Support{} : Support{"takes up to {0} rows", 8};
}

KernelDesc Row(const char* name, Grade grade,
               Support (*supports)(const GemmDesc&, const DeviceProperties&)) {
  return {name, "gemm", Isa::kCuda, grade, 16, 16, 16, {}, supports};
}

KernelDesc Measured(const char* name, Grade grade) {
  KernelDesc row = Row(name, grade, Always);
  row.chosen = Chosen::kByMeasurement;
  return row;
}

const std::array<KernelDesc, 5> kRows = {
    Measured("measured", Grade::kBf16Compute), Row("few", Grade::kBf16Compute, FewRows),
    Row("many", Grade::kBf16Compute, Always), Row("exact", Grade::kExact, Always),
    Row("coarse", Grade::kW4A8, Always)};

GemmDesc Problem(int64_t m) {
  GemmDesc desc;
  desc.m = m;
  desc.n = desc.k = 64;
  desc.group_size = 64;
  desc.a_type = DType::kBf16;
  return desc;
}

/// Costs that select the first supported row.
constexpr auto InOrder = [](const KernelDesc& kernel, const GemmDesc& /*desc*/) {
  return static_cast<double>(&kernel - kRows.data());
};

/// Selects with a table of one kernel for 5 to 16 rows.
Result<KernelChoice> Choose(const GemmDesc& desc, const std::string& kernel,
                            std::string_view forced = "") {
  TuningTable table;
  if (!kernel.empty()) {
    const std::string entry = "fp4_e2m1 128 fp16 none bf16 f32 plain 64 64 ";
    const auto sections = ParseTuning("metal-marlin tuning 2\ndevice d\n" + entry + "16 " + kernel +
                                          " 5\n" + entry + "8 " + kernel + " 5\n",
                                      "t");
    EXPECT_TRUE(sections.ok()) << sections.status().message();
    table.Add(*sections, "d");
  }
  DeviceProperties device;
  device.level = Isa::kCuda;
  const auto can_run_as = [](const KernelDesc& row, const GemmDesc&, const KernelVariant& variant) {
    return std::string(row.name) == "many" && variant.width == 32 && variant.splits <= 4;
  };
  return SelectKernel(desc, {device, kRows, InOrder, can_run_as, &table}, forced);
}

std::string Chosen(const GemmDesc& desc, const std::string& kernel, std::string_view forced = "") {
  const Result<KernelChoice> choice = Choose(desc, kernel, forced);
  return choice.ok() ? choice->ToString() : choice.status().message();
}

TEST(SelectKernel, TakesTheLeastCostOfWhatMayRun) {
  EXPECT_EQ(Chosen(Problem(8), ""), "few");
  EXPECT_EQ(Chosen(Problem(9), ""), "many");
}

TEST(SelectKernel, CostsMayDependOnTheProblem) {
  const auto no_variants = [](const KernelDesc&, const GemmDesc&, const KernelVariant&) {
    return false;
  };
  const auto cost = [](const KernelDesc& kernel, const GemmDesc& desc) {
    return std::string(kernel.name) == "few" ? static_cast<double>(desc.m) : 4.5;
  };
  DeviceProperties device;
  device.level = Isa::kCuda;
  const Candidates candidates = {device, kRows, cost, no_variants};
  EXPECT_EQ(SelectKernel(Problem(4), candidates, "")->ToString(), "few");
  EXPECT_EQ(SelectKernel(Problem(5), candidates, "")->ToString(), "many");
  EXPECT_EQ(SelectKernel(Problem(5), candidates, "few")->ToString(), "few");
  GemmDesc empty = Problem(0);
  EXPECT_EQ(SelectKernel(empty, candidates, "")->ToString(), "few") << "costs of one row";
}

TEST(SelectKernel, SaysWhyEveryKernelDeclined) {
  const auto no_variants = [](const KernelDesc&, const GemmDesc&, const KernelVariant&) {
    return false;
  };
  const std::array<KernelDesc, 2> rows = {
      Row("few", Grade::kExact, FewRows),
      {"other", "gemm", Isa::kMetal, Grade::kExact, 16, 16, 16, {}, Always}};
  DeviceProperties device;
  device.level = Isa::kCuda;
  const Candidates candidates = {device, rows, InOrder, no_variants};
  EXPECT_THAT(SelectKernel(Problem(9), candidates, "").status().message(),
              HasSubstr("few: takes up to 8 rows; other: needs metal, the device runs at cuda"));
}

TEST(SelectKernel, ATableChoosesAmongTheSelectable) {
  EXPECT_EQ(Chosen(Problem(8), "many@32x2"), "many@32x2");
  EXPECT_EQ(Chosen(Problem(16), "many"), "many");
  EXPECT_EQ(Chosen(Problem(16), "measured"), "measured");
  EXPECT_EQ(Chosen(Problem(16), "exact"), "exact");  // Has smaller rounding errors.
  EXPECT_TRUE(Choose(Problem(16), "exact")->measured);
  EXPECT_FALSE(Choose(Problem(17), "exact")->measured);
}

TEST(SelectKernel, AnEntryThatDoesNotFitDoesNotCount) {
  EXPECT_EQ(Chosen(Problem(16), "absent"), "many");
  EXPECT_EQ(Chosen(Problem(16), "few"), "many");         // Does not support m = 16.
  EXPECT_EQ(Chosen(Problem(16), "many@32x5"), "many");   // Exceeds the number of splits here.
  EXPECT_EQ(Chosen(Problem(16), "exact@32x1"), "many");  // Has no variants.
  EXPECT_EQ(Chosen(Problem(16), "coarse"), "many");      // Another accuracy class.
}

TEST(SelectKernel, ATableNeverDecidesForEveryBatch) {
  GemmDesc invariant = Problem(16);
  invariant.determinism = Determinism::kBatchInvariant;
  EXPECT_EQ(Chosen(invariant, "exact"), "many");
}

TEST(SelectKernel, IsPure) {
  const GemmDesc desc = Problem(12);
  const std::string first = Chosen(desc, "many@32x3");
  for (int i = 0; i < 10; ++i) EXPECT_EQ(Chosen(desc, "many@32x3"), first);
}

TEST(SelectKernel, NamesWin) {
  EXPECT_EQ(Chosen(Problem(8), "many", "measured"), "measured");
  EXPECT_EQ(Chosen(Problem(8), "exact", "many@32x3"), "many@32x3");
  EXPECT_EQ(Chosen(Problem(8), "exact", "many"), "many");
  EXPECT_THAT(Chosen(Problem(9), "", "few"), HasSubstr("few: takes up to 8 rows"));
  EXPECT_THAT(Chosen(Problem(9), "", "many@64x1"), HasSubstr("has no variant 64x1"));
  const std::pair<const char*, Code> refused[] = {{"absent", Code::kInvalidArgument},
                                                  {"many@", Code::kInvalidArgument},
                                                  {"many@32", Code::kInvalidArgument},
                                                  {"many@32x", Code::kInvalidArgument},
                                                  {"many@32x1x1", Code::kInvalidArgument},
                                                  {"many@-32x1", Code::kInvalidArgument},
                                                  {"many@99999999999x1", Code::kInvalidArgument},
                                                  {"@32x1", Code::kInvalidArgument},
                                                  {"few", Code::kUnsupported}};
  for (const auto& [name, code] : refused) {
    EXPECT_EQ(Choose(Problem(9), "", name).status().code(), code) << name;
  }
}

TEST(SelectKernel, OnACpuATableMayOnlyRoundLess) {
  DeviceProperties device;
  device.level = Isa::kAmx;
  const auto never = [](const KernelDesc&, const GemmDesc&, const KernelVariant&) { return false; };
  const auto cost = [&](const KernelDesc& kernel, const GemmDesc& desc) {
    return cpu::CostOf(kernel, desc, device);
  };
  const auto chosen = [&](int64_t m, const char* kernel) {
    const auto sections =
        ParseTuning(std::string("metal-marlin tuning 2\ndevice d\n") +
                        "fp4_e2m1 128 fp16 none bf16 f32 plain 64 64 16 " + kernel + " 5\n" +
                        "fp4_e2m1 128 fp16 none bf16 f32 plain 64 64 2 " + kernel + " 5\n",
                    "t");
    TuningTable table;
    table.Add(*sections, "d");
    const auto choice =
        SelectKernel(Problem(m), {device, cpu::CpuKernels(), cost, never, &table}, "");
    return std::string(choice->kernel->name);
  };
  EXPECT_EQ(chosen(16, "marlin_gemm_avx512"), "marlin_gemm_avx512");
  EXPECT_EQ(chosen(2, "marlin_gemm_amx_bf16"), "marlin_gemm_avx512");
  EXPECT_EQ(chosen(2, "marlin_gemm_avx2"), "marlin_gemm_avx2");
  EXPECT_EQ(chosen(16, "marlin_gemm_w4a8_vnni"), "marlin_gemm_amx_bf16");
}

/// Returns the kernel that a CPU selects for a problem.
std::string ChosenOnCpu(const DeviceProperties& device, const GemmDesc& desc) {
  const auto never = [](const KernelDesc&, const GemmDesc&, const KernelVariant&) { return false; };
  const auto cost = [&](const KernelDesc& kernel, const GemmDesc& same) {
    return cpu::CostOf(kernel, same, device);
  };
  const auto choice = SelectKernel(desc, {device, cpu::CpuKernels(), cost, never}, "");
  return choice.ok() ? choice->kernel->name : choice.status().message();
}

/// The same for m rows on a CPU of a level without AVX-512 BF16.
std::string ChosenOnCpu(Isa level, int64_t m, Accuracy accuracy = Accuracy::kDefault) {
  DeviceProperties device;
  device.level = level;
  device.avx512_vnni = level >= Isa::kAvx512;
  GemmDesc desc = Problem(m);
  desc.accuracy = accuracy;
  return ChosenOnCpu(device, desc);
}

TEST(SelectKernel, OnACpuTakesTheWidestVectorsAndTilesFromFiveRowsOn) {
  for (const int64_t m : {0, 1, 4, 5, 16, 17, 1000, 1 << 20}) {
    EXPECT_EQ(ChosenOnCpu(Isa::kAmx, m), m < 5 ? "marlin_gemm_avx512" : "marlin_gemm_amx_bf16");
    EXPECT_EQ(ChosenOnCpu(Isa::kAvx512, m), "marlin_gemm_avx512");
    EXPECT_EQ(ChosenOnCpu(Isa::kAvx2, m), m <= 8 ? "marlin_gemv_avx2" : "marlin_gemm_avx2");
    EXPECT_EQ(ChosenOnCpu(Isa::kScalar, m), "marlin_gemm_scalar");
    EXPECT_EQ(ChosenOnCpu(Isa::kNeon, m), "marlin_gemm_neon");
    EXPECT_EQ(ChosenOnCpu(Isa::kAmx, m, Accuracy::kExact), "marlin_gemm_avx512");
    EXPECT_EQ(ChosenOnCpu(Isa::kAmx, m, Accuracy::kW4A8), "marlin_gemm_w4a8_vnni");
    EXPECT_EQ(ChosenOnCpu(Isa::kAvx2, m, Accuracy::kW4A8), "marlin_gemm_w4a8_avx2");
    EXPECT_EQ(ChosenOnCpu(Isa::kScalar, m, Accuracy::kW4A8), "marlin_gemm_w4a8_scalar");
  }
}

TEST(SelectKernel, OnAnAvx2CpuTakesOneKernelOfSparseWeightsForEveryNumberOfRows) {
  for (const int64_t m : {1, 4, 5, 9, 1000}) {
    for (const Determinism determinism : {Determinism::kDefault, Determinism::kBatchInvariant}) {
      DeviceProperties device;
      device.level = Isa::kAvx2;
      GemmDesc desc = Problem(m);
      desc.weights.sparse = true;
      desc.determinism = determinism;
      EXPECT_EQ(ChosenOnCpu(device, desc), "marlin_gemm_sparse_avx2");
      device.level = Isa::kAvx512;
      EXPECT_EQ(ChosenOnCpu(device, desc), "marlin_gemm_avx512");
      device.level = Isa::kAvx2;
      desc.format = Format::kNf4;
      EXPECT_EQ(ChosenOnCpu(device, desc), "marlin_gemm_sparse_avx2_bf16");
      desc.accuracy = Accuracy::kExact;
      EXPECT_EQ(ChosenOnCpu(device, desc), "marlin_gemm_avx2");
      desc.accuracy = Accuracy::kW4A8;
      desc.format = Format::kFp4E2M1;
      EXPECT_EQ(ChosenOnCpu(device, desc), "marlin_gemm_w4a8_avx2");
    }
  }
}

TEST(SelectKernel, OnAnAvx2CpuTakesTheGemvThatRoundsAsLittleAsAsked) {
  DeviceProperties device;
  device.level = Isa::kAvx2;
  const auto chosen = [&](Format format, Accuracy accuracy, Determinism determinism) {
    GemmDesc desc = Problem(4);
    desc.format = format;
    desc.accuracy = accuracy;
    desc.determinism = determinism;
    return ChosenOnCpu(device, desc);
  };
  const auto by_default = [&](Format format) {
    return chosen(format, Accuracy::kDefault, Determinism::kDefault);
  };
  for (const Format format : {Format::kFp4E2M1, Format::kU4, Format::kInt3, Format::kInt2}) {
    EXPECT_EQ(by_default(format), "marlin_gemv_avx2");
    EXPECT_EQ(chosen(format, Accuracy::kExact, Determinism::kDefault), "marlin_gemv_avx2");
    EXPECT_EQ(chosen(format, Accuracy::kDefault, Determinism::kBatchInvariant), "marlin_gemm_avx2");
  }
  // Their values are no bf16 numbers, or not known in advance.
  for (const Format format : {Format::kNf4, Format::kNf3, Format::kCodebook4}) {
    EXPECT_EQ(by_default(format), "marlin_gemv_avx2_bf16");
    EXPECT_EQ(chosen(format, Accuracy::kExact, Determinism::kDefault), "marlin_gemm_avx2");
    EXPECT_EQ(chosen(format, Accuracy::kDefault, Determinism::kBatchInvariant), "marlin_gemm_avx2");
  }
  EXPECT_EQ(by_default(Format::kS8), "marlin_gemm_avx2");
  EXPECT_EQ(by_default(Format::kBf16), "marlin_gemm_avx2");
}

TEST(SelectKernel, OnACpuTakesBf16DotsWhereTheyAreFast) {
  DeviceProperties device;
  device.level = Isa::kAvx512;
  device.avx512_bf16 = true;
  for (const int64_t m : {1, 2, 3, 4, 5, 16, 1000, 1 << 20}) {
    for (const Determinism determinism : {Determinism::kDefault, Determinism::kBatchInvariant}) {
      GemmDesc desc = Problem(m);
      desc.determinism = determinism;
      device.fast_bf16_dots = false;
      EXPECT_EQ(ChosenOnCpu(device, desc), "marlin_gemm_avx512") << m;
      device.fast_bf16_dots = true;
      EXPECT_EQ(ChosenOnCpu(device, desc), "marlin_gemm_avx512_bf16") << m;
      // Two terms are twice the work.
      desc.a_type = DType::kF32;
      EXPECT_EQ(ChosenOnCpu(device, desc), "marlin_gemm_avx512") << m;
      desc.allow_bf16_activations = true;
      EXPECT_EQ(ChosenOnCpu(device, desc), "marlin_gemm_avx512_bf16") << m;
      desc.accuracy = Accuracy::kExact;
      EXPECT_EQ(ChosenOnCpu(device, desc), "marlin_gemm_avx512") << m;
    }
  }
}

/// Every variant is listed once, can run, and has the name that ParseKernelName reads.
void CheckVariants(const KernelDesc& kernel, const GemmDesc& desc) {
  const cuda::DeviceShape device;
  const std::vector<KernelVariant> variants = cuda::VariantsOf(kernel, desc, device);
  for (const KernelVariant& variant : variants) {
    EXPECT_TRUE(cuda::CanRunAs(kernel, desc, device, variant));
    const auto name = ParseKernelName(ToString(kernel.name, variant));
    ASSERT_TRUE(name.ok());
    EXPECT_EQ(name->variant, variant);
    EXPECT_EQ(std::count(variants.begin(), variants.end(), variant), 1);
  }
  for (const KernelVariant wrong : {KernelVariant{33, 1}, {64, 9}, {256, 9}, {1 << 30, 1}}) {
    EXPECT_FALSE(cuda::CanRunAs(kernel, desc, device, wrong));
  }
  // Split-K with more CTAs than run concurrently, and tiles too large for clusters.
  if (desc.n > 128 * device.multiprocessors) {
    EXPECT_FALSE(cuda::CanRunAs(kernel, desc, device, {256, 2}));
  }
}

TEST(Variants, AreListedOnceAndCanRun) {
  size_t most = 0;
  for (const int64_t m : {1, 8, 16, 33, 64, 100, 129, 257, 4096}) {
    for (const int64_t n : {64, 768, 4096, 4100, 151936}) {
      for (const int64_t k : {16, 2048, 14336}) {
        GemmDesc desc = Problem(m);
        desc.n = n;
        desc.k = k;
        for (const KernelDesc& kernel : cuda::CudaKernels()) {
          CheckVariants(kernel, desc);
          most = std::max(most, cuda::VariantsOf(kernel, desc, {}).size());
        }
      }
    }
  }
  EXPECT_GT(most, 10U);
}

TEST(ShippedTuning, IsWellFormedAndNamesKernelsThatExist) {
  const auto sections = ParseTuning(cuda::ShippedTuning(), "shipped");
  ASSERT_TRUE(sections.ok()) << sections.status().message();
  for (const TuningSection& section : *sections) {
    EXPECT_FALSE(section.date.empty()) << section.device;
    for (const TuningEntry& entry : section.entries) {
      const auto rows = cuda::CudaKernels();
      EXPECT_TRUE(std::any_of(rows.begin(), rows.end(), [&](const KernelDesc& row) {
        return entry.kernel == row.name;
      })) << entry.kernel;
    }
  }
}

}  // namespace
}  // namespace marlin::select_test
