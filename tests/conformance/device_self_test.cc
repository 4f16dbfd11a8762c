// The path through device memory, on a fake GPU: correct kernels pass, and out-of-bounds or stray
// writes by a kernel are detected.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backends/cpu/gemm/kernel_table.h"
#include "cases.h"
#include "remote_device.h"
#include "runner.h"

namespace marlin::conformance {
namespace {

constexpr std::string_view kDecode = "marlin_dequantize_remote";

Machine RemoteMachine(RemoteFault fault) {
  Result<std::unique_ptr<Backend>> cpu = cpu::OpenCpu({.threads = 1});
  auto remote = std::make_unique<RemoteDevice>(std::move(*cpu), fault);
  const Isa level = remote->Properties().level;
  const auto device = Internals::Make<Device>(std::make_shared<Device::Impl>(std::move(remote)));
  return Machine::Of("remote", level, device, cpu::CpuKernels());
}

CaseResult RunOn(const Machine& machine, std::string_view row, const Case& c) {
  const auto problem = MakeProblem(c);
  if (!problem.ok()) return {Outcome::kFailed, problem.status().message(), 0};
  return RunCase(machine, *machine.Find("remote", row), **problem);
}

Case EveryOperand(Check check) {
  Case c;
  c.check = check;
  c.format = Format::kU4;
  c.zero = ZeroKind::kInteger;
  c.m = 18;
  c.n = 72;
  c.k = 130;
  c.group_size = 32;
  c.bias = true;
  c.row_weight = true;
  c.padded = true;
  c.misaligned = true;
  c.a_type = DType::kBf16;
  return c;
}

Case Chain() {
  Case c = EveryOperand(Check::kChain);
  c.n = c.k;
  c.c_type = c.a_type;
  c.data = DataClass::kGaussian;
  return c;
}

TEST(RemoteDevice, CorrectKernelsPass) {
  const Machine machine = RemoteMachine(RemoteFault::kNone);
  for (Check check : {Check::kGemm, Check::kBatchInvariant, Check::kRowPermutation, Check::kRepeat,
                      Check::kStreams, Check::kPeriodic}) {
    const CaseResult result = RunOn(machine, kPlanned, EveryOperand(check));
    EXPECT_EQ(result.outcome, Outcome::kPassed) << result.message;
  }
  const CaseResult chain = RunOn(machine, kPlanned, Chain());
  EXPECT_EQ(chain.outcome, Outcome::kPassed) << chain.message;
  Case decode = EveryOperand(Check::kDequantize);
  decode.bias = decode.row_weight = false;
  for (Check check : {Check::kDequantize, Check::kRepeat}) {
    decode.check = check;
    const CaseResult result = RunOn(machine, kDecode, decode);
    EXPECT_EQ(result.outcome, Outcome::kPassed) << result.message;
  }
}

TEST(RemoteDevice, EveryFaultIsNoticed) {
  constexpr std::pair<RemoteFault, const char*> kFaults[] = {
      {RemoteFault::kWritesBeforeOutput, "output: wrote outside of it"},
      {RemoteFault::kWritesBehindOutput, "output: wrote outside of it"},
      {RemoteFault::kWritesBetweenRows, "output: wrote between rows 0 and 1"},
      {RemoteFault::kWritesBehindWorkspace, "workspace: wrote outside of it"},
      {RemoteFault::kWritesActivations, "inputs: a guard or an operand was written to"},
      {RemoteFault::kWritesBias, "inputs: a guard or an operand was written to"},
      {RemoteFault::kWritesRowWeights, "inputs: a guard or an operand was written to"},
      {RemoteFault::kForgetsLastOutput, "[17, 71]: got -nan"},
      {RemoteFault::kFailsLater, "device lost: a kernel failed"},
  };
  for (const auto& [fault, message] : kFaults) {
    // ASan ends the program itself, since there is no guard behind the data.
    const bool behind =
        fault == RemoteFault::kWritesBehindOutput || fault == RemoteFault::kWritesBehindWorkspace;
    if (behind && GuardedBuffer::kAsan) continue;
    const CaseResult result = RunOn(RemoteMachine(fault), kPlanned, EveryOperand(Check::kGemm));
    EXPECT_EQ(result.outcome, Outcome::kFailed) << message;
    EXPECT_EQ(result.message.substr(0, std::string(message).size()), message);
  }
}

TEST(RemoteDevice, OtherBitsInOneRunAreNoticed) {
  const char* const differs = "run 9 differs from the first";
  for (const auto& [check, row, message] :
       {std::tuple(Check::kRepeat, kPlanned, differs), std::tuple(Check::kRepeat, kDecode, differs),
        std::tuple(Check::kStreams, kPlanned, "stream 1 of 16 differs from one alone")}) {
    const CaseResult result =
        RunOn(RemoteMachine(RemoteFault::kOtherBitsFromRun9), row, EveryOperand(check));
    EXPECT_EQ(result.message, message);
  }
  const CaseResult chain = RunOn(RemoteMachine(RemoteFault::kOtherBitsFromRun9), kPlanned, Chain());
  EXPECT_EQ(chain.message, "round 2 differs from one product at a time");
}

// Runs a sample of the GPU problems on CPU kernels, which validates the problems themselves.
TEST(RemoteDevice, ProblemsOfGpusPassOnCpuKernels) {
  constexpr size_t kStep = 16;
  const Machine machine = RemoteMachine(RemoteFault::kNone);
  const std::vector<Case> problems = SelectProblems("cuda", {}, SelectionSize());
  ASSERT_GT(problems.size(), 2500u);
  for (size_t i = 0; i < problems.size(); i += kStep) {
    const bool small = problems[i].m * problems[i].n * problems[i].k < 1'000'000;
    std::string_view row = small && i / kStep % 2 == 0 ? "marlin_gemm_scalar" : kPlanned;
    if (problems[i].check == Check::kDequantize) row = kDecode;
    const CaseResult result = RunOn(machine, row, problems[i]);
    EXPECT_TRUE(result.outcome == Outcome::kPassed || result.outcome == Outcome::kMistrusted)
        << CaseName(problems[i]) << ": " << result.message;
  }
}

Case Repeating() {
  Case c = EveryOperand(Check::kPeriodic);
  c.bias = c.row_weight = false;
  c.m = 100;
  c.n = 600;
  c.k = 1100;
  return c;
}

TEST(RemoteDevice, RepeatedOutputsAreJudgedInFull) {
  const Machine machine = RemoteMachine(RemoteFault::kNone);
  for (std::string_view row : {kPlanned, kDecode}) {
    const CaseResult result = RunOn(machine, row, Repeating());
    EXPECT_EQ(result.outcome, Outcome::kPassed) << result.message;
  }
  const CaseResult forgets =
      RunOn(RemoteMachine(RemoteFault::kForgetsLastOutput), kPlanned, Repeating());
  EXPECT_EQ(forgets.message.substr(0, 27), "[99, 599]: got -nan, but [2") << forgets.message;
}

}  // namespace
}  // namespace marlin::conformance
