// Tuning tables as text, and look-ups in them.
#include "plan/gemm/tuning_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

namespace marlin::tuning_table_test {
namespace {

using ::testing::HasSubstr;

constexpr const char* kText =
    "# a comment\n"
    "metal-marlin tuning 2\n"
    "\n"
    "device Some GPU 9000\r\n"
    "measured 2026-11-21 abc1234\n"
    "fp4_e2m1 128 fp16 none bf16 bf16 plain 4096 4096 16 marlin_gemm_wgmma@32x4 8590\n"
    "\tfp4_e2m1   128 fp16 none bf16 bf16 plain 4096 4096 1 marlin_gemv_mma 5280  \n"
    "fp4_e2m1 32 fp16 none f16 f16 gated 4096 4096 64 marlin_gemm_wgmma@64x1 9000\n"
    "device Another\n"
    "bf16 0 fp16 none f32 f32 plain 8 16 1 unheard_of@1x2 1\n";

GemmDesc Problem(int64_t m) {
  GemmDesc desc;
  desc.m = m;
  desc.n = desc.k = 4096;
  desc.group_size = 128;
  desc.a_type = desc.c_type = DType::kBf16;
  return desc;
}

std::vector<TuningSection> Parsed(const std::string& text) {
  Result<std::vector<TuningSection>> sections = ParseTuning(text, "t.txt");
  EXPECT_TRUE(sections.ok()) << sections.status().message();
  return sections.ok() ? *sections : std::vector<TuningSection>();
}

TEST(ParseTuning, ReadsWhatIsWritten) {
  const std::vector<TuningSection> sections = Parsed(kText);
  ASSERT_EQ(sections.size(), 2U);
  EXPECT_EQ(sections[0].device, "Some GPU 9000");
  EXPECT_EQ(sections[0].date, "2026-11-21");
  EXPECT_EQ(sections[0].commit, "abc1234");
  ASSERT_EQ(sections[0].entries.size(), 3U);
  const TuningEntry& first = sections[0].entries[0];
  EXPECT_EQ(first.kernel, "marlin_gemm_wgmma");
  EXPECT_EQ(first.variant, (KernelVariant{32, 4}));
  EXPECT_EQ(first.m, 16);
  EXPECT_EQ(first.nanoseconds, 8590);
  EXPECT_TRUE(sections[0].entries[1].variant.automatic());
  EXPECT_TRUE(sections[0].entries[2].key.gated);
  EXPECT_EQ(sections[1].date, "");
  const std::string again = FormatTuning(sections);
  EXPECT_EQ(FormatTuning(Parsed(again)), again);
}

TEST(ParseTuning, ReadsVersion1AsItWasMeasured) {
  const std::vector<TuningSection> sections = Parsed(
      "metal-marlin tuning 1\ndevice d\nfp4_e2m1 128 f16 plain 64 64 1 k 5\n"
      "u4 128 bf16 plain 64 64 1 k 5\nbf16 0 bf16 plain 64 64 1 k 5\n");
  EXPECT_EQ(FormatTuning(sections),
            FormatTuning(Parsed("metal-marlin tuning 2\ndevice d\n"
                                "fp4_e2m1 128 fp16 none f16 f16 plain 64 64 1 k 5\n"
                                "u4 128 fp16 zeros bf16 bf16 plain 64 64 1 k 5\n"
                                "bf16 0 fp16 none bf16 bf16 plain 64 64 1 k 5\n")));
}

TEST(ParseTuning, NamesTheFileAndTheLine) {
  const std::string head = "metal-marlin tuning 2\ndevice d\n";
  const std::string good = "fp4_e2m1 128 fp16 none bf16 bf16 plain 64 64 1 k 5\n";
  const std::pair<std::string, const char*> cases[] = {
      {"", "line 0: expected 'metal-marlin tuning 2', got ''"},
      {"{\"version\": 1}", "line 1: expected 'metal-marlin tuning 2'"},
      {"metal-marlin tuning 3\n", "version '3', and this library reads 1 and 2"},
      {"metal-marlin tuning 2\nfp4_e2m1", "line 2: expected a device"},
      {"metal-marlin tuning 2\ndevice\n", "line 2: expected a device"},
      {head + "measured a b c\n", "expected a date and a commit"},
      {head + "fp4_e2m1 128 bf16\n", "line 3: expected format, group"},
      {head + good + good, "line 4: the same problem twice"},
      {head + "fp5 128 fp16 none bf16 bf16 plain 64 64 1 k 5\n", "unknown format 'fp5'"},
      {head + "fp4_e2m1 48 fp16 none bf16 bf16 plain 64 64 1 k 5\n",
       "group: expected 0 or a power of two"},
      {head + "fp4_e2m1 256 fp16 none bf16 bf16 plain 64 64 1 k 5\n",
       "group: expected 0 or a power of two"},
      {head + "fp4_e2m1 128 fp16 none bf17 bf16 plain 64 64 1 k 5\n", "unknown activations 'bf17'"},
      {head + "fp4_e2m1 128 fp16 none bf16 x plain 64 64 1 k 5\n", "unknown output 'x'"},
      {head + "fp4_e2m1 128 fp17 none bf16 bf16 plain 64 64 1 k 5\n", "unknown scales 'fp17'"},
      {head + "fp4_e2m1 128 fp16 some bf16 bf16 plain 64 64 1 k 5\n",
       "expected none, zeros or biases, got 'some'"},
      {"metal-marlin tuning 1\ndevice d\nfp4_e2m1 128 fp16 none bf16 bf16 plain 64 64 1 k 5\n",
       "expected format, group, activations, plain or gated"},
      {head + "fp4_e2m1 128 fp16 none bf16 bf16 fancy 64 64 1 k 5\n",
       "expected plain or gated, got 'fancy'"},
      {head + "fp4_e2m1 128 fp16 none bf16 bf16 plain 0 64 1 k 5\n",
       "n: expected a number from 1 up"},
      {head + "fp4_e2m1 128 fp16 none bf16 bf16 plain 64 -4 1 k 5\n",
       "k: expected a number from 1 up"},
      {head + "fp4_e2m1 128 fp16 none bf16 bf16 plain 64 64 1e3 k 5\n",
       "m: expected a number from 1 up"},
      {head + "fp4_e2m1 128 fp16 none bf16 bf16 plain 64 64 1 k 99999999999999999999\n",
       "nanoseconds: "},
      {head + "fp4_e2m1 128 fp16 none bf16 bf16 plain 64 64 1 k@32 5\n",
       "expected NAME or NAME@WIDTHxSPLITS"},
      {head + "fp4_e2m1 128 fp16 none bf16 bf16 plain 64 64 1 k@0x1 5\n",
       "expected NAME or NAME@WIDTHxSPLITS"},
      {head + "fp\x1b[31m4 128 fp16 none bf16 bf16 plain 64 64 1 k 5\n",
       "unknown format 'fp?[31m4'"},
  };
  for (const auto& [text, says] : cases) {
    const Result<std::vector<TuningSection>> sections = ParseTuning(text, "t.txt");
    ASSERT_FALSE(sections.ok()) << text;
    EXPECT_EQ(sections.status().code(), Code::kMalformedFile);
    EXPECT_THAT(sections.status().message(), HasSubstr("t.txt: line "));
    EXPECT_THAT(sections.status().message(), HasSubstr(says));
    EXPECT_EQ(sections.status().message().find('\n'), std::string::npos);
  }
}

TEST(ParseTuning, AnswersAnyBytes) {
  std::mt19937 bits(7);
  const std::string text = kText;
  for (int i = 0; i < 20000; ++i) {
    std::string spoiled = text;
    for (int change = 0; change < 3; ++change) {
      const size_t at = bits() % spoiled.size();
      switch (bits() % 3) {
        case 0:
          spoiled[at] = static_cast<char>(bits());
          break;
        case 1:
          spoiled.erase(at, bits() % 20);
          break;
        default:
          spoiled.insert(at, text.substr(bits() % text.size(), bits() % 20));
      }
    }
    const Result<std::vector<TuningSection>> sections = ParseTuning(spoiled, "t.txt");
    if (!sections.ok()) continue;
    TuningTable table;
    table.Add(*sections, "Some GPU 9000");
    (void)table.Find(Problem(static_cast<int64_t>(bits() % 300)));
    const std::string again = FormatTuning(*sections);
    EXPECT_EQ(FormatTuning(Parsed(again)), again);
  }
}

TEST(TuningTable, FindsTheNextLargerMeasurementBelowTwice) {
  TuningTable table;
  table.Add(Parsed(kText), "Some GPU 9000");
  EXPECT_EQ(table.size(), 3);
  const auto kernel = [&](int64_t m) {
    const TuningEntry* entry = table.Find(Problem(m));
    return entry == nullptr ? std::string() : entry->kernel;
  };
  EXPECT_EQ(kernel(1), "marlin_gemv_mma");
  EXPECT_EQ(kernel(2), "");
  EXPECT_EQ(kernel(8), "");
  EXPECT_EQ(kernel(9), "marlin_gemm_wgmma");
  EXPECT_EQ(kernel(16), "marlin_gemm_wgmma");
  EXPECT_EQ(kernel(17), "");
  EXPECT_EQ(kernel(0), "");
}

TEST(TuningTable, IsOfOneDeviceAndOneKindOfProblem) {
  TuningTable table;
  table.Add(Parsed(kText), "Some GPU");
  EXPECT_EQ(table.size(), 0);
  table.Add(Parsed(kText), " Some GPU 9000 ");
  ASSERT_NE(table.Find(Problem(1)), nullptr);
  GemmDesc other = Problem(1);
  other.gated = true;
  EXPECT_EQ(table.Find(other), nullptr);
  other = Problem(1);
  other.a_type = DType::kF16;
  EXPECT_EQ(table.Find(other), nullptr);
  other = Problem(1);
  other.c_type = DType::kF32;
  EXPECT_EQ(table.Find(other), nullptr);
  other = Problem(1);
  other.scale_type = ScaleType::kE8M0;
  EXPECT_EQ(table.Find(other), nullptr);
  other = Problem(1);
  other.has_zeros = true;
  EXPECT_EQ(table.Find(other), nullptr);
  other = Problem(1);
  other.has_biases = true;
  EXPECT_EQ(table.Find(other), nullptr);
  other = Problem(1);
  other.n = 4097;
  EXPECT_EQ(table.Find(other), nullptr);
  other = Problem(1);
  other.format = Format::kU4;
  EXPECT_EQ(table.Find(other), nullptr);
  // Group sizes count as their largest power-of-two divisor.
  for (const auto& [group, found] :
       {std::pair<int64_t, bool>{256, true}, {4096, true}, {384, true}, {64, false}, {48, false}}) {
    other = Problem(1);
    other.group_size = group;
    EXPECT_EQ(table.Find(other) != nullptr, found) << group;
  }
}

TEST(TuningTable, LaterSectionsReplaceWholeMatrices) {
  TuningTable table;
  table.Add(Parsed(kText), "Some GPU 9000");
  table.Add(Parsed("metal-marlin tuning 2\ndevice Some GPU 9000\n"
                   "fp4_e2m1 128 fp16 none bf16 bf16 plain 4096 4096 4 mine 5\n"),
            "Some GPU 9000");
  EXPECT_EQ(table.Find(Problem(1)), nullptr);
  EXPECT_EQ(table.Find(Problem(3))->kernel, "mine");
  EXPECT_EQ(table.size(), 2);
}

TEST(ReplaceTuning, KeepsWhatWasNotMeasuredAnew) {
  std::vector<TuningSection> sections = Parsed(kText);
  TuningSection section = Parsed(
      "metal-marlin tuning 2\ndevice Some GPU 9000\nmeasured 2027-01-01\n"
      "fp4_e2m1 128 fp16 none bf16 bf16 plain 4096 4096 4 mine 5\n")[0];
  ReplaceTuning(section, sections);
  ASSERT_EQ(sections.size(), 3U);
  EXPECT_EQ(sections[0].entries.size(), 1U);  // The GLU entry.
  EXPECT_EQ(sections[1].device, "Another");
  EXPECT_EQ(sections[2].date, "2027-01-01");
  TuningSection gated = Parsed(kText)[0];
  gated.entries.erase(gated.entries.begin(), gated.entries.begin() + 2);
  ReplaceTuning(gated, sections);
  EXPECT_EQ(sections.size(), 3U);
  EXPECT_EQ(sections.back().entries.front().key.gated, true);
}

}  // namespace
}  // namespace marlin::tuning_table_test
