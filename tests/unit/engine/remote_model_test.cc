// Models on a device with inaccessible memory and asynchronous calls, like a GPU; and the device
// queries that precede loading.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "../../source_directory.h"
#include "marlin/checkpoint.h"
#include "marlin/decoder.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "model/open_model.h"
#include "model/placement.h"
#include "random_model.h"
#include "remote_backend.h"
#include "two_sequences.h"

namespace marlin::remote_model_test {
namespace {

using testing::OpenRemote;
using testing::RemoteOf;

std::string SampleModel(const std::string& name) { return SourceDirectory() + "/" + name; }

Model OpenOn(const Device& device, const std::string& path) {
  auto model = Model::Open(path, device, {.allow_bf16_activations = false});
  EXPECT_TRUE(model.ok()) << model.status().message();
  return *std::move(model);
}

/// Runs two sequences as a batch, in several calls; returns all logits, concatenated.
std::vector<float> RunCalls(const Model& model) {
  testing::TwoSequences two(model, 900);
  two.Forward(2, 30, true);
  two.Forward(1, 1, false);
  two.Forward(600, 7, true);
  two.Forward(1, 1, false);
  return two.logits;
}

/// Returns the tokens of a text sampled with every option.
std::vector<int32_t> Draw(const Model& model) {
  GenerateOptions options;
  options.max_tokens = 12;
  options.ignore_eos = true;
  options.sampling = {.temperature = 1.1F, .top_k = 40, .top_p = 0.95F, .seed = 3};
  options.sampling.min_p = 0.01F;
  options.sampling.repetition_penalty = 1.2F;
  options.sampling.frequency_penalty = 0.1F;
  const std::vector<int32_t> prompt = {5, 9, 2};
  const auto text = Generate(model, prompt, options);
  EXPECT_TRUE(text.ok()) << text.status().message();
  return text->token_ids;
}

class RemoteModel : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    path_ = SampleModel(GetParam());
    if (std::string(GetParam()) == "qwen2") {
      path_ = directory_.path();
      testing::WriteQwen2(path_, 40);
    }
  }
  testing::TemporaryDirectory directory_;
  std::string path_;
};

INSTANTIATE_TEST_SUITE_P(Models, RemoteModel,
                         ::testing::Values("qwen2", "examples/tiny-qwen3-moe",
                                           "tests/data/tiny-glm4-moe"),
                         [](const auto& name) { return "Model" + std::to_string(name.index); });

TEST_P(RemoteModel, GivesTheBitsOfTheCpu) {
  const Device remote = OpenRemote();
  const Model model = OpenOn(remote, path_);
  const Model expected = OpenOn(*Device::Open("cpu", {.threads = 2}), path_);
  EXPECT_EQ(RunCalls(model), RunCalls(expected));
  EXPECT_EQ(Draw(model), Draw(expected));
  // One fused run per layer with experts.
  const bool dense = std::string(GetParam()) == "qwen2";
  EXPECT_EQ(RemoteOf(remote).remote_decoder().fused_runs() > 0, !dense);
}

/// A run that takes one row has others within for several. Each runs once, and its operations never
/// do.
TEST(RemoteDevice, RunsHaveOthersWithin) {
  const std::string path = SampleModel("examples/tiny-qwen3-moe");
  const Device remote = OpenRemote({.fuses_by_rows = true});
  const Model model = OpenOn(remote, path);
  const Model expected = OpenOn(OpenRemote(), path);
  EXPECT_EQ(RunCalls(model), RunCalls(expected));
  EXPECT_EQ(model.info().fusion, expected.info().fusion);
  const testing::RemoteDecoder& decoder = RemoteOf(remote).remote_decoder();
  std::vector<float> logits(static_cast<size_t>(model.info().vocab_size));
  const MutableTensorView row(logits.data(), DType::kF32, {1, model.info().vocab_size});
  for (const std::vector<int32_t>& tokens : {std::vector<int32_t>{1}, {1, 2, 3}}) {
    Sequence sequence = *model.NewSequence();
    const int before = decoder.fused_calls();
    const SequenceInput input{&sequence, tokens};
    ASSERT_TRUE(model.Forward({&input, 1}, row).ok());
    EXPECT_EQ(decoder.fused_calls() - before, model.info().layers) << tokens.size();
  }
}

TEST(RemoteDevice, ModelsSayWhatIsFused) {
  const std::string path = SampleModel("examples/tiny-qwen3-moe");
  const Model fused = OpenOn(OpenRemote(), path);
  const int64_t layers = fused.info().layers;
  const std::string operations = " of " + std::to_string(5 * layers + 3) + " operations";
  EXPECT_EQ(fused.info().fusion, std::to_string(layers) + operations + " (attention one by one)");
  EXPECT_EQ(OpenOn(*Device::Open("cpu"), path).info().fusion, "");
}

// A step is enqueued as a whole; the host waits only for the results.
TEST_P(RemoteModel, WaitsOnlyForTheResults) {
  const Device remote = OpenRemote();
  const Model model = OpenOn(remote, path_);
  Sequence sequence = *model.NewSequence();
  const std::vector<int32_t> tokens = {1, 2, 3};
  std::vector<float> logits(static_cast<size_t>(model.info().vocab_size));
  const MutableTensorView row(logits.data(), DType::kF32, {1, model.info().vocab_size});
  for (int call = 0; call < 3; ++call) {
    const int before = RemoteOf(remote).waits();
    const SequenceInput input{&sequence, tokens};
    ASSERT_TRUE(model.Forward({&input, 1}, row).ok());
    EXPECT_EQ(RemoteOf(remote).waits() - before, 2);  // For the logits, and at the end.
  }
}

// A device says how long a pass may be; rows of logits divide passes, too.
TEST_P(RemoteModel, PassesAreAsLongAsTheDeviceAllows) {
  const Device usual = OpenRemote();
  const Device longer = OpenRemote({.pass_tokens = 2000});
  const Model first = OpenOn(usual, path_);
  const Model second = OpenOn(longer, path_);
  const int64_t vocab = first.info().vocab_size;
  const std::vector<int32_t> tokens = testing::TokensBelow(static_cast<int32_t>(vocab), 600);
  const auto run = [&](const Device& device, const Model& model, bool all_logits) {
    Sequence sequence = *model.NewSequence();
    const SequenceInput input{&sequence, tokens, all_logits};
    const int64_t rows = all_logits ? 600 : 1;
    std::vector<float> logits(static_cast<size_t>(rows * vocab));
    const int before = RemoteOf(device).copies();
    EXPECT_TRUE(model.Forward({&input, 1}, {logits.data(), DType::kF32, {rows, vocab}}).ok());
    return std::pair(RemoteOf(device).copies() - before, logits);
  };
  const auto two = run(usual, first, false);
  const auto one = run(longer, second, false);
  EXPECT_EQ(two.first, 2);
  EXPECT_EQ(one.first, 1);
  for (int64_t i = 0; i < vocab; ++i) {
    const auto at = static_cast<size_t>(i);
    ASSERT_NEAR(one.second[at], two.second[at], 1e-4 * std::max(1.0F, std::abs(two.second[at])));
  }
  EXPECT_EQ(run(longer, second, true).first, 2);
}

TEST(RemoteDevice, IsAskedBeforeAnythingIsLoaded) {
  const auto refusal = [](testing::RemoteOptions options, const std::string& model) {
    const Device remote = OpenRemote(std::move(options));
    const auto opened = Model::Open(SampleModel(model), remote);
    EXPECT_EQ(opened.status().code(), Code::kUnsupported);
    EXPECT_EQ(RemoteOf(remote).uploads(), 0);
    return opened.status().message();
  };
  EXPECT_EQ(refusal({.lacking = {DecoderOperation::kApplyRotary}}, "tests/data/tiny-glm4-moe"),
            "remote: lacks the operation \"RoPE\", which glm4_moe needs");
  EXPECT_EQ(refusal({.lacking = {DecoderOperation::kPagedAttention}}, "examples/tiny-qwen3-moe"),
            "remote: lacks the operation \"attention with a paged KV cache\", which qwen3_moe "
            "needs");
  EXPECT_EQ(refusal({.products_only = true}, "examples/tiny-qwen3-moe"),
            "remote: runs GEMMs only; open the model on \"cpu\"");
  EXPECT_EQ(refusal({.fuses_experts = false}, "examples/tiny-qwen3-moe"),
            "remote: lacks the operation \"experts\", which qwen3_moe needs");
  EXPECT_TRUE(Model::Open(SampleModel("examples/tiny-qwen3-moe"),
                          OpenRemote({.lacking = {DecoderOperation::kAttention}}))
                  .ok());
}

// "auto": the first device, in order, that can run the model.
TEST(RemoteDevice, AutoGoesOnToTheNextThatCanRunTheModel) {
  const std::string path = SampleModel("examples/tiny-qwen3-moe");
  const Device products = OpenRemote({.products_only = true});
  const Device lacking = OpenRemote({.lacking = {DecoderOperation::kPagedAttention}});
  const auto opens = [](const Device& device) {
    return [device]() -> Result<Device> { return device; };
  };
  const auto open_cpu = [] { return Device::Open("cpu", {.threads = 2}); };
  const Result<Device> device = OpenFirst({opens(products), opens(lacking), open_cpu});
  ASSERT_TRUE(device.ok());
  EXPECT_EQ(device->info().name, "remote");
  const Model model = OpenOn(*device, path);
  EXPECT_EQ(model.device().info().name, "cpu");
  // Two models of one device share the one that is taken instead.
  EXPECT_EQ(&Internals::Impl(OpenOn(*device, path).device()), &Internals::Impl(model.device()));
  EXPECT_EQ(RemoteOf(products).uploads() + RemoteOf(lacking).uploads(), 0);
}

// The CPU alone is faster than a GPU that waits for it in between; a user who names the GPU gets
// it.
TEST(RemoteDevice, AutoGoesOnWhereTheHostWouldRunAPart) {
  const std::string path = SampleModel("examples/tiny-qwen3-moe");
  const auto opens_partial = []() -> Result<Device> {
    return OpenRemote({.left_to_host = {DecoderOperation::kAddTo}});
  };
  const auto open_cpu = [] { return Device::Open("cpu", {.threads = 2}); };
  const Model model = OpenOn(*OpenFirst({opens_partial, open_cpu}), path);
  EXPECT_EQ(model.device().info().name, "cpu");
  EXPECT_EQ(model.info().notes,
            std::vector<std::string>{"not on remote: has no kernel of the operation \"residual "
                                     "addition\", which qwen3_moe needs"});
  EXPECT_EQ(OpenOn(*opens_partial(), path).device().info().name, "remote");
  EXPECT_TRUE(OpenOn(*opens_partial(), path).info().notes.empty());
  const auto open_able = []() -> Result<Device> { return OpenRemote(); };
  EXPECT_EQ(OpenOn(*OpenFirst({open_able, open_cpu}), path).device().info().name, "remote");
}

// Other requirements of a caller for the device that "auto" takes.
TEST(RemoteDevice, AutoAnswersTheCallersNeeds) {
  const auto opens_cpu = [](int threads) {
    return [threads] { return Device::Open("cpu", {.threads = threads}); };
  };
  const auto directory = OpenModelDirectory(SampleModel("examples/tiny-qwen3-moe"));
  ASSERT_TRUE(directory.ok());
  const auto threads = [&](const Result<Device>& device, const PlacementOptions& options) {
    return DeviceFor(*device, directory->config, options)->info().threads;
  };
  const auto shared = OpenFirst({opens_cpu(1), opens_cpu(2)});
  EXPECT_EQ(threads(shared, {}), 1);
  EXPECT_EQ(threads(shared, {.calibrates = true}), 2);
  const auto remote = OpenFirst({[]() -> Result<Device> { return OpenRemote(); }, opens_cpu(2)});
  EXPECT_NE(DeviceFor(*remote, directory->config)->info().name, "cpu");
  EXPECT_EQ(threads(remote, {.prepared = true}), 2);
}

TEST(RemoteDevice, AutoStaysWhereTheModelRuns) {
  const Device able = OpenRemote();
  const Result<Device> device =
      OpenFirst({[able]() -> Result<Device> { return able; },
                 []() -> Result<Device> { return Status(Code::kInternal, "was asked"); }});
  ASSERT_TRUE(device.ok());
  EXPECT_EQ(OpenOn(*device, SampleModel("examples/tiny-qwen3-moe")).device().info().name, "remote");
}

TEST(RemoteDevice, AutoWithoutADeviceForTheModelSaysWhatTheLastOneLacks) {
  const Device products = OpenRemote({.products_only = true});
  const Device lacking = OpenRemote({.lacking = {DecoderOperation::kApplyRotary}});
  const Result<Device> device = OpenFirst({[products]() -> Result<Device> { return products; },
                                           [lacking]() -> Result<Device> { return lacking; }});
  ASSERT_TRUE(device.ok());
  const auto model = Model::Open(SampleModel("examples/tiny-qwen3-moe"), *device);
  EXPECT_EQ(model.status().message(),
            "remote: lacks the operation \"RoPE\", which qwen3_moe needs");
}

TEST(RemoteDevice, MemoryIsPlannedBeforeWeightsAreRead) {
  const std::string path = SampleModel("examples/tiny-qwen3-moe");
  const Device small = OpenRemote({.free_memory = 1000000});
  const auto refused = Model::Open(path, small, {.gpu_layers = 4});
  EXPECT_EQ(refused.status().code(), Code::kOutOfMemory);
  EXPECT_NE(refused.status().message().find("bytes, remote has 1000000 free"), std::string::npos)
      << refused.status().message();
  EXPECT_EQ(RemoteOf(small).uploads(), 0);

  const Device large = OpenRemote({.free_memory = int64_t{1} << 30});
  const auto limited = Model::Open(path, large, {.device_memory = 2000000, .gpu_layers = 4});
  EXPECT_EQ(limited.status().code(), Code::kOutOfMemory);
  EXPECT_NE(limited.status().message().find("2000000 for it"), std::string::npos)
      << limited.status().message();
}

TEST(RemoteDevice, PagesBeyondTheMemoryAreRefused) {
  const std::string path = SampleModel("examples/tiny-qwen3-moe");
  const Device device = OpenRemote({.free_memory = int64_t{1} << 30});
  int64_t weights = 0;
  const auto checkpoint = Checkpoint::Open(path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  for (const TensorInfo& tensor : checkpoint->tensors()) {
    weights += tensor.shape.ElementCount() * 2;
  }
  const auto open = [&](int64_t for_cache) {
    return *Model::Open(path, device, {.device_memory = weights + for_cache});
  };
  // Two pages of 256 tokens of 2 x 32 features in 2 heads and 4 layers, in bf16, fit; a third does
  // not.
  const Model model = open(700000);
  const std::vector<int32_t> prompt = {5, 9, 2};
  std::vector<Sequence> sequences;
  Status status;
  while (status.ok() && sequences.size() < 100) {
    sequences.push_back(*model.NewSequence());
    const SequenceInput input{&sequences.back(), prompt, false};
    std::vector<float> logits(static_cast<size_t>(model.info().vocab_size));
    status = model.Forward({&input, 1}, {logits.data(), DType::kF32, {1, model.info().vocab_size}});
  }
  EXPECT_EQ(status.code(), Code::kOutOfMemory);
  EXPECT_NE(status.message().find("KV cache: "), std::string::npos) << status.message();
  EXPECT_GT(sequences.size(), 1U);
  // The model goes on once pages are free again.
  sequences.clear();
  Sequence sequence = *model.NewSequence();
  const SequenceInput input{&sequence, prompt, false};
  std::vector<float> logits(static_cast<size_t>(model.info().vocab_size));
  EXPECT_TRUE(
      model.Forward({&input, 1}, {logits.data(), DType::kF32, {1, model.info().vocab_size}}).ok());
}

// A copy is done behind the work before it, and not before the device is waited for.
TEST(RemoteDevice, CopiesAsynchronouslyInOrder) {
  const Device remote = OpenRemote();
  const DeviceBuffer memory = *DeviceBuffer::Allocate(remote, 4096);
  const auto at = [&](int64_t offset) { return static_cast<uint8_t*>(memory.data()) + offset; };
  const std::vector<float> table = {1, 2, 3, 4, 5, 6, 7, 8};
  const std::vector<int32_t> ids = {3, 1};
  std::vector<float> out(4, -1);
  ASSERT_TRUE(memory.CopyFromAsync(table.data(), 32).ok());
  ASSERT_TRUE(memory.CopyFromAsync(ids.data(), 8, 1024).ok());
  ASSERT_TRUE(LookUpRows(remote, {at(0), DType::kF32, {4, 2}}, {at(1024), DType::kI32, {2}},
                         {at(2048), DType::kF32, {2, 2}})
                  .ok());
  ASSERT_TRUE(memory.CopyToAsync(out.data(), 16, 2048).ok());
  EXPECT_EQ(memory.CopyToAsync(out.data(), 16, 4096).code(), Code::kInvalidArgument);
  EXPECT_EQ(memory.CopyFromAsync(nullptr, 16, 2048).message(), "host: null data");
  EXPECT_EQ(out, std::vector<float>(4, -1));
  ASSERT_TRUE(remote.Synchronize().ok());
  EXPECT_EQ(out, (std::vector<float>{7, 8, 3, 4}));
}

// Ids in device memory are checked when the device reads them, and the error is sticky.
TEST(RemoteDevice, ReportsIdsOutOfRangeWhenItIsWaitedFor) {
  const Device remote = OpenRemote();
  const DeviceBuffer memory = *DeviceBuffer::Allocate(remote, 4096);
  const TensorView table(memory.data(), DType::kF32, {8, 16});
  const TensorView ids(static_cast<uint8_t*>(memory.data()) + 1024, DType::kI32, {2});
  const MutableTensorView out(static_cast<uint8_t*>(memory.data()) + 2048, DType::kF32, {2, 16});
  const int32_t values[] = {3, 8};
  ASSERT_TRUE(memory.CopyFrom(values, sizeof(values), 1024).ok());
  EXPECT_TRUE(LookUpRows(remote, table, ids, out).ok());
  EXPECT_EQ(remote.Synchronize().message(), "ids: expected 0..7, got 8 at 1");
  EXPECT_EQ(remote.Synchronize().message(), "ids: expected 0..7, got 8 at 1");
  // Ids in host memory are checked first.
  const Device other = OpenRemote();
  EXPECT_EQ(LookUpRows(other, table, values, out).message(), "ids: expected 0..7, got 8 at 1");
  EXPECT_TRUE(other.Synchronize().ok());
}

}  // namespace
}  // namespace marlin::remote_model_test
