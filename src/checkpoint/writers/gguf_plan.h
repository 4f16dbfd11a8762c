// The plan of a GGUF file: its tensors, where their values come from, and the headers of its
// shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/module_writer.h"
#include "checkpoint/readers/gguf/gguf_names.h"
#include "checkpoint/writers/gguf_blocks.h"
#include "marlin/checkpoint.h"
#include "marlin/status.h"

namespace marlin {

/// Bytes of which tensors and headers are multiples.
inline constexpr int64_t kGgufAlignment = 32;

/// One tensor of the file and where its values come from.
struct GgufOutput {
  std::string name;
  GgufStored type;
  Shape dims;          ///< In C order.
  int64_t offset = 0;  ///< From the beginning of the data.
  int64_t bytes = 0;
  GgufPlace place;   ///< Where it belongs.
  int64_t rows = 0;  ///< Rows of a matrix of it.
  /// The row that each row of the source becomes, -1 for one that it does not hold; empty: all in
  /// order.
  std::vector<int64_t> places;
  std::vector<int64_t> columns;          ///< The parts of the source's rows; empty: in order.
  bool in_out = false;                   ///< The source stores each matrix as [in, out].
  const ModuleRecord* record = nullptr;  ///< The module, or null.
  std::vector<size_t> tensors;           ///< Tensors of the source, one for each expert.
  std::vector<float> values;             ///< Values that no tensor of the source holds.
  bool global_scale = false;             ///< The factors of the module.
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
