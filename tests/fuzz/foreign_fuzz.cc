// Checkpoints of other programs in safetensors: every module that a reader describes loads with
// the parts that its description implies, finite, or gives an error
//
// Input: config.json, kDivider, a safetensors header, kDivider, data. The length of the header is
// corrected, and the data repeated to the end that the header describes.
#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>

#include "base/json.h"
#include "fuzz_target.h"
#include "marlin/checkpoint.h"
#include "marlin/quantize.h"
#include "temporary_folder.h"

namespace {

using namespace marlin;

constexpr std::string_view kDivider = "\n-8<-\n";
constexpr int64_t kMostData = 1 << 18;

int64_t DataBytes(std::string_view header) {
  int64_t end = 0;
  const auto json = ParseJsonObject(header, "fuzz");
  if (!json.ok()) return 0;
  for (const auto& [name, tensor] : json->items()) {
    if (!tensor.is_object() || !tensor.contains("data_offsets")) continue;
    const Json& offsets = tensor["data_offsets"];
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[1].is_number_unsigned()) continue;
    const auto last = offsets[1].get<uint64_t>();
    if (last <= uint64_t{kMostData}) end = std::max(end, static_cast<int64_t>(last));
  }
  return end;
}

std::string ImageOf(std::string_view header, std::string_view given) {
  std::string data(given);
  data.resize(static_cast<size_t>(DataBytes(header)), '\x2c');
  for (size_t i = given.size(); i < data.size() && !given.empty(); ++i) {
    data[i] = data[i - given.size()];
  }
  const uint64_t length = header.size();
  std::string image(sizeof(length), '\0');
  std::memcpy(image.data(), &length, sizeof(length));
  return image + std::string(header) + data;
}

void CheckModule(const Checkpoint& checkpoint, const QuantizedModule& module) {
  const auto weights = checkpoint.Weights(module.name);
  if (!weights.ok()) {
    CheckError(weights.status());
    return;
  }
  MARLIN_FUZZ_CHECK(weights->spec == module.spec && Validate(*weights).ok());
  // A small file cannot describe much work.
  MARLIN_FUZZ_CHECK(StoredBytes(module.spec) <= 64 * kMostData);
  std::string out(
      static_cast<size_t>(module.spec.experts * module.spec.k * module.spec.n) * sizeof(float), 0);
  const Shape shape{module.spec.experts, module.spec.k, module.spec.n};
  MARLIN_FUZZ_CHECK(Dequantize(*weights, MutableTensorView(out.data(), DType::kF32, shape)).ok());
}

/// Reads every byte, as a sanitizer then does.
int64_t SumOf(const TensorView& tensor) {
  const auto* bytes = static_cast<const uint8_t*>(tensor.data());
  return std::accumulate(bytes, bytes + tensor.ByteCount(), int64_t{0});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const TemporaryFolder folder;
  std::string_view rest = TextOf(data, size);
  const std::string_view config = TakePart(&rest, kDivider);
  const std::string_view header = TakePart(&rest, kDivider);
  folder.MakeFolder("model");
  folder.Write("model/config.json", config);
  folder.Write("model/model.safetensors", ImageOf(header, rest));
  const auto checkpoint = Checkpoint::Open(folder.Path("model"));
  if (!checkpoint.ok()) {
    CheckError(checkpoint.status());
    return 0;
  }
  if (checkpoint->quantized()) return 0;  // The target checkpoint_fuzz has these.
  for (const QuantizedModule& module : checkpoint->modules()) CheckModule(*checkpoint, module);
  for (const TensorInfo& info : checkpoint->tensors()) {
    // Tensors that are stored in another form are computed.
    MARLIN_FUZZ_CHECK(info.bytes <= 64 * kMostData);
    const auto tensor = checkpoint->Tensor(info.name);
    MARLIN_FUZZ_CHECK(tensor.ok() && tensor->ByteCount() == info.bytes);
    MARLIN_FUZZ_CHECK(SumOf(*tensor) >= 0);
  }
  return 0;
}
