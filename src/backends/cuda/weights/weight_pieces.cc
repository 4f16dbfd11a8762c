#include "backends/cuda/weights/weight_pieces.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>

#include "backends/cuda/layout/tile_layout.h"
#include "base/checked.h"
#include "base/macros.h"
#include "layout/weights_shapes.h"

namespace marlin::cuda {
namespace {

constexpr int64_t kPieceBytes = int64_t{8} << 20;
constexpr int64_t kTaskBytes = int64_t{128} << 10;
constexpr int64_t kArrayAlignment = 256;

/// An array of the weights, and where a piece has the address of its copy.
struct UploadedArray {
  ColumnArray array;
  const void* WeightPiece::*address;
};
constexpr UploadedArray kArrays[] = {
    {&QuantizedWeights::codes, &WeightPiece::words},
    {&QuantizedWeights::metadata, &WeightPiece::metadata},
    {&QuantizedWeights::scales, &WeightPiece::scales},
    {&QuantizedWeights::zeros, &WeightPiece::zeros},
    {&QuantizedWeights::biases, &WeightPiece::biases},
};

/// A copy by one thread.
struct CopyTask {
  ColumnArray array;
  JoinedWindow window;
  std::byte* to;
};

/// Sends pieces of one set of joined columns.
class PieceSender {
 public:
  PieceSender(std::span<const WeightColumns> parts, WeightUpload& upload)
      : parts_(parts), model_(*parts.front().weights), upload_(upload) {}

  Status Send(EnqueuePiece enqueue) {
    const int64_t joined = CountColumns(parts_);
    const int64_t most =
        std::max(kPieceBytes / std::max<int64_t>(ColumnBytes(), 1) / kBlockOutputs * kBlockOutputs,
                 int64_t{kBlockOutputs});
    for (int64_t expert = 0; expert < model_.spec.experts; ++expert) {
      for (int64_t first = 0; first < joined; first += most) {
        WeightPiece piece;
        piece.expert = expert;
        piece.first_column = first;
        piece.columns = std::min(most, joined - first);
        MARLIN_RETURN_IF_ERROR(SendPiece(piece, enqueue));
      }
    }
    return {};
  }

 private:
  /// Rows of an expert in an array; 0: the weights do not have it.
  int64_t RowsOf(ColumnArray array) const {
    const TensorView& view = model_.*array;
    return view.empty() ? 0 : view.dim(1);
  }
  int64_t SizeOf(ColumnArray array) const { return DTypeBytes((model_.*array).dtype()); }

  /// Bytes of one column of an expert, in all arrays.
  int64_t ColumnBytes() const {
    int64_t bytes = 0;
    for (const UploadedArray& uploaded : kArrays) {
      bytes += RowsOf(uploaded.array) * SizeOf(uploaded.array);
    }
    return bytes;
  }

  Status SendPiece(const WeightPiece& piece, EnqueuePiece enqueue) {
    std::array<int64_t, std::size(kArrays)> offsets{};
    int64_t bytes = 0;
    for (size_t i = 0; i < offsets.size(); ++i) {
      offsets[i] = bytes;
      const ColumnArray array = kArrays[i].array;
      bytes += RoundUp(RowsOf(array) * piece.columns * SizeOf(array), kArrayAlignment);
    }
    return upload_.Send(
        bytes,
        [&](std::byte* host) {
          std::vector<CopyTask> tasks;
          for (size_t i = 0; i < offsets.size(); ++i) {
            AddTasks(kArrays[i].array, piece, host + offsets[i], &tasks);
          }
          return RunCopies(tasks, piece.columns, bytes);
        },
        [&](const uint8_t* device, cudaStream_t stream) {
          WeightPiece sent = piece;
          for (size_t i = 0; i < offsets.size(); ++i) {
            if (RowsOf(kArrays[i].array) > 0) sent.*kArrays[i].address = device + offsets[i];
          }
          return enqueue(sent, stream);
        });
  }

  bool IsTransposed(ColumnArray array) const {
    return std::any_of(parts_.begin(), parts_.end(), [&](const WeightColumns& part) {
      return !((*part.weights).*array).IsContiguous();
    });
  }

  /// Tasks that copy an array of a piece: runs of rows, or of columns where those are contiguous.
  void AddTasks(ColumnArray array, const WeightPiece& piece, std::byte* to,
                std::vector<CopyTask>* tasks) const {
    constexpr int64_t kLeastColumns = 32;  // As many as CopyJoined transposes at a time.
    const int64_t rows = RowsOf(array);
    const int64_t size = SizeOf(array);
    if (rows == 0) return;
    int64_t task_rows = std::max<int64_t>(kTaskBytes / (piece.columns * size), 1);
    int64_t task_columns = piece.columns;
    if (IsTransposed(array)) {
      task_rows = rows;
      task_columns = RoundUp(std::max<int64_t>(kTaskBytes / (rows * size), 1), kLeastColumns);
    }
    for (int64_t row = 0; row < rows; row += task_rows) {
      for (int64_t column = 0; column < piece.columns; column += task_columns) {
        const JoinedWindow window = {piece.expert * rows + row, std::min(task_rows, rows - row),
                                     piece.first_column + column,
                                     std::min(task_columns, piece.columns - column)};
        tasks->push_back({array, window, to + (row * piece.columns + column) * size});
      }
    }
  }

  Status RunCopies(std::span<const CopyTask> tasks, int64_t columns, int64_t bytes) {
    const bool check = !GetFormatInfo(model_.spec.format).quantized;
    std::atomic<bool> finite = true;
    upload_.RunTasks(static_cast<int64_t>(tasks.size()), bytes, [&](int64_t i, int) {
      const CopyTask& task = tasks[static_cast<size_t>(i)];
      CopyJoined(parts_, task.array, task.window, columns, task.to);
      if (check && !IsFinite(task, columns)) finite = false;
    });
    if (finite) return {};
    return Status(Code::kNonFiniteInput, "prepare: a weight is NaN or Inf");
  }

  /// Whether the numbers that a task copied are finite.
  bool IsFinite(const CopyTask& task, int64_t columns) const {
    const DType type = (model_.*task.array).dtype();
    for (int64_t row = 0; row < task.window.rows; ++row) {
      const std::byte* const copied = task.to + row * columns * DTypeBytes(type);
      if (FindNonFinite(TensorView(copied, type, {task.window.columns})) >= 0) return false;
    }
    return true;
  }

  const std::span<const WeightColumns> parts_;
  const QuantizedWeights& model_;
  WeightUpload& upload_;
};

/// A parameter's rows that one thread reads.
struct RangeTask {
  ColumnArray array;
  NumberRange ExpertRanges::*range;
  int64_t expert;
  JoinedWindow window;
  NumberRange found;
};

void FindRange(std::span<const WeightColumns> parts, RangeTask* task) {
  ForEachPart(parts, task->window, [&](const WeightColumns& part, int64_t) {
    const TensorView& view = (*part.weights).*task->array;
    const int64_t size = DTypeBytes(view.dtype());
    for (int64_t row = 0; row < task->window.rows; ++row) {
      const int64_t at = (task->window.first_row + row) * view.dim(2) + part.first;
      task->found.Add(view.As<uint8_t>() + at * size, view.dtype(), part.step, part.count);
    }
  });
}

}  // namespace

Status SendPieces(std::span<const WeightColumns> columns, WeightUpload& upload,
                  EnqueuePiece enqueue) {
  return PieceSender(columns, upload).Send(enqueue);
}

std::vector<ExpertRanges> RangesOf(std::span<const WeightColumns> columns, WeightUpload& upload) {
  constexpr int64_t kTaskElements = int64_t{4} << 10;
  struct Parameter {
    ColumnArray array;
    NumberRange ExpertRanges::*range;
  };
  constexpr Parameter kParameters[] = {{&QuantizedWeights::scales, &ExpertRanges::scales},
                                       {&QuantizedWeights::zeros, &ExpertRanges::zeros},
                                       {&QuantizedWeights::biases, &ExpertRanges::biases}};
  const QuantizedWeights& model = *columns.front().weights;
  const int64_t joined = CountColumns(columns);
  std::vector<ExpertRanges> ranges(static_cast<size_t>(model.spec.experts));
  std::vector<RangeTask> tasks;
  int64_t bytes = 0;
  for (const Parameter& parameter : kParameters) {
    const TensorView& view = model.*parameter.array;
    if (view.empty() || joined == 0) continue;
    const int64_t rows = view.dim(1);
    const int64_t step = std::max<int64_t>(kTaskElements / joined, 1);
    bytes += model.spec.experts * rows * joined * DTypeBytes(view.dtype());
    for (int64_t expert = 0; expert < model.spec.experts; ++expert) {
      for (int64_t row = 0; row < rows; row += step) {
        const JoinedWindow window = {expert * rows + row, std::min(step, rows - row), 0, joined};
        tasks.push_back({parameter.array, parameter.range, expert, window, {}});
      }
    }
  }
  upload.RunTasks(static_cast<int64_t>(tasks.size()), bytes,
                  [&](int64_t i, int) { FindRange(columns, &tasks[static_cast<size_t>(i)]); });
  for (const RangeTask& task : tasks) {
    (ranges[static_cast<size_t>(task.expert)].*task.range).Add(task.found);
  }
  return ranges;
}

}  // namespace marlin::cuda
