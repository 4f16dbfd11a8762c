// Findings of `doctor` on machines that are made up: with and without GPUs, drivers, limits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "backends/cuda/plan/device_refusal.h"
#include "cli/doctor/finding.h"
#include "cli/doctor/machine_findings.h"
#include "cli/doctor/nvidia_findings.h"
#include "cli/doctor/settings_findings.h"

namespace marlin::cli::doctor_findings_test {
namespace {

using State = Finding::State;
using ::testing::HasSubstr;
using ::testing::Not;

DeviceInfo H200() {
  DeviceInfo info;
  info.name = "cuda:0";
  info.backend = "cuda";
  info.model = "NVIDIA H200";
  info.features = {"sm_90", "code of 9.0", "132 multiprocessors", "139 GiB"};
  return info;
}

/// A build with CUDA on a machine whose driver is newer.
NvidiaFacts WithDriver() {
  NvidiaFacts facts;
  facts.build = {"8.0, 9.0a", 12090, 13000};
  facts.driver = "580.95.05";
  facts.on_bus = 1;
  facts.none = "no CUDA device (no CUDA-capable device is detected)";
  return facts;
}

Finding Only(const NvidiaFacts& facts) {
  const std::vector<Finding> findings = NvidiaFindings(facts);
  EXPECT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings.front().group, "GPUs");
  return findings.front();
}

TEST(NvidiaFindings, OfAWorkingGpu) {
  NvidiaFacts facts = WithDriver();
  facts.devices = {{H200(), int64_t{140} * 1000 * 1000 * 1000}};
  const Finding finding = Only(facts);
  EXPECT_EQ(finding.name, "cuda:0");
  EXPECT_EQ(finding.state, State::kOk);
  EXPECT_EQ(finding.found,
            "NVIDIA H200: sm_90, code of 9.0, 132 multiprocessors, 139 GiB, 140.00 GB free; driver "
            "580.95.05, for CUDA up to 13.0; this build: CUDA 12.9, code for 8.0, 9.0a");
  EXPECT_EQ(finding.advice, "");
}

TEST(NvidiaFindings, OfAFullGpu) {
  NvidiaFacts facts = WithDriver();
  facts.devices = {{H200(), 1000}};
  EXPECT_EQ(Only(facts).state, State::kWarning);
  EXPECT_THAT(Only(facts).advice, HasSubstr("nvidia-smi"));
}

TEST(NvidiaFindings, OfOneThatRunsAndOneThatDoesNot) {
  NvidiaFacts facts = WithDriver();
  facts.devices = {{H200(), int64_t{1} << 40}};
  facts.refused = {Status(Code::kUnsupported,
                          "cuda:1: Tesla T4 has compute capability 7.5; the kernels need 8.0 "
                          "(Ampere) or later"),
                   Status(Code::kDeviceLost, "cuda:2: cudaMalloc: unspecified launch failure"),
                   Status(Code::kMalformedFile, "/x/tuning.txt: line 1: no tuning table")};
  const std::vector<Finding> findings = NvidiaFindings(facts);
  ASSERT_EQ(findings.size(), 4U);
  EXPECT_EQ(findings[0].state, State::kOk);
  EXPECT_EQ(findings[1].name, "cuda:1");
  EXPECT_EQ(findings[1].state, State::kWarning);
  EXPECT_EQ(findings[1].found,
            "Tesla T4 has compute capability 7.5; the kernels need 8.0 (Ampere) or later");
  EXPECT_THAT(findings[2].advice, HasSubstr("reset"));
  EXPECT_EQ(findings[3].name, "cuda");
  EXPECT_EQ(findings[3].found, "/x/tuning.txt: line 1: no tuning table");
}

TEST(NvidiaFindings, WithoutAGpu) {
  NvidiaFacts facts;
  EXPECT_EQ(Only(facts).state, State::kMissing);
  EXPECT_EQ(Only(facts).found, "no NVIDIA GPU here; this build has no code for one");
  EXPECT_EQ(Only(facts).advice, "");
  facts.build = {"8.0", 12090, 0};
  facts.none = "no CUDA device (no driver: libcuda.so.1 does not load)";
  EXPECT_EQ(Only(facts).state, State::kMissing);
  EXPECT_EQ(Only(facts).found,
            "no NVIDIA GPU and no driver here; this build: CUDA 12.9, code for 8.0");
  facts.visible = "0";  // It hides nothing.
  EXPECT_EQ(Only(facts).state, State::kMissing);
}

TEST(NvidiaFindings, OfAGpuAndABuildWithoutCuda) {
  NvidiaFacts facts;
  facts.on_bus = 2;
  EXPECT_EQ(Only(facts).state, State::kWarning);
  EXPECT_EQ(Only(facts).found,
            "this machine has 2 NVIDIA GPUs, and this build has no code for them");
  EXPECT_THAT(Only(facts).advice, HasSubstr("wheel with CUDA"));
  facts.driver = "580.95.05";
  EXPECT_THAT(Only(facts).found, HasSubstr("2 NVIDIA GPUs, driver 580.95.05, and"));
  facts.on_bus = 0;
  EXPECT_THAT(Only(facts).found, HasSubstr("has NVIDIA's driver, and"));
}

TEST(NvidiaFindings, SayWhyADeviceIsNotThere) {
  NvidiaFacts facts = WithDriver();
  EXPECT_EQ(Only(facts).state, State::kWarning);
  EXPECT_THAT(Only(facts).found, HasSubstr("no CUDA-capable device is detected"));
  EXPECT_THAT(Only(facts).advice, HasSubstr("--gpus all"));
  facts.visible = "";
  EXPECT_THAT(Only(facts).advice, HasSubstr("CUDA_VISIBLE_DEVICES=''"));
  // CUDA 12.9 runs on drivers for 12.2, on those for 11.8 it does not.
  facts.build.driver = 12020;
  EXPECT_THAT(Only(facts).advice, HasSubstr("CUDA_VISIBLE_DEVICES=''"));
  facts.build.driver = 11080;
  EXPECT_THAT(Only(facts).advice, HasSubstr("update NVIDIA's driver to one for CUDA 12.0"));
}

TEST(NvidiaFindings, SayThatTheDriversLibraryIsNotThere) {
  NvidiaFacts facts = WithDriver();
  facts.build.driver = 0;
  facts.visible = "0";
  EXPECT_EQ(Only(facts).state, State::kWarning);
  EXPECT_THAT(Only(facts).advice, HasSubstr("--gpus all"));
  facts.driver.clear();
  EXPECT_THAT(Only(facts).advice, HasSubstr("install NVIDIA's driver"));
  // Windows shows Linux no GPU on the bus and no kernel module.
  facts.on_bus = 0;
  facts.build.driver = 13000;
  EXPECT_EQ(Only(facts).state, State::kWarning);
}

TEST(NvidiaFindings, OfADriverThatCannotUnpackTheKernels) {
  cuda::DeviceSupport device = {"cuda:0", "NVIDIA A100", 80, 0, "8.0", "no kernel image"};
  NvidiaFacts facts = WithDriver();
  facts.build.driver = 12020;
  facts.refused = {Status(Code::kUnsupported, cuda::RefusalOf(device))};
  EXPECT_THAT(Only(facts).advice, HasSubstr("update NVIDIA's driver to one for CUDA 12.4"));
  facts.build.driver = 12040;
  EXPECT_THAT(Only(facts).advice, HasSubstr("do what the reason says"));
  device.lacks = cuda::LacksCode::kNeedsDriver;
  facts.refused = {Status(Code::kUnsupported, cuda::RefusalOf(device))};
  EXPECT_THAT(Only(facts).advice, HasSubstr("update NVIDIA's driver to one for CUDA 12.9"));
  device.capability = 75;
  facts.refused = {Status(Code::kUnsupported, cuda::RefusalOf(device))};
  EXPECT_THAT(Only(facts).advice, HasSubstr("no build runs it"));
}

TEST(NvidiaFindings, NameFormatsWithoutKernels) {
  NvidiaFacts facts = WithDriver();
  facts.devices = {{H200(), int64_t{1} << 40}};
  facts.build.lacking = {"u4", "nf4"};
  EXPECT_EQ(Only(facts).state, State::kWarning);
  EXPECT_THAT(Only(facts).found, HasSubstr("code for 8.0, 9.0a, no kernels for u4, nf4"));
  EXPECT_THAT(Only(facts).advice, HasSubstr("MARLIN_CUDA_KINDS"));
}

TEST(FindNvidia, ReadsWhatLinuxSays) {
  std::string root = ::testing::TempDir() + "find-nvidia-XXXXXX";
  ASSERT_NE(mkdtemp(root.data()), nullptr);
  const auto write = [&](const std::string& path, const std::string& text) {
    const std::filesystem::path file = root + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  };
  struct Slot {
    std::string slot, vendor, kind;
  };
  for (const auto& [slot, vendor, kind] :
       {Slot{"0", "0x10de", "0x030200"}, Slot{"1", "0x10de", "0x030000"},
        Slot{"2", "0x10de", "0x040300"},  // Its sound.
        Slot{"3", "0x8086", "0x030000"}}) {
    write("/sys/bus/pci/devices/" + slot + "/vendor", vendor + "\n");
    write("/sys/bus/pci/devices/" + slot + "/class", kind + "\n");
  }
  write("/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC\n");
  const NvidiaFacts facts = FindNvidia(root);
  EXPECT_EQ(facts.on_bus, 2);
  EXPECT_EQ(facts.driver, "580.95.05");
  std::filesystem::remove_all(root);
}

MachineFacts Avx512() {
  MachineFacts facts;
  facts.features.avx2 = facts.features.avx512 = true;
  facts.features.model = "AMD EPYC";
  facts.threads = facts.processors = 8;
  facts.memory = int64_t{64} << 30;
  facts.free = int64_t{32} << 30;
  return facts;
}

TEST(MachineFindings, OfAMachineWithoutLimits) {
  const std::vector<Finding> findings = MachineFindings(Avx512());
  ASSERT_EQ(findings.size(), 3U);
  EXPECT_EQ(findings[0].found, "AMD EPYC (avx2, avx512); kernels for avx512");
  EXPECT_EQ(findings[1].found, "8 of 8 processors");
  EXPECT_EQ(findings[2].found, "34.36 GB free of 68.72 GB");
  for (const Finding& finding : findings) {
    EXPECT_EQ(finding.state, State::kOk);
    EXPECT_EQ(finding.advice, "");
  }
}

TEST(MachineFindings, OfAForcedInstructionSet) {
  MachineFacts facts = Avx512();
  const auto processor = [&facts](const char* value) {
    facts.forced = {"MARLIN_CPU", value};
    return MachineFindings(facts)[0];
  };
  EXPECT_EQ(processor("avx2").state, State::kWarning);
  EXPECT_THAT(processor("avx2").found, HasSubstr("; MARLIN_CPU forces avx2"));
  EXPECT_EQ(processor("avx2").advice, "unset MARLIN_CPU for avx512");
  EXPECT_EQ(processor("avx512").state, State::kOk);
  EXPECT_EQ(processor("").state, State::kOk);
  EXPECT_EQ(processor("amx").state, State::kBroken);
  EXPECT_EQ(processor("avx3").state, State::kBroken);
  EXPECT_THAT(processor("avx3").found, HasSubstr("MARLIN_CPU"));
}

TEST(MachineFindings, OfLimits) {
  MachineFacts facts = Avx512();
  facts.features = {};
  facts.quota = 2.5;
  facts.address_space = int64_t{4} << 30;
  const std::vector<Finding> findings = MachineFindings(facts);
  for (const Finding& finding : findings) EXPECT_EQ(finding.state, State::kWarning);
  EXPECT_THAT(findings[1].found, HasSubstr("with the time of 2.5"));
  EXPECT_EQ(findings[1].advice, "give commands --threads 2");
  EXPECT_THAT(findings[2].found, HasSubstr("ulimit -v allows 4.29 GB"));
  facts.quota = 0.5;
  facts.address_space = {};
  facts.free = 1000;
  EXPECT_EQ(MachineFindings(facts)[1].advice, "give commands --threads 1");
  EXPECT_EQ(MachineFindings(facts)[2].state, State::kWarning);
}

TEST(VariableFindings, KnowEveryNameAndNoOther) {
  const std::vector<EnvironmentVariable> set = {{"METAL_MARLIN_DEVICE", "cpu"},
                                                {"MARLIN_DEVICE", "cuda"},
                                                {"MARLIN_JOBS", "2"},
                                                {"METAL_MARLIN_DEVIEC", "cuda"},
                                                {"METAL_MARLIN_API_KEY", "topsecret"},
                                                {"METAL_MARLIN_APIKEY", "topsecret"},
                                                {"MARLIN_API_KEY", "topsecret"},
                                                {"MARLIN_TUNING", ""},
                                                {"MARLIN_QWERTY_UIOP", "x"}};
  const std::vector<Finding> findings = VariableFindings(set);
  ASSERT_EQ(findings.size(), set.size());
  EXPECT_EQ(findings[0].found, "cpu");
  EXPECT_EQ(findings[0].state, State::kOk);
  EXPECT_EQ(findings[1].state, State::kWarning);
  EXPECT_EQ(findings[1].found, "cuda; METAL_MARLIN_DEVICE is set, too, and counts");
  EXPECT_EQ(findings[2].state, State::kOk);
  EXPECT_EQ(findings[3].state, State::kWarning);
  EXPECT_EQ(findings[3].found, "nothing reads this variable; did you mean 'METAL_MARLIN_DEVICE'?");
  EXPECT_EQ(findings[4].found, "set");
  EXPECT_THAT(findings[5].found, HasSubstr("'METAL_MARLIN_API_KEY'"));
  EXPECT_EQ(findings[7].found, "set to nothing");
  EXPECT_EQ(findings[8].found, "nothing reads this variable");
  for (const Finding& finding : findings) {
    EXPECT_THAT(finding.found + finding.advice, Not(HasSubstr("topsecret")));
  }
  ASSERT_EQ(VariableFindings({}).size(), 1U);
}

TEST(Findings, AreATableAndADocument) {
  const std::vector<Finding> findings = {
      {"A", "first", State::kOk, std::string(60, 'x') + " " + std::string(60, 'y'), "do it"},
      {"A", "b", State::kWarning, "w"},
      {"B", "c", State::kMissing, "m"}};
  EXPECT_EQ(FindingsText(findings),
            "A\n"
            "  ok       first  " +
                std::string(60, 'x') + "\n" + std::string(18, ' ') + std::string(60, 'y') + "\n" +
                std::string(18, ' ') +
                "-> do it\n"
                "  warning  b      w\n"
                "\nB\n"
                "  missing  c      m\n"
                "\n1 ok, 1 warning, 1 missing\n");
  nlohmann::ordered_json document = FindingsDocument(findings);
  EXPECT_EQ(document["ok"], true);
  EXPECT_EQ(document["findings"][1]["state"], "warning");
  const auto parsed = ParseFindings(document["findings"].dump());
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(FindingsDocument(*parsed), document);
  document["findings"][0]["state"] = "broken";
  EXPECT_EQ(FindingsDocument(*ParseFindings(document["findings"].dump()))["ok"], false);
}

TEST(Findings, OfAnotherProgramAreChecked) {
  for (const char* json : {"", "{}", "[1]", R"([{"name": "a", "state": "fine"}])",
                           R"([{"state": "ok"}])", R"([{"name": 1, "state": "ok"}])"}) {
    EXPECT_EQ(ParseFindings(json).status().code(), Code::kInternal) << json;
  }
}

}  // namespace
}  // namespace marlin::cli::doctor_findings_test
