// The C interface: errors are a code and one line, handles may be destroyed in any order, structs
// of other versions are read up to the fields both versions know.
#include "marlin/marlin_c.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../../source_directory.h"
#include "base/scalars.h"
#include "c/handles.h"
#include "marlin/gemm.h"
#include "marlin/quantize.h"
#include "marlin/version.h"

namespace {

constexpr int64_t kN = 64;
constexpr int64_t kK = 96;

marlin_tensor Matrix(void* data, int32_t type, int64_t rows, int64_t columns) {
  marlin_tensor tensor = MARLIN_TENSOR_INIT;
  tensor.data = data;
  tensor.dtype = type;
  tensor.rank = 2;
  tensor.shape[0] = rows;
  tensor.shape[1] = columns;
  return tensor;
}

class MarlinC : public ::testing::Test {
 protected:
  MarlinC() : dense_(kK * kN), a_(4 * kK, 1.0F), out_(4 * kN) {
    for (size_t i = 0; i < dense_.size(); ++i) dense_[i] = std::sin(static_cast<float>(i));
    const marlin_tensor dense = Matrix(dense_.data(), MARLIN_F32, kK, kN);
    EXPECT_EQ(marlin_quantize(&dense, "fp4_e2m1/g32", &weights_), MARLIN_OK);
    EXPECT_EQ(marlin_device_open("cpu", 2, &device_), MARLIN_OK);
    EXPECT_EQ(marlin_prepare(weights_, device_, &prepared_), MARLIN_OK);
    problem_.m = 4;
    problem_.a_type = problem_.out_type = MARLIN_F32;
  }
  ~MarlinC() override {
    marlin_device_destroy(device_);
    marlin_weights_destroy(weights_);
    marlin_prepared_destroy(prepared_);
    marlin_plan_destroy(plan_);
  }

  /// marlin_moe_forward with exactly the workspace it needs, on device memory, gives `expected`.
  void ExpectForwardInWorkspace(const marlin_tensor& x, const marlin_router& router,
                                const marlin_experts* set, const marlin_experts_problem& problem,
                                const std::vector<float>& expected) {
    int64_t bytes = 0;
    ASSERT_EQ(marlin_moe_workspace_bytes(device_, &router, set, &problem, &bytes), MARLIN_OK)
        << marlin_last_error();
    ASSERT_GT(bytes, 0);
    marlin_buffer* memory = nullptr;
    ASSERT_EQ(marlin_buffer_allocate(device_, bytes, &memory), MARLIN_OK);
    std::vector<float> out(expected.size(), -1.0F);
    const marlin_tensor out_view = Matrix(out.data(), MARLIN_F32, x.shape[0], x.shape[1]);
    marlin_gemm_arguments arguments = MARLIN_GEMM_ARGUMENTS_INIT;
    arguments.workspace = marlin_buffer_data(memory);
    arguments.workspace_bytes = bytes;
    const auto forward = [&] {
      return marlin_moe_forward(device_, &x, &router, set, &out_view, &problem, &arguments);
    };
    EXPECT_EQ(forward(), MARLIN_OK) << marlin_last_error();
    EXPECT_EQ(out, expected);
    --arguments.workspace_bytes;
    EXPECT_EQ(forward(), MARLIN_INVALID_ARGUMENT);
    EXPECT_EQ(marlin_last_error(), "workspace: expected at least " + std::to_string(bytes) +
                                       " bytes, got " + std::to_string(bytes - 1));
    EXPECT_EQ(marlin_moe_workspace_bytes(device_, &router, set, &problem, nullptr),
              MARLIN_INVALID_ARGUMENT);
    EXPECT_STREQ(marlin_last_error(), "bytes: NULL");
    EXPECT_EQ(marlin_moe_workspace_bytes(device_, &router, set, nullptr, &bytes),
              MARLIN_INVALID_ARGUMENT);
    EXPECT_STREQ(marlin_last_error(), "problem: NULL");
    marlin_buffer_destroy(memory);
  }

  marlin_code Plan() { return marlin_plan_gemm(device_, prepared_, &problem_, &plan_); }

  std::vector<float> dense_;
  std::vector<float> a_;
  std::vector<float> out_;
  marlin_device* device_ = nullptr;
  marlin_weights* weights_ = nullptr;
  marlin_prepared* prepared_ = nullptr;
  marlin_plan* plan_ = nullptr;
  marlin_gemm_problem problem_ = MARLIN_GEMM_PROBLEM_INIT;
};

TEST_F(MarlinC, QuantizesWithFractionalZeros) {
  for (float& value : dense_) value += 0.3F;
  const marlin_tensor dense = Matrix(dense_.data(), MARLIN_F32, kK, kN);
  marlin_weights* weights = nullptr;
  ASSERT_EQ(marlin_quantize(&dense, "u4/g32/frac", &weights), MARLIN_OK) << marlin_last_error();
  const marlin::TensorView zeros = weights->weights.zeros;
  bool fractional = false;
  for (int64_t i = 0; i < zeros.shape().ElementCount(); ++i) {
    const float zero = marlin::HalfToFloat(zeros.As<uint16_t>()[i]);
    fractional |= zero != std::round(zero);
  }
  EXPECT_TRUE(fractional);
  marlin_weights_destroy(weights);
}

TEST_F(MarlinC, MultipliesAsTheCppInterfaceDoes) {
  ASSERT_EQ(Plan(), MARLIN_OK) << marlin_last_error();
  EXPECT_TRUE(std::string(marlin_plan_kernel(plan_)).starts_with("marlin_gem"));
  EXPECT_NE(std::string(marlin_plan_accuracy(plan_)), "");
  const marlin_tensor a = Matrix(a_.data(), MARLIN_F32, 4, kK);
  const marlin_tensor out = Matrix(out_.data(), MARLIN_F32, 4, kN);
  ASSERT_EQ(marlin_plan_run(plan_, &a, &out, nullptr), MARLIN_OK) << marlin_last_error();

  const marlin::Device device = *marlin::Device::Open("cpu", {.threads = 2});
  const auto weights =
      marlin::Quantize({dense_.data(), marlin::DType::kF32, {kK, kN}}, {.group_size = 32});
  const auto prepared = marlin::Prepare(*weights, device);
  std::vector<float> expected(out_.size());
  ASSERT_TRUE(marlin::Gemm(device, {a_.data(), marlin::DType::kF32, {4, kK}}, *prepared,
                           {expected.data(), marlin::DType::kF32, {4, kN}})
                  .ok());
  EXPECT_EQ(out_, expected);
}

TEST_F(MarlinC, HandlesMayGoInAnyOrder) {
  ASSERT_EQ(Plan(), MARLIN_OK);
  marlin_device_destroy(std::exchange(device_, nullptr));
  marlin_weights_destroy(std::exchange(weights_, nullptr));
  marlin_prepared_destroy(std::exchange(prepared_, nullptr));
  const marlin_tensor a = Matrix(a_.data(), MARLIN_F32, 4, kK);
  const marlin_tensor out = Matrix(out_.data(), MARLIN_F32, 4, kN);
  EXPECT_EQ(marlin_plan_run(plan_, &a, &out, nullptr), MARLIN_OK);
  for (auto* const none : {static_cast<void*>(nullptr)}) {
    marlin_plan_destroy(static_cast<marlin_plan*>(none));
    marlin_buffer_destroy(static_cast<marlin_buffer*>(none));
    marlin_checkpoint_destroy(static_cast<marlin_checkpoint*>(none));
  }
}

TEST_F(MarlinC, SaysWhatIsWrong) {
  const auto expect = [](marlin_code code, marlin_code expected, const std::string& words) {
    EXPECT_EQ(code, expected);
    const std::string message = marlin_last_error();
    EXPECT_NE(message.find(words), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos);
  };
  auto* device = reinterpret_cast<marlin_device*>(this);
  expect(marlin_device_open("gpu", 0, &device), MARLIN_INVALID_ARGUMENT, "unknown name 'gpu'");
  EXPECT_EQ(device, nullptr);
  expect(marlin_device_open(nullptr, 0, &device), MARLIN_INVALID_ARGUMENT, "name: NULL");
  expect(marlin_device_open("cpu", 0, nullptr), MARLIN_INVALID_ARGUMENT, "device: NULL");
  expect(marlin_device_open("cpu", -1, &device), MARLIN_INVALID_ARGUMENT, "threads");
  marlin_weights* weights = nullptr;
  expect(marlin_quantize(nullptr, "fp4_e2m1", &weights), MARLIN_INVALID_ARGUMENT, "dense: NULL");
  marlin_tensor dense = Matrix(dense_.data(), MARLIN_F32, kK, kN);
  expect(marlin_quantize(&dense, "fp5", &weights), MARLIN_INVALID_ARGUMENT, "fp5");
  expect(marlin_quantize(&dense, "keep", &weights), MARLIN_INVALID_ARGUMENT, "keep");
  dense.rank = 9;
  expect(marlin_quantize(&dense, "fp4_e2m1/g32", &weights), MARLIN_INVALID_ARGUMENT, "rank");
  dense.rank = 2;
  dense.dtype = 99;
  expect(marlin_quantize(&dense, "fp4_e2m1/g32", &weights), MARLIN_INVALID_ARGUMENT,
         "unknown dtype 99");
  dense.dtype = MARLIN_F32;
  dense_[5] = NAN;
  expect(marlin_quantize(&dense, "fp4_e2m1/g32", &weights), MARLIN_NON_FINITE_INPUT, "dense");
  EXPECT_EQ(weights, nullptr);
  marlin_checkpoint* checkpoint = nullptr;
  expect(marlin_checkpoint_open("/nowhere/at/all", &checkpoint), MARLIN_IO, "/nowhere/at/all");
  marlin_buffer* buffer = nullptr;
  expect(marlin_buffer_allocate(device_, -1, &buffer), MARLIN_INVALID_ARGUMENT, "bytes");
  problem_.activation = 7;
  expect(Plan(), MARLIN_INVALID_ARGUMENT, "activation: unknown number 7");
  problem_.activation = -1;
  expect(Plan(), MARLIN_INVALID_ARGUMENT, "activation: unknown number 255");
}

TEST_F(MarlinC, RefusesNullEverywhere) {
  marlin_weights* weights = nullptr;
  marlin_prepared* prepared = nullptr;
  const marlin_tensor out = Matrix(out_.data(), MARLIN_F32, 4, kN);
  for (const marlin_code code :
       {marlin_device_synchronize(nullptr, nullptr),
        marlin_checkpoint_open(nullptr, nullptr),
        marlin_checkpoint_weights(nullptr, "a", &weights),
        marlin_fold_input(nullptr, &weights),
        marlin_fold_input(weights_, nullptr),
        marlin_prepare(nullptr, device_, &prepared),
        marlin_prepare(weights_, nullptr, &prepared),
        marlin_prepare(weights_, device_, nullptr),
        marlin_prepared_dequantize(nullptr, device_, &out, 0, nullptr),
        marlin_prepared_dequantize(prepared_, device_, nullptr, 0, nullptr),
        marlin_plan_gemm(nullptr, prepared_, &problem_, &plan_),
        marlin_plan_gemm(device_, nullptr, &problem_, &plan_),
        marlin_plan_gemm(device_, prepared_, nullptr, &plan_),
        marlin_plan_gemm(device_, prepared_, &problem_, nullptr),
        marlin_plan_run(nullptr, &out, &out, nullptr),
        marlin_buffer_copy_from(nullptr, &out, 1, 0),
        marlin_buffer_copy_to(nullptr, nullptr, 1, 0),
        marlin_buffer_copy_from_async(nullptr, &out, 1, 0, nullptr),
        marlin_buffer_copy_to_async(nullptr, nullptr, 1, 0, nullptr),
        marlin_buffer_allocate(nullptr, 1, nullptr)}) {
    EXPECT_EQ(code, MARLIN_INVALID_ARGUMENT);
    EXPECT_NE(std::string(marlin_last_error()).find("NULL"), std::string::npos);
  }
  EXPECT_EQ(marlin_weights_k(nullptr), 0);
  EXPECT_EQ(marlin_plan_workspace_bytes(nullptr), 0);
  EXPECT_STREQ(marlin_plan_kernel(nullptr), "");
  EXPECT_EQ(marlin_checkpoint_module_name(nullptr, 0), nullptr);
  EXPECT_EQ(marlin_buffer_data(nullptr), nullptr);
}

TEST_F(MarlinC, FoldsTheInputOfWeightsOfActOrder) {
  const std::string golden = marlin::SourceDirectory() + "/tests/golden/checkpoint_permuted";
  marlin_checkpoint* checkpoint = nullptr;
  ASSERT_EQ(marlin_checkpoint_open(golden.c_str(), &checkpoint), MARLIN_OK) << marlin_last_error();
  marlin_weights* stored = nullptr;
  ASSERT_EQ(
      marlin_checkpoint_weights(checkpoint, "model.layers.0.self_attn.q_proj.weight", &stored),
      MARLIN_OK);
  marlin_weights* plain = nullptr;
  ASSERT_EQ(marlin_fold_input(stored, &plain), MARLIN_OK) << marlin_last_error();
  EXPECT_EQ(marlin_weights_bytes(plain), 4 * 80 * 16);
  std::vector<float> numbers[2];
  for (int i = 0; i < 2; ++i) {
    marlin_prepared* prepared = nullptr;
    ASSERT_EQ(marlin_prepare(i == 0 ? stored : plain, device_, &prepared), MARLIN_OK);
    numbers[i].resize(80 * 16);
    const marlin_tensor out = Matrix(numbers[i].data(), MARLIN_F32, 80, 16);
    ASSERT_EQ(marlin_prepared_dequantize(prepared, device_, &out, 0, nullptr), MARLIN_OK);
    marlin_prepared_destroy(prepared);
  }
  EXPECT_EQ(numbers[0], numbers[1]);
  marlin_weights_destroy(plain);
  marlin_weights_destroy(stored);
  marlin_checkpoint_destroy(checkpoint);
}

TEST_F(MarlinC, ReadsStructsOfOtherVersions) {
  // An older caller knows only m and the types; the other fields have their defaults.
  problem_.size = offsetof(marlin_gemm_problem, activation);
  problem_.activation = 77;
  EXPECT_EQ(Plan(), MARLIN_OK) << marlin_last_error();
  marlin_plan_destroy(std::exchange(plan_, nullptr));
  // A newer caller has fields that this version does not know.
  struct Newer {
    marlin_gemm_problem problem = MARLIN_GEMM_PROBLEM_INIT;
    int64_t more = 5;
  } newer;
  newer.problem.size = sizeof(newer);
  newer.problem.m = 4;
  EXPECT_EQ(marlin_plan_gemm(device_, prepared_, &newer.problem, &plan_), MARLIN_OK);
  marlin_plan_destroy(std::exchange(plan_, nullptr));
  for (const size_t size : {size_t{0}, size_t{3}, size_t{1} << 40}) {
    problem_.size = size;
    EXPECT_EQ(Plan(), MARLIN_INVALID_ARGUMENT) << size;
    EXPECT_EQ(plan_, nullptr);
  }
}

TEST_F(MarlinC, BuffersHoldOperands) {
  ASSERT_EQ(Plan(), MARLIN_OK);
  marlin_buffer* a = nullptr;
  marlin_buffer* out = nullptr;
  ASSERT_EQ(marlin_buffer_allocate(device_, 4 * kK * 4, &a), MARLIN_OK);
  ASSERT_EQ(marlin_buffer_allocate(device_, 4 * kN * 4, &out), MARLIN_OK);
  ASSERT_EQ(marlin_buffer_copy_from(a, a_.data(), 4 * kK * 4, 0), MARLIN_OK);
  const marlin_tensor a_view = Matrix(marlin_buffer_data(a), MARLIN_F32, 4, kK);
  const marlin_tensor out_view = Matrix(marlin_buffer_data(out), MARLIN_F32, 4, kN);
  ASSERT_EQ(marlin_plan_run(plan_, &a_view, &out_view, nullptr), MARLIN_OK);
  ASSERT_EQ(marlin_device_synchronize(device_, nullptr), MARLIN_OK);
  ASSERT_EQ(marlin_buffer_copy_to(out, out_.data(), 4 * kN * 4, 0), MARLIN_OK);
  EXPECT_NE(out_[0], 0.0F);
  EXPECT_EQ(marlin_buffer_copy_to(out, out_.data(), 4 * kN * 4, 4), MARLIN_INVALID_ARGUMENT);
  // The same run between two copies of its stream.
  const std::vector<float> expected(out_.begin(), out_.end());
  std::fill(out_.begin(), out_.end(), -1.0F);
  ASSERT_EQ(marlin_buffer_copy_from_async(out, out_.data(), 4 * kN * 4, 0, nullptr), MARLIN_OK);
  ASSERT_EQ(marlin_plan_run(plan_, &a_view, &out_view, nullptr), MARLIN_OK);
  ASSERT_EQ(marlin_buffer_copy_to_async(out, out_.data(), 4 * kN * 4, 0, nullptr), MARLIN_OK);
  ASSERT_EQ(marlin_device_synchronize(device_, nullptr), MARLIN_OK);
  EXPECT_EQ(std::vector<float>(out_.begin(), out_.end()), expected);
  EXPECT_EQ(marlin_buffer_copy_from_async(out, out_.data(), 4 * kN * 4, 4, nullptr),
            MARLIN_INVALID_ARGUMENT);
  EXPECT_EQ(marlin_buffer_copy_to_async(out, nullptr, 4, 0, nullptr), MARLIN_INVALID_ARGUMENT);
  EXPECT_STREQ(marlin_last_error(), "host: null data");
  marlin_buffer_destroy(a);
  marlin_buffer_destroy(out);
}

TEST_F(MarlinC, RoutersHaveRulesForGroupsAndSums) {
  marlin_weights* matrix = nullptr;
  marlin_prepared* ready = nullptr;
  const marlin_tensor dense = Matrix(dense_.data(), MARLIN_F32, kK, 3);
  ASSERT_EQ(marlin_quantize(&dense, "fp32", &matrix), MARLIN_OK);
  ASSERT_EQ(marlin_prepare(matrix, device_, &ready), MARLIN_OK);
  marlin_router router = MARLIN_ROUTER_INIT;
  router.weights = ready;
  std::vector<int32_t> ids(8);
  std::vector<float> weights(8);
  const auto route = [&] {
    const marlin_tensor x = Matrix(a_.data(), MARLIN_F32, 4, kK);
    const marlin_tensor ids_view = Matrix(ids.data(), MARLIN_I32, 4, 2);
    const marlin_tensor weights_view = Matrix(weights.data(), MARLIN_F32, 4, 2);
    return marlin_route_tokens(device_, &x, &router, &ids_view, &weights_view, nullptr);
  };
  ASSERT_EQ(route(), MARLIN_OK) << marlin_last_error();
  const std::vector<float> normalized = weights;
  router.keep_weights = 1;
  ASSERT_EQ(route(), MARLIN_OK);
  const std::vector<float> kept = weights;
  router.keep_weights = 0;
  router.least_sum = 4.0F;
  ASSERT_EQ(route(), MARLIN_OK);
  for (size_t i = 0; i < kept.size(); ++i) EXPECT_NEAR(weights[i], kept[i] / 4, 1e-6F);
  router.least_sum = -1.0F;
  EXPECT_EQ(route(), MARLIN_INVALID_ARGUMENT);
  router.least_sum = 0.0F;
  router.best_of_group = 3;
  EXPECT_EQ(route(), MARLIN_INVALID_ARGUMENT);
  EXPECT_NE(std::string(marlin_last_error()).find("best_of_group"), std::string::npos);
  router.best_of_group = 1;
  ASSERT_EQ(route(), MARLIN_OK);
  EXPECT_EQ(weights, normalized);
  marlin_prepared_destroy(ready);
  marlin_weights_destroy(matrix);
}

TEST_F(MarlinC, ExpertsRunAfterTheirRouter) {
  constexpr int64_t kTokens = 4;
  marlin_weights* back_weights = nullptr;
  marlin_prepared* back = nullptr;
  marlin_weights* router_weights = nullptr;
  marlin_prepared* router_ready = nullptr;
  const marlin_tensor dense_back = Matrix(dense_.data(), MARLIN_F32, kN / 2, kK);
  const marlin_tensor dense_router = Matrix(dense_.data(), MARLIN_F32, kK, 3);
  ASSERT_EQ(marlin_quantize(&dense_back, "u4/g32", &back_weights), MARLIN_OK);
  ASSERT_EQ(marlin_prepare(back_weights, device_, &back), MARLIN_OK);
  ASSERT_EQ(marlin_quantize(&dense_router, "fp32", &router_weights), MARLIN_OK);
  ASSERT_EQ(marlin_prepare(router_weights, device_, &router_ready), MARLIN_OK);
  // Two experts with the same weights; the third is on another device.
  marlin_expert expert{};
  expert.gate.weights = prepared_;
  expert.down.weights = back;
  const marlin_expert experts[] = {expert, expert, marlin_expert{}};
  marlin_experts* set = nullptr;
  ASSERT_EQ(marlin_experts_create(device_, experts, 3, &expert, nullptr, &set), MARLIN_OK)
      << marlin_last_error();
  marlin_router router = MARLIN_ROUTER_INIT;
  router.weights = router_ready;
  std::vector<int32_t> ids(kTokens * 2, -1);
  std::vector<float> weights(kTokens * 2);
  std::vector<float> out(kTokens * kK);
  std::vector<float> both(kTokens * kK);
  const marlin_tensor x = Matrix(a_.data(), MARLIN_F32, kTokens, kK);
  const marlin_tensor ids_view = Matrix(ids.data(), MARLIN_I32, kTokens, 2);
  const marlin_tensor weights_view = Matrix(weights.data(), MARLIN_F32, kTokens, 2);
  const marlin_tensor out_view = Matrix(out.data(), MARLIN_F32, kTokens, kK);
  const marlin_tensor both_view = Matrix(both.data(), MARLIN_F32, kTokens, kK);
  ASSERT_EQ(marlin_route_tokens(device_, &x, &router, &ids_view, &weights_view, nullptr), MARLIN_OK)
      << marlin_last_error();
  marlin_experts_problem problem = MARLIN_EXPERTS_PROBLEM_INIT;
  problem.tokens = kTokens;
  problem.top_k = 2;
  problem.x_type = problem.out_type = MARLIN_F32;
  marlin_experts_plan* plan = nullptr;
  ASSERT_EQ(marlin_plan_experts(device_, set, &problem, &plan), MARLIN_OK) << marlin_last_error();
  EXPECT_GT(marlin_experts_plan_workspace_bytes(plan), 0);
  ASSERT_EQ(marlin_experts_plan_run(plan, &x, &ids_view, &weights_view, &out_view, nullptr),
            MARLIN_OK)
      << marlin_last_error();
  EXPECT_NE(out[0], 0.0F);
  ASSERT_EQ(marlin_moe_forward(device_, &x, &router, set, &both_view, &problem, nullptr), MARLIN_OK)
      << marlin_last_error();
  EXPECT_EQ(out, both);
  ExpectForwardInWorkspace(x, router, set, problem, both);
  ids[1] = 3;
  EXPECT_EQ(marlin_experts_plan_run(plan, &x, &ids_view, &weights_view, &out_view, nullptr),
            MARLIN_INVALID_ARGUMENT);
  EXPECT_STREQ(marlin_last_error(), "ids: token 0, selection 1: 3 is not in 0..2");
  EXPECT_EQ(marlin_experts_plan_run(plan, &x, nullptr, &weights_view, &out_view, nullptr),
            MARLIN_INVALID_ARGUMENT);
  EXPECT_STREQ(marlin_last_error(), "ids: NULL");
  router.scoring = 9;
  EXPECT_EQ(marlin_route_tokens(device_, &x, &router, &ids_view, &weights_view, nullptr),
            MARLIN_INVALID_ARGUMENT);
  problem.activation = -1;
  marlin_experts_plan* none = nullptr;
  EXPECT_EQ(marlin_plan_experts(device_, set, &problem, &none), MARLIN_INVALID_ARGUMENT);
  EXPECT_EQ(none, nullptr);
  marlin_experts* empty = nullptr;
  EXPECT_EQ(marlin_experts_create(device_, nullptr, 0, nullptr, nullptr, &empty),
            MARLIN_INVALID_ARGUMENT);
  // Handles may be destroyed in any order.
  marlin_experts_destroy(set);
  marlin_prepared_destroy(back);
  marlin_weights_destroy(back_weights);
  marlin_prepared_destroy(router_ready);
  marlin_weights_destroy(router_weights);
  marlin_experts_plan_destroy(plan);
}

TEST_F(MarlinC, EachThreadHasItsOwnError) {
  EXPECT_NE(marlin_plan_run(nullptr, nullptr, nullptr, nullptr), MARLIN_OK);
  const std::string here = marlin_last_error();
  std::thread([] { EXPECT_STREQ(marlin_last_error(), ""); }).join();
  EXPECT_EQ(marlin_last_error(), here);
}

TEST(Version, IsThatOfTheHeaders) {
  EXPECT_STREQ(marlin_version(), marlin::Version());
  EXPECT_EQ(std::string(marlin::Version()), std::to_string(MARLIN_VERSION_MAJOR) + "." +
                                                std::to_string(MARLIN_VERSION_MINOR) + "." +
                                                std::to_string(MARLIN_VERSION_PATCH));
  static_assert(MARLIN_VERSION >= MARLIN_MAKE_VERSION(0, 1, 0));
}

}  // namespace
