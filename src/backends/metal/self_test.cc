#include "backends/metal/self_test.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/macros.h"

namespace marlin::metal {
namespace {

using kernels::kLanes;

constexpr int kSide = 8;
constexpr int kElements = kSide * kSide;
constexpr int kAddress = 2 * kElements + 4;
constexpr int kInputs = kAddress + 2;
constexpr int kShuffles = 3 * kElements + 4;
constexpr int kOutputs = kShuffles + kLanes + 1;
/// The number that a kernel finds through an address.
constexpr float kPointedTo = 13.5F;

/// 1024 + kZero rounds to 1024 in fp32: a reassociated sum, kMinuend - (1024 + kZero), loses kZero.
constexpr float kMinuend = 1025.0F;
constexpr float kZero = 0x1p-15F;
constexpr float kInOrder = (kMinuend - 1024.0F) - kZero;

/// Every element of A is distinct and encodes its position.
float ElementOfA(int row, int column) { return static_cast<float>(row * kSide + column + 1); }
float ElementOfB(int row, int column) { return static_cast<float>((row * 5 + column * 3) % 7 - 3); }

/// Small integers: exact in any order.
float ElementOfProduct(int row, int column) {
  float sum = 0;
  for (int k = 0; k < kSide; ++k) sum += ElementOfA(row, k) * ElementOfB(k, column);
  return sum;
}

void FillInput(float* input) {
  for (int row = 0; row < kSide; ++row) {
    for (int column = 0; column < kSide; ++column) {
      input[row * kSide + column] = ElementOfA(row, column);
      input[kElements + row * kSide + column] = ElementOfB(row, column);
    }
  }
  input[2 * kElements] = std::numeric_limits<float>::quiet_NaN();
  input[2 * kElements + 1] = kMinuend;
  input[2 * kElements + 2] = kZero;
  input[2 * kElements + 3] = 0x1p-130F;
}

/// Each lane holds its number plus 1.
bool AreRightShuffles(const float* out) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (out[lane] != static_cast<float>(kLanes - lane)) return false;
    sum += static_cast<float>(lane + 1);
  }
  return out[kLanes] == sum;
}

SelfTest Judge(const float* out, bool has_address) {
  SelfTest result;
  result.known_fragments = true;
  result.right_products = true;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int e = 0; e < 2; ++e) {
      const int row = kernels::FragmentRow(lane);
      const int column = kernels::FragmentColumn(lane) + e;
      const int at = 2 * lane + e;
      if (out[at] != ElementOfA(row, column)) result.known_fragments = false;
      if (out[kElements + at] != ElementOfProduct(row, column)) result.known_fragments = false;
    }
  }
  for (int i = 0; i < kElements; ++i) {
    if (out[2 * kElements + i] != ElementOfProduct(i / kSide, i % kSide)) {
      result.right_products = false;
    }
  }
  const float* const answers = out + 3 * kElements;
  result.keeps_nans = answers[0] == 1;
  result.keeps_order = answers[1] == kInOrder;
  result.keeps_subnormals = answers[2] == 0x1p-110F;
  result.follows_addresses = !has_address || answers[3] == kPointedTo;
  result.right_shuffles = AreRightShuffles(out + kShuffles);
  return result;
}

}  // namespace

std::string SelfTest::Wrong() const {
  if (!right_products) return "simdgroup_matrix: a product of two 8x8 matrices is wrong";
  if (!right_shuffles) return "simd_shuffle or simd_sum: a lane gets another lane's number";
  if (!follows_addresses) return "a kernel does not find a number through an address in a buffer";
  if (!keeps_nans) return "a NaN equals itself: the kernels were compiled with fast math";
  if (!keeps_order) return "a sum was reassociated: the kernels were compiled with fast math";
  return {};
}

Result<SelfTest> RunSelfTest(Driver& driver) {
  MARLIN_ASSIGN_OR_RETURN(const DriverMemory<float> memory,
                          AllocateMemory<float>(driver, kInputs + kOutputs));
  float* const input = memory.get();
  float* const out = input + kInputs;
  std::fill_n(input, kInputs + kOutputs, 0.0F);
  FillInput(input);
  DriverMemory<float> pointed_to;
  const bool has_address = driver.AddressOf(input) != 0;
  if (has_address) {
    MARLIN_ASSIGN_OR_RETURN(pointed_to, AllocateMemory<float>(driver, 1));
    pointed_to[0] = kPointedTo;
    const uint64_t address = driver.AddressOf(pointed_to.get());
    std::memcpy(input + kAddress, &address, sizeof(address));
  }

  KernelLaunch launch;
  launch.source = "self_test.metal";
  launch.function = "marlin_self_test";
  launch.parameters.k = 1;
  if (has_address) {
    const MemoryRange range{pointed_to.get(), int64_t{sizeof(float)}};
    launch.reached = driver.Reach({&range, 1});
  }
  launch.threads = kLanes;
  launch.buffers = {{MARLIN_BUFFER_INPUT, input, kInputs * int64_t{sizeof(float)}},
                    {MARLIN_BUFFER_OUTPUT, out, kOutputs * int64_t{sizeof(float)}, true, false}};
  MARLIN_RETURN_IF_ERROR(driver.Run({&launch, 1}, nullptr));
  MARLIN_RETURN_IF_ERROR(driver.Synchronize(nullptr));
  return Judge(out, has_address);
}

}  // namespace marlin::metal
