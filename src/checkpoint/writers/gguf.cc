// GGUF, version 3: one file with the metadata of the model and its tokenizer, or shards, of which
// the first has these metadata and all have their place among the shards. Quantized modules
// keep their codes, in the block type that holds them (gguf_blocks.h), and two levels of scales
// where one has such (gguf_super_blocks.h); vectors and routers are widened to fp32, as programs
// that run these files expect them.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/checked.h"
#include "base/macros.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/codes/foreign_codes.h"
#include "checkpoint/codes/unpack.h"
#include "checkpoint/convert/conversion.h"
#include "checkpoint/writers/gguf_parts.h"
#include "checkpoint/writers/gguf_plan.h"
#include "layout/input_transform.h"
#include "layout/parameters.h"
#include "layout/plain_weights.h"
#include "layout/slice_expert.h"
#include "marlin/layout.h"
#include "marlin/quantize.h"

namespace marlin {
namespace {

constexpr const char* kSingleFile = "model.gguf";  // Its name until it is renamed.

class GgufWriter {
 public:
  GgufWriter(Io& io, const Checkpoint& checkpoint, const GgufPlan& plan, const Progress& progress)
      : io_(io),
        checkpoint_(checkpoint),
        source_(CheckpointAccess::Get(checkpoint)),
        plan_(plan),
        progress_(progress) {}

  Status Write(OutputDirectory* directory) {
    for (const GgufShard& shard : plan_.shards) {
      MARLIN_RETURN_IF_ERROR(WriteShard(shard, directory));
    }
    return {};
  }

 private:
  Status WriteShard(const GgufShard& shard, OutputDirectory* directory) {
    const std::string name = shard.name.empty() ? kSingleFile : shard.name;
    MARLIN_ASSIGN_OR_RETURN(file_, io_.Create(JoinPath(directory->path(), name)));
    data_begin_ = static_cast<int64_t>(shard.header.size());
    for (size_t i = shard.first; i < shard.end; ++i) {
      const GgufOutput& output = plan_.outputs[i];
      MARLIN_RETURN_IF_ERROR(WriteTensor(output));
      const int64_t padding = RoundUp(output.bytes, kGgufAlignment) - output.bytes;
      const std::array<std::byte, kGgufAlignment> zeros{};
      MARLIN_RETURN_IF_ERROR(WriteAt(output, output.bytes, zeros.data(), padding));
      done_ += output.dims.ElementCount();
      if (progress_) progress_(done_, plan_.parameters);
    }
    // The header comes last: a file that has one is complete.
    MARLIN_RETURN_IF_ERROR(
        io_.Write(file_, 0, shard.header.data(), static_cast<int64_t>(shard.header.size())));
    MARLIN_ASSIGN_OR_RETURN(const FileInfo written, io_.SyncAndClose(std::move(file_)));
    directory->AddWritten(name, written);
    return {};
  }

  Status WriteAt(const GgufOutput& output, int64_t at, const void* data, int64_t bytes) {
    if (bytes == 0) return {};
    return io_.Write(file_, data_begin_ + output.offset + at, data, bytes);
  }

  /// Writes rows [first, first + count) of a source's matrix to the tensor's, which begins `at`
  /// bytes into the tensor, as far as it holds them.
  Status WriteRows(const GgufOutput& output, int64_t at, int64_t first, int64_t count,
                   int64_t row_bytes, const std::byte* rows) {
    if (output.places.empty()) {
      return WriteAt(output, at + first * row_bytes, rows, count * row_bytes);
    }
    for (int64_t r = 0; r < count;) {
      const int64_t place = Place(output, first + r);
      int64_t run = 1;
      while (place >= 0 && r + run < count && Place(output, first + r + run) == place + run) ++run;
      if (place >= 0) {
        MARLIN_RETURN_IF_ERROR(
            WriteAt(output, at + place * row_bytes, rows + r * row_bytes, run * row_bytes));
      }
      r += run;
    }
    return {};
  }
  static int64_t Place(const GgufOutput& output, int64_t row) {
    return output.places.empty() ? row : output.places[static_cast<size_t>(row)];
  }

  Status WriteTensor(const GgufOutput& output) {
    if (output.record != nullptr) {
      return InGgufSource(checkpoint_, "module", output.record->module.name, WriteModule(output));
    }
    if (!output.values.empty()) {
      return WriteAt(output, 0, output.values.data(), output.bytes);
    }
    if (output.in_out) return WriteFused(output);
    if (output.place.one_stack) return WriteStack(output);
    const int64_t bytes = output.bytes / static_cast<int64_t>(output.tensors.size());
    for (size_t i = 0; i < output.tensors.size(); ++i) {
      MARLIN_ASSIGN_OR_RETURN(const LoadedTensor loaded,
                              LoadedTensor::Load(source_, output.tensors[i]));
      MARLIN_RETURN_IF_ERROR(
          WritePlain(output, static_cast<int64_t>(i) * bytes, bytes, loaded.view()));
    }
    return {};
  }

  Status WriteStack(const GgufOutput& output) {
    MARLIN_ASSIGN_OR_RETURN(const LoadedTensor loaded,
                            LoadedTensor::Load(source_, output.tensors.front()));
    const TensorView& stack = loaded.view();
    const int64_t experts = std::max<int64_t>(stack.dim(0), 1);
    const int64_t source = stack.ByteCount() / experts;
    for (int64_t e = 0; e < stack.dim(0); ++e) {
      const TensorView matrix(stack.As<std::byte>() + e * source, stack.dtype(),
                              {stack.dim(1), stack.dim(2)});
      MARLIN_RETURN_IF_ERROR(
          WritePlain(output, e * (output.bytes / experts), output.bytes / experts, matrix));
    }
    return {};
  }

  /// Writes `bytes` bytes of a tensor, or of one matrix of a stack.
  Status WritePlain(const GgufOutput& output, int64_t at, int64_t bytes, const TensorView& view) {
    if (bytes == 0) return {};
    const bool same = view.dtype() == output.type.dtype;
    const bool moved = !output.columns.empty() || output.place.values != GgufPlace::Values::kSame;
    const int64_t rows = output.places.empty() ? 1 : view.dim(0);
    const int64_t row_bytes = view.ElementCount() / rows * output.type.bytes;
    if (same && !moved) return WriteRows(output, at, 0, rows, row_bytes, view.As<std::byte>());
    std::vector<std::byte> values(static_cast<size_t>(view.ElementCount() * output.type.bytes));
    if (same) {
      std::memcpy(values.data(), view.data(), values.size());
    } else {
      auto* const wide = reinterpret_cast<float*>(values.data());
      for (int64_t i = 0; i < view.ElementCount(); ++i) wide[i] = ParameterAt(view, i);
    }
    if (moved) ToGgufValues(output, view.rank() == 0 ? 1 : view.dim(view.rank() - 1), &values);
    return WriteRows(output, at, 0, rows, row_bytes, values.data());
  }

  /// Matrices [in, out] of one tensor, or biases, become rows.
  Status WriteFused(const GgufOutput& output) {
    MARLIN_ASSIGN_OR_RETURN(const LoadedTensor loaded,
                            LoadedTensor::Load(source_, output.tensors.front()));
    const TensorView& view = loaded.view();
    const int64_t experts = view.dim(0);
    const int64_t k = view.rank() == 3 ? view.dim(1) : 1;
    const int64_t n = view.dim(view.rank() - 1);
    if (view.ElementCount() == 0) return {};
    const int64_t element = DTypeBytes(view.dtype());
    const bool same = view.dtype() == output.type.dtype;
    MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer rows, AlignedBuffer::Allocate(n * k * element));
    std::vector<float> wide(same ? 0 : static_cast<size_t>(n * k));
    for (int64_t e = 0; e < experts; ++e) {
      TransposeElements(view.As<std::byte>() + e * k * n * element, 1, k, n, element, rows.data());
      auto* data = rows.As<std::byte>();
      for (size_t i = 0; i < wide.size(); ++i) {
        wide[i] = ParameterAt(data, view.dtype(), static_cast<int64_t>(i));
      }
      if (!same) data = reinterpret_cast<std::byte*>(wide.data());
      MARLIN_RETURN_IF_ERROR(
          WriteRows(output, e * (output.bytes / experts), 0, n, k * output.type.bytes, data));
    }
    return {};
  }

  Status WriteModule(const GgufOutput& output) {
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights stored,
                            checkpoint_.Weights(output.record->module.name));
    const bool two_levels = output.type.quantized() && output.type.format->super_group_size > 0;
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights dense,
                            ConvertTo(two_levels ? stored.spec : PlainSpec(stored.spec), stored));
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights, FoldInput(dense));
    const int64_t bytes = output.bytes / weights.spec.experts;
    for (int64_t e = 0; e < weights.spec.experts; ++e) {
      MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights slice, SliceExpert(weights, e));
      MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights matrix, GgufColumns(output, slice));
      if (output.global_scale) {
        MARLIN_ASSIGN_OR_RETURN(const float factor, GgufGlobalScale(matrix));
        MARLIN_RETURN_IF_ERROR(WriteAt(output, e * bytes, &factor, sizeof(factor)));
      } else {
        MARLIN_RETURN_IF_ERROR(output.type.quantized() ? WriteBlocks(output, e * bytes, matrix)
                                                       : WriteFloats(output, e * bytes, matrix));
      }
    }
    for (const PartTensor& part : source_.reader->Parts(*output.record)) {
      source_.Release(part.tensor);
    }
    return {};
  }

  Status WriteBlocks(const GgufOutput& output, int64_t at, const QuantizedWeights& matrix) {
    MARLIN_ASSIGN_OR_RETURN(const GgufEncoder encoder, GgufEncoder::Make(matrix, output.type));
    std::vector<uint8_t> rows;
    return ForEachColumns(matrix, encoder.flip(),
                          [&](int64_t first, int64_t count, const uint8_t* codes, int64_t stride) {
                            rows.resize(static_cast<size_t>(count * encoder.row_bytes()));
                            for (int64_t c = 0; c < count; ++c) {
                              if (Place(output, first + c) < 0) continue;
                              encoder.EncodeColumn(first + c, codes + c * stride,
                                                   rows.data() + c * encoder.row_bytes());
                            }
                            return WriteRows(output, at, first, count, encoder.row_bytes(),
                                             reinterpret_cast<const std::byte*>(rows.data()));
                          });
  }

  Status WriteFloats(const GgufOutput& output, int64_t at, const QuantizedWeights& matrix) {
    const WeightsSpec& spec = matrix.spec;
    const int64_t element = output.type.bytes;
    MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer rows,
                            AlignedBuffer::Allocate(spec.n * spec.k * element));
    TransposeElements(matrix.codes.As<std::byte>(), 1, spec.k, spec.n, element, rows.data());
    return WriteRows(output, at, 0, spec.n, spec.k * element, rows.As<std::byte>());
  }

  Io& io_;
  const Checkpoint& checkpoint_;
  const Checkpoint::Impl& source_;
  const GgufPlan& plan_;
  const Progress& progress_;
  FileHandle file_;  ///< The shard that is written, and where its data begin.
  int64_t data_begin_ = 0;
  int64_t done_ = 0;
};

}  // namespace

WriteContainer WriteGguf;

Result<std::vector<SkippedTensor>> WriteGguf(Io& io, const Checkpoint& checkpoint,
                                             const ContainerOutput& output) {
  MARLIN_ASSIGN_OR_RETURN(GgufPlan plan, PlanGguf(checkpoint, output.shard_bytes));
  const Checkpoint::Impl& source = CheckpointAccess::Get(checkpoint);
  OutputDirectory::Options options;
  options.overwrite = output.overwrite;
  if (output.shard_bytes == 0) options.file = kSingleFile;
  MARLIN_ASSIGN_OR_RETURN(options.source, SourceFiles(io, source));
  MARLIN_ASSIGN_OR_RETURN(
      OutputDirectory directory,
      OutputDirectory::Begin(io, output.path,
                             Fingerprint(source, fmt::format("gguf {}", output.shard_bytes)),
                             options));
  MARLIN_RETURN_IF_ERROR(GgufWriter(io, checkpoint, plan, output.progress).Write(&directory));
  MARLIN_RETURN_IF_ERROR(directory.Commit());
  return std::move(plan.files);
}

}  // namespace marlin
