// "*.toy": "TOYC", then a safetensors image whose metadata holds config.json.
#include "base/macros.h"
#include "checkpoint/files/safetensors.h"
#include "checkpoint/module_reader.h"

namespace marlin {

OpenReader OpenPlain;
OpenReader OpenToyContainer;

Result<std::unique_ptr<const ModuleReader>> OpenToyContainer(TensorStore& store,
                                                             const QuantMethod& method) {
  constexpr int64_t kMagicBytes = 4;
  const CheckpointFile& file = store.files.front();
  const std::span<const std::byte> image(file.mapping->data() + kMagicBytes,
                                         static_cast<size_t>(file.mapping->size() - kMagicBytes));
  MARLIN_ASSIGN_OR_RETURN(SafetensorsHeader header, ParseSafetensors(image, store.path, file.name));
  store.tensors = std::move(header.tensors);
  for (TensorInfo& tensor : store.tensors) tensor.offset += kMagicBytes;
  MARLIN_RETURN_IF_ERROR(store.SetConfig(header.metadata["config"], store.path));
  MARLIN_RETURN_IF_ERROR(SortTensors(&store));
  return OpenPlain(store, method);
}

}  // namespace marlin
