// The plan of a GGUF file: its tensors, where their values come from, and the headers of its
// shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/module_writer.h"
#include "checkpoint/writers/gguf_blocks.h"
#include "marlin/checkpoint.h"
#include "marlin/status.h"

namespace marlin {

/// Bytes of which tensors and headers are multiples.
inline constexpr int64_t kGgufAlignment = 32;

/// gpt-oss: gate has the even rows of the source, up the odd ones.
enum class GgufHeldRows : uint8_t { kAll, kEven, kOdd };

/// One tensor of the file and where its values come from.
struct GgufOutput {
  std::string name;
  GgufStored type;
  Shape dims;          ///< In C order.
  int64_t offset = 0;  ///< From the beginning of the data.
  int64_t bytes = 0;
  int64_t head_dim = 0;                    ///< Not 0: rows are stored in the order of HeadRow.
  GgufHeldRows rows = GgufHeldRows::kAll;  ///< The source's rows that the tensor holds.
  bool in_out = false;                     ///< The source stores each matrix as [in, out].
  const ModuleRecord* record = nullptr;    ///< The module, or null.
  std::vector<size_t> tensors;             ///< Tensors of the source, one for each expert.
  std::vector<float> values;               ///< Values that no tensor of the source holds.
  bool global_scale = false;               ///< The factors of the module.
};

/// One file of the output.
struct GgufShard {
  std::string name;
  size_t first = 0;  ///< Its first tensor.
  size_t end = 0;
  std::string header;
};

struct GgufPlan {
  std::vector<GgufOutput> outputs;
  std::vector<GgufShard> shards;     ///< In order; one without a name if they are one file.
  std::vector<SkippedTensor> files;  ///< Files of the source that it does not hold.
  int64_t parameters = 0;
};

/// Plans a file, or shards of at most `shard_bytes`, unless it is 0. Errors: kUnsupported and
/// kMalformedFile naming the module or tensor.
Result<GgufPlan> PlanGguf(const Checkpoint& checkpoint, int64_t shard_bytes);

/// A status with the source and the name of a module or tensor; ok stays ok.
Status InGgufSource(const Checkpoint& checkpoint, std::string_view what, const std::string& name,
                    const Status& status);

}  // namespace marlin
