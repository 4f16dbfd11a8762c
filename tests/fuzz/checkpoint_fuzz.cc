// Whole checkpoints: config.json, index and shards agree or are refused, and an opened checkpoint
// can be inspected, loaded, verified and converted, into directories that open again.
//
// Input: concatenated parts, separated by kDivider: config.json, the index, then a header and the
// data of each shard. An empty index means no index file. An empty header is replaced by the
// tensors that config.json's modules need. Lengths, checksums and the amount of data are corrected
// first, since the targets of single readers cover those.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/json.h"
#include "base/scalars.h"
#include "checkpoint/files/safetensors.h"
#include "checkpoint/module_tensors.h"
#include "cli/checkpoint_architecture.h"
#include "cli/checkpoint_listing.h"
#include "cli/commands/verification.h"
#include "fuzz_target.h"
#include "marlin/checkpoint.h"
#include "marlin/quantize.h"
#include "temporary_folder.h"

namespace {

using namespace marlin;

constexpr std::string_view kDivider = "\n-8<-\n";
constexpr int kMostShards = 3;
constexpr int64_t kMostData = 1 << 20;

struct Input {
  std::string config;
  std::string index;
  struct Shard {
    std::string header;
    std::string data;
  };
  std::vector<Shard> shards;
  std::vector<ModuleRecord> modules;  ///< The modules of config.json.
};

std::string ShardName(size_t shard, size_t count) {
  if (count == 1) return "model.safetensors";
  return "model-0000" + std::to_string(shard + 1) + "-of-0000" + std::to_string(count) +
         ".safetensors";
}

/// Corrects the checksum and reads the modules that config.json describes.
void SealConfig(Input* input) {
  auto json = ParseJsonObject(input->config, "fuzz");
  if (!json.ok()) return;
  const auto quantization = json->find("quantization_config");
  if (quantization == json->end() || !quantization->is_object()) return;
  (*quantization)["checksum"] = QuantizationConfigChecksum(*quantization);
  const auto parsed = ParseQuantizationConfig(*quantization, "fuzz");
  if (parsed.ok()) input->modules = parsed->modules;
  input->config = DumpJson(*json);
}

/// The end of the data that a header describes; empty if it is not a header.
std::optional<int64_t> DataBytes(const std::string& header) {
  const auto json = ParseJsonObject(header, "fuzz");
  if (!json.ok()) return std::nullopt;
  int64_t end = 0;
  for (const auto& [name, tensor] : json->items()) {
    if (!tensor.is_object() || !tensor.contains("data_offsets")) continue;
    const Json& offsets = tensor["data_offsets"];
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[1].is_number_unsigned()) continue;
    const auto last = offsets[1].get<uint64_t>();
    if (last <= static_cast<uint64_t>(kMostData)) end = std::max(end, static_cast<int64_t>(last));
  }
  return end;
}

/// The header with the modules' tensors, each once. Empty if that is too much data.
std::optional<std::string> HeaderOf(const std::vector<ModuleRecord>& modules, int64_t* bytes) {
  std::vector<SafetensorsEntry> entries;
  std::set<std::string> names;
  for (const ModuleRecord& record : modules) {
    for (const ModuleTensor& tensor : ModuleTensors(record)) {
      if (!names.insert(tensor.name).second) continue;
      if (tensor.bytes < 0 || tensor.bytes > kMostData - *bytes) return std::nullopt;
      entries.push_back({tensor.name, tensor.dtype, tensor.shape, *bytes, tensor.bytes});
      *bytes += tensor.bytes;
    }
  }
  // The builder's result starts with the length.
  return BuildSafetensorsHeader(entries, {}).substr(sizeof(uint64_t));
}

std::string Continued(std::string data, int64_t bytes) {
  const size_t given = data.size();
  data.resize(static_cast<size_t>(bytes));
  for (size_t i = given; i < data.size() && given > 0; ++i) data[i] = data[i % given];
  return data;
}

std::string ShardText(const Input& input, const Input::Shard& shard) {
  std::string header = shard.header;
  int64_t bytes = 0;
  if (header.empty()) {
    header = HeaderOf(input.modules, &bytes).value_or("{}");
  } else {
    bytes = DataBytes(header).value_or(static_cast<int64_t>(shard.data.size()));
  }
  const uint64_t length = header.size();
  std::string text(sizeof(length), '\0');
  std::memcpy(text.data(), &length, sizeof(length));
  return text + header + Continued(shard.data, bytes);
}

Input ReadInput(std::string_view rest) {
  Input input;
  input.config = TakePart(&rest, kDivider);
  input.index = TakePart(&rest, kDivider);
  do {
    Input::Shard shard;
    shard.header = TakePart(&rest, kDivider);
    shard.data = TakePart(&rest, kDivider);
    input.shards.push_back(std::move(shard));
  } while (!rest.empty() && input.shards.size() < kMostShards);
  SealConfig(&input);
  return input;
}

void WriteCheckpoint(const Input& input, const TemporaryFolder& folder) {
  for (const char* const name : {"model", "quantized", "plain"}) folder.Remove(name);
  folder.MakeFolder("model");
  if (!input.config.empty()) folder.Write("model/config.json", input.config);
  if (!input.index.empty()) folder.Write("model/model.safetensors.index.json", input.index);
  for (size_t i = 0; i < input.shards.size(); ++i) {
    folder.Write("model/" + ShardName(i, input.shards.size()), ShardText(input, input.shards[i]));
  }
}

/// Whether every element of a tensor of floats is finite.
bool IsFinite(const TensorView& view) {
  const auto* const bytes = static_cast<const uint8_t*>(view.data());
  for (int64_t i = 0; i < view.ElementCount(); ++i) {
    float value = 0;
    if (view.dtype() == DType::kF32) {
      std::memcpy(&value, bytes + 4 * i, sizeof(value));
    } else {
      uint16_t half = 0;
      std::memcpy(&half, bytes + 2 * i, sizeof(half));
      value = view.dtype() == DType::kBf16 ? Bf16ToFloat(half) : HalfToFloat(half);
    }
    if (!std::isfinite(value)) return false;
  }
  return true;
}

void CheckTensors(const Checkpoint& checkpoint) {
  std::string last;
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    MARLIN_FUZZ_CHECK(last < tensor.name);
    last = tensor.name;
    std::error_code error;
    const auto file = checkpoint.path() + "/" + tensor.file;
    const auto size = static_cast<int64_t>(std::filesystem::file_size(file, error));
    MARLIN_FUZZ_CHECK(!error && tensor.offset >= 8 && tensor.bytes >= 0);
    MARLIN_FUZZ_CHECK(tensor.offset + tensor.bytes <= size);
    const auto view = checkpoint.Tensor(tensor.name);
    MARLIN_FUZZ_CHECK(view.ok() && view->ByteCount() == tensor.bytes);
    MARLIN_FUZZ_CHECK(checkpoint.Find(tensor.name) == &tensor);
  }
  for (const cli::ListedTensor& listed : cli::ListTensors(checkpoint)) {
    MARLIN_FUZZ_CHECK(!std::isnan(listed.BitsPerWeight()));
  }
}

/// Loads a module, as the decoder and the conversions do; loaded weights must be finite.
bool CheckModule(const Checkpoint& checkpoint, const QuantizedModule& module) {
  const auto weights = checkpoint.Weights(module.name);
  if (!weights.ok()) {
    CheckError(weights.status());
    return false;
  }
  MARLIN_FUZZ_CHECK(weights->spec == module.spec && Validate(*weights).ok());
  const WeightsSpec& spec = module.spec;
  const FormatInfo& info = GetFormatInfo(spec.format);
  MARLIN_FUZZ_CHECK(weights->codebook.empty() || weights->codebook.size() == 1U << info.bits);
  const int64_t bytes =
      weights->codes.ByteCount() + weights->scales.ByteCount() +
      weights->zeros.ByteCount() * (spec.has_zeros ? 1 : 0) +
      weights->biases.ByteCount() * (spec.has_biases ? 1 : 0) +
      weights->global_scale.ByteCount() * (spec.has_global_scale ? 1 : 0) +
      weights->metadata.ByteCount() * (spec.sparsity == Sparsity::k24 ? 1 : 0) +
      weights->permutation.ByteCount() * (spec.has_permutation ? 1 : 0) +
      weights->input_scale.ByteCount() * (spec.has_input_scale ? 1 : 0) +
      (spec.super_group_size > 0 ? weights->super_scales.ByteCount() : 0) +
      (spec.super_group_size > 0 && spec.has_biases ? weights->super_biases.ByteCount() : 0) +
      (info.has_codebook ? int64_t{4} << info.bits : 0);
  MARLIN_FUZZ_CHECK(bytes == StoredBytes(spec));
  const __int128 count = static_cast<__int128>(spec.experts) * spec.k * spec.n;
  // Codes have at least two bits; the rest may be padding along K.
  MARLIN_FUZZ_CHECK(count <= 4 * static_cast<__int128>(weights->codes.ByteCount()));
  auto out = AlignedBuffer::Allocate(static_cast<int64_t>(count) * 4);
  MARLIN_FUZZ_CHECK(out.ok());
  const MutableTensorView dense(out->data(), DType::kF32, {spec.experts, spec.k, spec.n});
  return Dequantize(*weights, dense).ok();
}

/// A directory written by this library must open.
Checkpoint OpenWritten(const std::string& path, bool quantized) {
  auto written = Checkpoint::Open(path);
  if (!written.ok()) std::fprintf(stderr, "%s\n", written.status().message().c_str());
  MARLIN_FUZZ_CHECK(written.ok());
  MARLIN_FUZZ_CHECK(written->quantized() == quantized);
  const Status intact = written->VerifyChecksums();
  if (!intact.ok()) std::fprintf(stderr, "%s\n", intact.message().c_str());
  MARLIN_FUZZ_CHECK(intact.ok());
  CheckTensors(*written);
  return *std::move(written);
}

void CheckQuantized(const Checkpoint& checkpoint, const TemporaryFolder& folder, DType dtype) {
  bool loads = true;
  for (const QuantizedModule& module : checkpoint.modules()) {
    // Every expert has bytes: otherwise a small file could cause any amount of work.
    MARLIN_FUZZ_CHECK(module.spec.experts <= StoredBytes(module.spec));
    loads = CheckModule(checkpoint, module) && loads;
  }
  const std::string output = folder.Path("plain");
  const Status restored = DequantizeCheckpoint(checkpoint.path(), output, dtype, false);
  if (!restored.ok()) {
    CheckError(restored);
    MARLIN_FUZZ_CHECK(!std::filesystem::exists(output));
    return;
  }
  MARLIN_FUZZ_CHECK(loads);  // A module that does not load must not be converted.
  const Checkpoint plain = OpenWritten(output, false);
  std::set<std::string> parts;
  for (const TensorInfo& tensor : checkpoint.tensors()) parts.insert(tensor.name);
  for (const TensorInfo& tensor : plain.tensors()) {
    if (parts.contains(tensor.name) || tensor.dtype != dtype) continue;
    MARLIN_FUZZ_CHECK(IsFinite(*plain.Tensor(tensor.name)));
  }
  // Rounding to `dtype` is always close, so only the success of the comparison matters.
  const auto compared = cli::CompareCheckpoints(checkpoint, plain);
  if (!compared.ok()) std::fprintf(stderr, "%s\n", compared.status().message().c_str());
  MARLIN_FUZZ_CHECK(compared.ok());
}

void CheckPlain(const Checkpoint& checkpoint, const TemporaryFolder& folder,
                const std::string& choice) {
  const auto described = cli::DescribeCheckpoint(checkpoint);
  if (!described.ok()) CheckError(described.status());
  QuantizeCheckpointOptions options;
  options.recipe = *MixedPrecisionConfig::Uniform(choice);
  options.shard_bytes = 1 << 12;
  options.dry_run = true;
  const std::string output = folder.Path("quantized");
  const auto planned = QuantizeCheckpoint(checkpoint.path(), output, options);
  if (!planned.ok()) CheckError(planned.status());
  MARLIN_FUZZ_CHECK(!std::filesystem::exists(output));
  options.dry_run = false;
  const auto report = QuantizeCheckpoint(checkpoint.path(), output, options);
  if (!report.ok()) {
    CheckError(report.status());
    MARLIN_FUZZ_CHECK(!std::filesystem::exists(output));
    return;
  }
  MARLIN_FUZZ_CHECK(planned.ok() && report->bytes == planned->bytes);
  const Checkpoint quantized = OpenWritten(output, true);
  for (const QuantizedModule& module : quantized.modules()) {
    MARLIN_FUZZ_CHECK(CheckModule(quantized, module));
  }
  const auto compared = cli::CompareCheckpoints(quantized, checkpoint);
  if (!compared.ok()) std::fprintf(stderr, "%s\n", compared.status().message().c_str());
  MARLIN_FUZZ_CHECK(compared.ok());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const TemporaryFolder folder;
  const Input input = ReadInput(TextOf(data, size));
  WriteCheckpoint(input, folder);
  const auto checkpoint = Checkpoint::Open(folder.Path("model"));
  if (!checkpoint.ok()) {
    CheckError(checkpoint.status());
    return 0;
  }
  CheckTensors(*checkpoint);
  const Status intact = checkpoint->VerifyChecksums();
  if (!intact.ok()) CheckError(intact);
  // The conversion is a function of the input, to be reproducible.
  constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16};
  constexpr const char* kChoices[] = {"fp4_e2m1/g16", "u4/gK", "nf3/g32/e4m3", "s8/g16/e8m0"};
  if (checkpoint->quantized()) {
    CheckQuantized(*checkpoint, folder, kTypes[size % std::size(kTypes)]);
  } else {
    CheckPlain(*checkpoint, folder, kChoices[size % std::size(kChoices)]);
  }
  return 0;
}
