#include "backends/metal/plan/kernel_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "backends/metal/plan/kernel_files.h"
#include "metal_sim/metal_program.h"

namespace marlin::metal::kernel_text_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> Sources() {
  std::vector<std::string> names;
  for (const KernelFile& file : KernelFiles()) {
    const std::filesystem::path path(file.path);
    if (path.extension() == ".metal") names.push_back(path.filename());
  }
  return names;
}

int CountOf(const std::string& part, const std::string& text) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(KernelTextTest, HoldsEveryFileOnce) {
  for (const std::string& source : Sources()) {
    const auto text = KernelText(source);
    ASSERT_TRUE(text.ok()) << text.status().message();
    EXPECT_THAT(*text, Not(HasSubstr("#include \""))) << source;
    EXPECT_EQ(CountOf("struct Parameters {", *text), 1) << source;
    EXPECT_THAT(*text, HasSubstr("#line 1 \"" + PathOfKernelFile(source) + "\"\n"));
  }
}

TEST(KernelTextTest, MakesConstantsLiterals) {
  FunctionConstants constants{};
  for (size_t i = 0; i < constants.size(); ++i) constants[i] = static_cast<int>(i) + 40;
  const auto text = KernelText("gemv.metal", constants);
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_THAT(*text, Not(HasSubstr("[[function_constant(")));
  EXPECT_THAT(*text, HasSubstr("\nconstant constexpr int code_kind = 40;\n"));
  EXPECT_THAT(*text, HasSubstr("\nconstant constexpr int gated = 53;\n"));
  EXPECT_EQ(MARLIN_CONSTANT_GATED, 13);
}

TEST(KernelTextTest, RefusesFilesThatAreNot) {
  EXPECT_THAT(std::string(KernelText("gemm.metal").status().message()),
              HasSubstr("backends/metal/kernels/gemm.metal"));
}

TEST(KernelTextTest, CompilesByItself) {
  const std::filesystem::path path = std::filesystem::path(::testing::TempDir()) / "whole.metal";
  for (const std::string& source : Sources()) {
    const auto text = KernelText(source, {});
    ASSERT_TRUE(text.ok()) << text.status().message();
    std::ofstream(path) << *text;
    const auto program = metal_sim::MetalProgram::Compile(path, {});
    if (program.status().code() == metal_sim::Code::kUnsupported)
      GTEST_SKIP() << program.status().message();
    EXPECT_TRUE(program.ok()) << source << ": " << program.status().message();
  }
}

}  // namespace
}  // namespace marlin::metal::kernel_text_test
