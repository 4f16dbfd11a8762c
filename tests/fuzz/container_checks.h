// Postconditions of a checkpoint in one file that opened: its tensors lie inside its files, and
// modules, small files and an import work or give an error.
#pragma once

#include <set>
#include <string>

#include "base/json.h"
#include "checkpoint/checkpoint_impl.h"
#include "fuzz_target.h"
#include "marlin/checkpoint.h"
#include "temporary_folder.h"

namespace marlin::fuzz {

/// Loading more than this would test the memory of the machine: a file declares few bytes of codes
/// for many values only where its type does.
inline constexpr int64_t kMostBytes = 64 << 20;

inline void CheckTensors(const Checkpoint& checkpoint, int64_t file_bytes) {
  const Checkpoint::Impl& impl = CheckpointAccess::Get(checkpoint);
  std::set<std::string> names;
  for (size_t i = 0; i < impl.tensors.size(); ++i) {
    const TensorInfo& tensor = impl.tensors[i];
    MARLIN_FUZZ_CHECK(names.insert(tensor.name).second);
    MARLIN_FUZZ_CHECK(tensor.bytes == tensor.shape.ElementCount() * DTypeBytes(tensor.dtype));
    MARLIN_FUZZ_CHECK(tensor.offset >= 0 && tensor.offset <= file_bytes);
    if (!impl.computed.contains(i)) MARLIN_FUZZ_CHECK(tensor.offset + tensor.bytes <= file_bytes);
    if (tensor.bytes > kMostBytes) continue;
    const auto view = checkpoint.Tensor(tensor.name);
    MARLIN_FUZZ_CHECK(view.ok() && view->ByteCount() == tensor.bytes);
  }
}

inline void CheckModules(const Checkpoint& checkpoint) {
  std::set<std::string> names;
  for (const QuantizedModule& module : checkpoint.modules()) {
    MARLIN_FUZZ_CHECK(names.insert(module.name).second);
    if (StoredBytes(module.spec) > kMostBytes) continue;
    const auto weights = checkpoint.Weights(module.name);
    if (!weights.ok()) {
      CheckError(weights.status());
      continue;
    }
    MARLIN_FUZZ_CHECK(weights->spec == module.spec);
  }
}

/// Opens `content` as a file of this name and checks everything.
inline void CheckContainer(const char* name, std::string_view content) {
  const TemporaryFolder folder;
  const std::string path = folder.Path(name);
  folder.Write(name, content);
  const auto checkpoint = Checkpoint::Open(path);
  if (!checkpoint.ok()) {
    CheckError(checkpoint.status());
    return;
  }
  CheckTensors(*checkpoint, static_cast<int64_t>(content.size()));
  CheckModules(*checkpoint);
  if (!checkpoint->config_json().empty()) {
    MARLIN_FUZZ_CHECK(ParseJsonObject(checkpoint->config_json(), "config").ok());
  }
  for (const char* file : {"tokenizer.json", "tokenizer_config.json"}) {
    const auto text = checkpoint->ReadFile(file);
    if (!text.ok()) CheckError(text.status());
  }
  ImportCheckpointOptions options;
  options.dry_run = true;
  const auto report = ImportCheckpoint(path, folder.Path("out"), options);
  if (!report.ok()) CheckError(report.status());
}

}  // namespace marlin::fuzz
