// Tests the checker itself: names, verdicts, and twelve faults injected into a correct GEMM, each
// of which one of the checks must detect.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "bounds.h"
#include "case.h"
#include "problem.h"
#include "reference/elements.h"
#include "report.h"
#include "suite.h"

namespace marlin::conformance {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr ErrorModel kExactModel = {.weight_unit = 0x1.8p-23, .lanes = 1, .extra_depth = 4};

Case Base(DataClass data) {
  Case c;
  c.kernel = "marlin_gemm_scalar";
  c.m = 16;
  c.n = 48;
  c.k = 250;
  c.group_size = 64;
  c.data = data;
  c.seed = 3;
  return c;
}

// A correct fp32 GEMM with hooks to corrupt weights and activations.
using Weight = std::function<float(int64_t k, int64_t n)>;
std::vector<float> Multiply(const Problem& problem, const Weight& weight, int64_t k_count) {
  const Case& c = problem.c;
  std::vector<float> out(static_cast<size_t>(c.m * c.n));
  for (int64_t m = 0; m < c.m; ++m) {
    for (int64_t n = 0; n < c.n; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < k_count; ++k) {
        const double a = reference::LoadElement(problem.a.data(), problem.a.dtype(), m * c.k + k);
        sum = std::fma(static_cast<float>(a), weight(k, n), sum);
      }
      out[static_cast<size_t>(m * c.n + n)] = sum;
    }
  }
  return out;
}

Weight TrueWeight(const Problem& problem) {
  return [&problem](int64_t k, int64_t n) {
    return static_cast<float>(problem.dense.value[static_cast<size_t>(k * problem.c.n + n)]);
  };
}

bool Accepts(const Problem& problem, const std::vector<float>& out, Grade grade) {
  const std::vector<Allowance> allowances = Allowances(problem, kExactModel, grade);
  for (size_t i = 0; i < out.size(); ++i) {
    if (!Judge(out[i], problem.expected[i], allowances[i], problem.c.c_type, false).passed) {
      return false;
    }
  }
  return true;
}

struct Fault {
  const char* name;
  std::function<std::vector<float>(const Problem&)> product;
};

std::vector<float> With(const Problem& problem, const std::function<void(float*)>& spoil) {
  std::vector<float> out = Multiply(problem, TrueWeight(problem), problem.c.k);
  spoil(out.data());
  return out;
}

std::vector<float> WithWeight(const Problem& problem,
                              const std::function<float(const Weight&, int64_t, int64_t)>& spoil) {
  const Weight weight = TrueWeight(problem);
  const Weight spoiled = [&](int64_t k, int64_t n) { return spoil(weight, k, n); };
  return Multiply(problem, spoiled, problem.c.k);
}

const Fault kFaults[] = {
    {"one element 10 % larger",
     [](const Problem& p) { return With(p, [](float* c) { c[100] *= 1.1f; }); }},
    {"one element zero", [](const Problem& p) { return With(p, [](float* c) { c[100] = 0.0f; }); }},
    {"last row never written",
     [](const Problem& p) {
       return With(p, [&p](float* c) {
         for (int64_t n = 0; n < p.c.n; ++n) c[(p.c.m - 1) * p.c.n + n] = NAN;
       });
     }},
    {"an 8x8 tile zero",
     [](const Problem& p) {
       return With(p, [&p](float* c) {
         for (int64_t i = 0; i < 64; ++i) c[(8 + i / 8) * p.c.n + 16 + i % 8] = 0.0f;
       });
     }},
    {"last k dropped", [](const Problem& p) { return Multiply(p, TrueWeight(p), p.c.k - 1); }},
    {"two k exchanged in one column",
     [](const Problem& p) {
       return WithWeight(p, [](const Weight& w, int64_t k, int64_t n) {
         return w(n == 7 && k / 2 == 5 ? k ^ 1 : k, n);
       });
     }},
    {"scale of the neighbouring group",
     [](const Problem& p) {
       return WithWeight(p, [&p](const Weight& w, int64_t k, int64_t n) {
         const auto scale = [&](int64_t g) {
           return static_cast<float>(reference::LoadElement(
               p.weights.scales.data(), p.weights.scales.dtype(), g * p.c.n + n));
         };
         return k / 64 == 1 ? w(k, n) / scale(1) * scale(2) : w(k, n);
       });
     }},
    {"0.5 decoded as 0",
     [](const Problem& p) {
       return WithWeight(p, [&p](const Weight& w, int64_t k, int64_t n) {
         const auto scale = static_cast<float>(reference::LoadElement(
             p.weights.scales.data(), p.weights.scales.dtype(), k / 64 * p.c.n + n));
         const float value = w(k, n) / scale;
         return std::abs(std::abs(value) - 0.5f) < 0.01f ? 0.0f : w(k, n);
       });
     }},
    {"one slice of k added twice",
     [](const Problem& p) {
       return WithWeight(p, [](const Weight& w, int64_t k, int64_t n) {
         return k / 32 == 3 ? 2.0f * w(k, n) : w(k, n);
       });
     }},
    {"the weight first rounded to bf16",
     [](const Problem& p) {
       return WithWeight(p, [](const Weight& w, int64_t k, int64_t n) {
         return static_cast<float>(reference::RoundTo(w(k, n), DType::kBf16));
       });
     }},
    {"a padded column read as a neighbour",
     [](const Problem& p) {
       return WithWeight(p, [&p](const Weight& w, int64_t k, int64_t n) {
         return w(k, n == p.c.n - 1 ? n - 1 : n);
       });
     }},
    {"output rounded to bf16 on the way",
     [](const Problem& p) {
       return With(p, [&p](float* c) {
         for (int64_t i = 0; i < p.c.m * p.c.n; ++i) {
           c[i] = static_cast<float>(reference::RoundTo(c[i], DType::kBf16));
         }
       });
     }},
};

TEST(Judge, AcceptsACorrectProduct) {
  for (DataClass data : {DataClass::kLattice, DataClass::kGaussian, DataClass::kHeavy}) {
    const auto problem = MakeProblem(Base(data));
    ASSERT_TRUE(problem.ok());
    EXPECT_EQ((*problem)->broken_precondition, "");
    const std::vector<float> out = Multiply(**problem, TrueWeight(**problem), (*problem)->c.k);
    EXPECT_TRUE(Accepts(**problem, out, Grade::kExact));
  }
}

TEST(Judge, NoticesEveryFault) {
  const auto lattice = MakeProblem(Base(DataClass::kLattice));
  const auto gaussian = MakeProblem(Base(DataClass::kGaussian));
  ASSERT_TRUE(lattice.ok() && gaussian.ok());
  for (const Fault& fault : kFaults) {
    EXPECT_FALSE(Accepts(**lattice, fault.product(**lattice), Grade::kExact) &&
                 Accepts(**gaussian, fault.product(**gaussian), Grade::kExact))
        << fault.name;
  }
}

TEST(Judge, NonFiniteOutputs) {
  const Allowance allowance{.hard = 1.0, .tight = 1.0, .exact = false};
  EXPECT_TRUE(Judge(NAN, NAN, allowance, DType::kF32, false).passed);
  EXPECT_FALSE(Judge(1.0, NAN, allowance, DType::kF32, false).passed);
  EXPECT_FALSE(Judge(NAN, 1.0, allowance, DType::kF32, false).passed);
  EXPECT_TRUE(Judge(-kInf, -kInf, allowance, DType::kF32, false).passed);
  EXPECT_FALSE(Judge(kInf, -kInf, allowance, DType::kF32, false).passed);
  EXPECT_FALSE(Judge(NAN, kInf, allowance, DType::kF32, false).passed);
  // Lenient kernels may turn an Inf that ReLU would have mapped to 0 into NaN, but never a finite
  // sum.
  EXPECT_FALSE(Judge(NAN, 0.0, allowance, DType::kF32, true).passed);
  EXPECT_TRUE(Judge(NAN, 0.0, {kInf, kInf, false}, DType::kF32, true).passed);
  EXPECT_FALSE(Judge(NAN, 0.0, {kInf, kInf, false}, DType::kF32, false).passed);
  EXPECT_TRUE(Judge(NAN, kInf, allowance, DType::kF32, true).passed);
  // fp16 overflows at 65520: if the bound includes it, Inf and a finite result are both correct.
  EXPECT_TRUE(Judge(kInf, 65519.5, allowance, DType::kF16, false).passed);
  EXPECT_TRUE(Judge(65504.0, 65519.5, allowance, DType::kF16, false).passed);
  EXPECT_FALSE(Judge(kInf, 65000.0, allowance, DType::kF16, false).passed);
}

TEST(CaseName, GivesTheCaseBack) {
  Case c = Base(DataClass::kHeavy);
  c.check = Check::kBatchInvariant;
  c.experts = 3;
  c.padded = c.misaligned = c.weight_biases = c.user_codebook = c.global_divides = true;
  c.zero_type = ScaleType::kF32;
  c.bias = c.gated = c.row_weight = c.allow_bf16_activations = true;
  c.bias_type = DType::kF16;
  c.a_type = DType::kBf16;
  c.activation = Activation::kGeluTanh;
  c.scale_type = ScaleType::kE4M3;
  const std::string name = CaseName(c);
  EXPECT_EQ(name,
            "batch_invariant/fp4_e2m1/cpu/marlin_gemm_scalar/"
            "m16_n48_k250_g64_e3_padded_misaligned/e4m3_zfp32_divides_wbias_codebook/bf16_f32/"
            "bias_f16+gelu_tanh+gated+row_weight+allow_bf16/heavy/seed3");
  const auto parsed = ParseCase(name);
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(*parsed, c);
  c.backend = "cuda";
  EXPECT_EQ(CaseName(c).substr(0, 30), "batch_invariant/fp4_e2m1/cuda/");
  const auto other = ParseCase(CaseName(c));
  ASSERT_TRUE(other.ok()) << other.status().message();
  EXPECT_EQ(*other, c);
}

TEST(CaseName, RefusesWhatItDoesNotUnderstand) {
  for (const char* name : {"", "gemm", "gemm/u4/cpu/k/m1_n1_k1_g1/fp16/f32_f32/none/lattice",
                           "gemm/u7/cpu/k/m1_n1_k1_g1/fp16/f32_f32/none/lattice/seed1",
                           "gemm/u4/gpu/k/m1_n1_k1_g1/fp16/f32_f32/none/lattice/seed1",
                           "gemm/u4/cpu/k/m-1_n1_k1_g1/fp16/f32_f32/none/lattice/seed1",
                           "gemm/u4/cpu/k/m1_n1_k1/fp16/f32_f32/none/lattice/seed1",
                           "gemm/u4/cpu/k/m1_n1_k1_g1/fp16_x/f32_f32/none/lattice/seed1",
                           "gemm/u4/cpu/k/m1_n1_k1_g1/fp16/f32_f33/none/lattice/seed1",
                           "gemm/u4/cpu/k/m1_n1_k1_g1/fp16/f32_f32/tanh/lattice/seed1",
                           "gemm/u4/cpu/k/m1_n1_k1_g1/fp16/f32_f32/none/lattice/seedx"}) {
    EXPECT_EQ(ParseCase(name).status().code(), Code::kInvalidArgument) << name;
  }
}

TEST(CountsPath, HasAFileForEachCodeButHoppers) {
  EXPECT_EQ(CountsPath("a/cuda.json", {}), "a/cuda.json");
  DeviceProperties cuda;
  EXPECT_EQ(CountsPath("a/cuda.json", cuda), "a/cuda.json");
  cuda.has_wgmma = false;
  for (const auto& [code, name] : {std::pair(80, "a/cuda_80.json"),
                                   {86, "a/cuda_80.json"},
                                   {89, "a/cuda_89.json"},
                                   {90, "a/cuda_90.json"},
                                   {120, "a/cuda_90.json"}}) {
    cuda.cuda_code = code;
    EXPECT_EQ(CountsPath("a/cuda.json", cuda), name) << code;
  }
}

TEST(RunOrder, ReachesEveryProblemOnce) {
  for (size_t count = 0; count < 2000; ++count) {
    std::vector<size_t> listed(count);
    std::iota(listed.begin(), listed.end(), size_t{0});
    EXPECT_EQ(RunOrder(count, false), listed);
    std::vector<size_t> mixed = RunOrder(count, true);
    std::sort(mixed.begin(), mixed.end());
    EXPECT_EQ(mixed, listed);
  }
}

TEST(RunOrder, FewProblemsComeFromEverywhereWhenMixed) {
  const std::vector<size_t> order = RunOrder(1000, true);
  std::set<size_t> tenths;
  for (size_t i = 0; i < 20; ++i) tenths.insert(order[i] / 100);
  EXPECT_EQ(tenths.size(), 10U);
}

}  // namespace
}  // namespace marlin::conformance
