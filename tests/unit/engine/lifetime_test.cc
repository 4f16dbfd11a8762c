// Sequences, models, devices and weights that are destroyed, moved or of another owner, and logits
// of every stride: each call succeeds or returns an error.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../source_directory.h"
#include "marlin/evaluate.h"
#include "marlin/generate.h"
#include "marlin/model.h"

namespace marlin::lifetime_test {
namespace {

const std::string kDirectory = SourceDirectory() + "/examples/tiny-qwen3-moe";
constexpr int32_t kPrompt[] = {1, 2, 3};
constexpr int64_t kRows = 3;
constexpr float kUntouched = -12345.0F;

Model OpenModel() {
  auto model = Model::Open(kDirectory, *Device::Open("cpu", {2}));
  EXPECT_TRUE(model.ok()) << model.status().message();
  return *std::move(model);
}

std::string ErrorOf(const Status& status) {
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  return status.message();
}

class Logits : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    model_ = new Model(OpenModel());
    const auto count = static_cast<size_t>(kRows * model_->info().vocab_size);
    expected_ = new std::vector<float>(count);
    Sequence sequence = *model_->NewSequence();
    const SequenceInput input{&sequence, kPrompt, true};
    const MutableTensorView view(expected_->data(), DType::kF32,
                                 {kRows, model_->info().vocab_size});
    ASSERT_TRUE(model_->Forward({&input, 1}, view).ok());
  }
  static void TearDownTestSuite() {
    delete model_;
    delete expected_;
  }

  static int64_t Vocab() { return model_->info().vocab_size; }

  /// Runs the prompt into `memory`, whose view begins at `first`; stores the sequence's new length.
  Status Run(std::vector<float>* memory, int64_t first, std::initializer_list<int64_t> strides) {
    Sequence sequence = *model_->NewSequence();
    const SequenceInput input{&sequence, kPrompt, true};
    const Status status = model_->Forward(
        {&input, 1},
        MutableTensorView(memory->data() + first, DType::kF32, {kRows, Vocab()}, strides));
    length_ = sequence.length();
    return status;
  }

  /// Expects the right value in every element of the view and no change elsewhere.
  void ExpectStrided(int64_t row_stride, int64_t column_stride) {
    const auto reach =
        static_cast<size_t>((kRows - 1) * row_stride + (Vocab() - 1) * column_stride + 1);
    std::vector<float> memory(reach + 64, kUntouched);
    const Status status = Run(&memory, 0, {row_stride, column_stride});
    ASSERT_TRUE(status.ok()) << status.message();
    std::vector<float> wanted(memory.size(), kUntouched);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t i = 0; i < Vocab(); ++i) {
        wanted[static_cast<size_t>(row * row_stride + i * column_stride)] =
            (*expected_)[static_cast<size_t>(row * Vocab() + i)];
      }
    }
    EXPECT_TRUE(memory == wanted) << row_stride << ", " << column_stride;
  }

  static Model* model_;
  static std::vector<float>* expected_;
  int64_t length_ = 0;
};
Model* Logits::model_ = nullptr;
std::vector<float>* Logits::expected_ = nullptr;

TEST_F(Logits, AreWrittenWhereTheStridesSay) {
  ExpectStrided(Vocab(), 1);
  ExpectStrided(Vocab() + 5, 1);
  ExpectStrided(2 * Vocab(), 2);
  ExpectStrided(2 * Vocab() + 3, 2);
  ExpectStrided(1, kRows);  // Column-major.
  ExpectStrided(2, 2 * kRows + 1);
}

TEST_F(Logits, RefuseStridesThatRunBackwardsOrMeet) {
  std::vector<float> memory(static_cast<size_t>(4 * kRows * Vocab()), kUntouched);
  EXPECT_NE(ErrorOf(Run(&memory, Vocab() - 1, {Vocab(), -1})).find("logits: stride -1"),
            std::string::npos);
  EXPECT_EQ(length_, 0);
  EXPECT_NE(ErrorOf(Run(&memory, 2 * Vocab(), {-Vocab(), 1})).find("is negative"),
            std::string::npos);
  EXPECT_NE(ErrorOf(Run(&memory, 0, {0, 1})).find("logits: "), std::string::npos);
  EXPECT_NE(ErrorOf(Run(&memory, 0, {Vocab(), 0})).find("logits: "), std::string::npos);
  EXPECT_NE(ErrorOf(Run(&memory, 0, {Vocab() - 1, 1})).find("elements overlap"), std::string::npos);
  EXPECT_NE(ErrorOf(Run(&memory, 0, {INT64_MAX / 2, 1})).find("larger than memory"),
            std::string::npos);
  EXPECT_TRUE(memory == std::vector<float>(memory.size(), kUntouched));
}

TEST_F(Logits, RefuseMemoryThatCannotBe) {
  const auto run = [](void* data) {
    Sequence sequence = *model_->NewSequence();
    const SequenceInput input{&sequence, kPrompt, true};
    const Status status =
        model_->Forward({&input, 1}, MutableTensorView(data, DType::kF32, {kRows, Vocab()}));
    EXPECT_EQ(sequence.length(), 0);
    return status;
  };
  EXPECT_EQ(ErrorOf(run(nullptr)), "logits: null data");
  std::vector<float> memory(static_cast<size_t>(kRows * Vocab()) + 1);
  EXPECT_NE(ErrorOf(run(reinterpret_cast<char*>(memory.data()) + 1)).find("not aligned"),
            std::string::npos);
}

Status Feed(const Model& model, Sequence* sequence) {
  std::vector<float> logits(static_cast<size_t>(model.info().vocab_size));
  const SequenceInput input{sequence, kPrompt, false};
  return model.Forward({&input, 1},
                       MutableTensorView(logits.data(), DType::kF32, {1, model.info().vocab_size}));
}

TEST(Lifetime, ASequenceOfADestroyedModelIsRefusedWhateverComesToItsPlace) {
  for (int round = 0; round < 20; ++round) {
    auto first = std::make_unique<Model>(OpenModel());
    Sequence sequence = *first->NewSequence();
    ASSERT_TRUE(Feed(*first, &sequence).ok());
    first.reset();
    const Model second = OpenModel();
    EXPECT_EQ(ErrorOf(Feed(second, &sequence)), "inputs[0]: a sequence of a destroyed model");
    EXPECT_EQ(sequence.length(), kRows);
    EXPECT_TRUE(sequence.Truncate(1).ok());
  }
}

TEST(Lifetime, ASequenceBelongsToAModelAndItsCopies) {
  const Model model = OpenModel();
  const Model other = OpenModel();
  const Model copy = model;
  Sequence sequence = *model.NewSequence();
  EXPECT_EQ(ErrorOf(Feed(other, &sequence)), "inputs[0]: a sequence of another model");
  EXPECT_TRUE(Feed(copy, &sequence).ok());
}

TEST(Lifetime, MovedFromObjectsAnswer) {
  Model model = OpenModel();
  Sequence sequence = *model.NewSequence();
  Sequence taken = std::move(sequence);
  EXPECT_EQ(sequence.length(), 0);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(ErrorOf(sequence.Truncate(0)), "sequence: was moved from");
  EXPECT_EQ(ErrorOf(Feed(model, &sequence)), "inputs[0]: a sequence that was moved from");

  const Model kept = std::move(model);
  EXPECT_FALSE(model.valid());  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(model.info().vocab_size, 0);
  EXPECT_EQ(model.device().info().backend, "cpu");
  EXPECT_EQ(ErrorOf(model.NewSequence().status()), "model: was moved from");
  EXPECT_EQ(ErrorOf(Feed(model, &taken)), "model: was moved from");
  EXPECT_EQ(ErrorOf(Generate(model, kPrompt).status()), "model: was moved from");
  EXPECT_EQ(ErrorOf(Perplexity(model, kPrompt).status()), "model: was moved from");
  EXPECT_EQ(ErrorOf(CompareModels(kept, model, kPrompt).status()), "reference: was moved from");
  EXPECT_EQ(ErrorOf(CompareModels(model, kept, kPrompt).status()), "model: was moved from");
  EXPECT_TRUE(Feed(kept, &taken).ok());
}

TEST(Lifetime, TwoThreadsThatShareASequenceAreToldSo) {
  const Model model = OpenModel();
  Sequence sequence = *model.NewSequence();
  const auto run = [&] {
    for (int i = 0; i < 40; ++i) {
      const Status status = Feed(model, &sequence);
      if (status.ok()) continue;
      EXPECT_EQ(ErrorOf(status), "inputs[0]: another call is feeding the sequence");
    }
  };
  std::thread other(run);
  run();
  other.join();
  EXPECT_TRUE(Feed(model, &sequence).ok());
}

TEST(Lifetime, APathEndsWhereItsTextDoes) {
  const std::string path = kDirectory + std::string("\0x", 2);
  EXPECT_NE(ErrorOf(Model::Open(path, *Device::Open("cpu")).status()).find("NUL"),
            std::string::npos);
}

}  // namespace
}  // namespace marlin::lifetime_test
