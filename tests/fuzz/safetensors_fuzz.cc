// The safetensors reader: accepted tensors are inside the file, and survive being written again.
#include <string>
#include <vector>

#include "checkpoint/files/safetensors.h"
#include "fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> image(reinterpret_cast<const std::byte*>(data), size);
  const auto header = marlin::ParseSafetensors(image, "fuzz", "fuzz");
  if (!header.ok()) {
    marlin::CheckError(header.status());
    return 0;
  }
  std::vector<marlin::SafetensorsEntry> entries;
  int64_t total = 0;
  for (const marlin::TensorInfo& tensor : header->tensors) {
    MARLIN_FUZZ_CHECK(tensor.offset >= header->data_begin);
    MARLIN_FUZZ_CHECK(tensor.offset + tensor.bytes <= static_cast<int64_t>(size));
    MARLIN_FUZZ_CHECK(tensor.bytes ==
                      tensor.shape.ElementCount() * marlin::DTypeBytes(tensor.dtype));
    total += tensor.bytes;
    entries.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.offset - header->data_begin,
                       tensor.bytes});
  }
  MARLIN_FUZZ_CHECK(header->data_begin + total == static_cast<int64_t>(size));

  std::string again = marlin::BuildSafetensorsHeader(entries, header->metadata);
  MARLIN_FUZZ_CHECK(again.size() % 64 == 0);
  again.append(reinterpret_cast<const char*>(data) + header->data_begin,
               size - static_cast<size_t>(header->data_begin));
  const auto second = marlin::ParseSafetensors(
      {reinterpret_cast<const std::byte*>(again.data()), again.size()}, "again", "again");
  MARLIN_FUZZ_CHECK(second.ok());
  MARLIN_FUZZ_CHECK(second->metadata == header->metadata);
  MARLIN_FUZZ_CHECK(second->tensors.size() == header->tensors.size());
  for (size_t i = 0; i < header->tensors.size(); ++i) {
    MARLIN_FUZZ_CHECK(second->tensors[i].name == header->tensors[i].name);
    MARLIN_FUZZ_CHECK(second->tensors[i].dtype == header->tensors[i].dtype);
    MARLIN_FUZZ_CHECK(second->tensors[i].shape == header->tensors[i].shape);
  }
  return 0;
}
