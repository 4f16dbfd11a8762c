// Fixture for tests that write, compile and run Metal sources. Skipped without a recent clang.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "metal_sim/launch.h"
#include "metal_sim/metal_program.h"
#include "metal_sim/type_check.h"

namespace metal_sim {

class MetalProgramTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::filesystem::path folder =
        std::filesystem::path(::testing::TempDir()) / ("metal_program." + std::to_string(getpid()));
    std::filesystem::create_directories(folder);
    path_ = folder / "sample.metal";
    ASSERT_NO_FATAL_FAILURE(Write("kernel void nothing() {}"));
    static const Status compiled = MetalProgram::Compile(path_, {}).status();
    if (compiled.code() == Code::kUnsupported) GTEST_SKIP() << compiled.message();
  }

  void TearDown() override { std::filesystem::remove_all(path_.parent_path()); }

  void Write(std::string_view text) {
    std::ofstream file(path_);
    file << "#include <metal_stdlib>\nusing namespace metal;\n" << text;
    ASSERT_TRUE(file.good());
  }

  /// Compiles a source, whose text begins in line 3, and expects it to pass the type check.
  void Compile(std::string_view text, const CompileOptions& options = {}) {
    ASSERT_NO_FATAL_FAILURE(Write(text));
    auto compiled = MetalProgram::Compile(path_, options);
    ASSERT_TRUE(compiled.ok()) << compiled.status().message();
    program_ = std::move(*compiled);
    EXPECT_THAT(Findings(options), ::testing::IsEmpty());
  }

  /// The findings of the type check.
  std::vector<std::string> Findings(const CompileOptions& options = {}) {
    auto findings = TypeCheck(path_, options);
    EXPECT_TRUE(findings.ok()) << findings.status().message();
    return findings.ok() ? *std::move(findings) : std::vector<std::string>();
  }

  template <typename T>
  static void Bind(int index, std::vector<T>* data, Launch* launch) {
    launch->buffers[index] = {data->data(), static_cast<int64_t>(data->size() * sizeof(T)), false,
                              true, "buffer(" + std::to_string(index) + ")"};
  }

  Report Run(const std::string& kernel, Launch launch, uint64_t seed = 0) {
    if (program_ == nullptr) return {};
    launch.program_ranges = program_->ranges();
    const auto found = program_->Find(kernel);
    EXPECT_TRUE(found.ok()) << found.status().message();
    if (!found.ok()) return {};
    SimulationOptions options;
    options.seed = seed;
    options.preemption = seed == 0 ? 0 : 0.05;
    auto report = Simulate(**found, launch, options);
    EXPECT_TRUE(report.ok()) << report.status().message();
    return report.ok() ? std::move(*report) : Report();
  }

  /// Every finding as "race sample.metal:10 sample.metal:10".
  std::vector<std::string> Places(const Report& report) {
    std::vector<std::string> lines;
    for (const Finding& finding : report.findings) {
      const std::vector<std::string> places = program_->Locate({finding.site, finding.other_site});
      lines.push_back(std::string(FindingKindName(finding.kind)) + " " + places[0] + " " +
                      places[1]);
    }
    return lines;
  }

  std::filesystem::path path_;
  std::unique_ptr<MetalProgram> program_;
};

inline Launch OneThreadgroup(uint32_t threads) {
  Launch launch;
  launch.threads_per_threadgroup = {threads, 1, 1};
  return launch;
}

}  // namespace metal_sim
