// Row-wise operations: embedding lookup, norm, addition, RoPE, GLU, append to the KV cache. Rows
// are processed through small fp32 buffers of kPiece elements.
#include "backends/cpu/decoder/cpu_decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "backends/cpu/attention/paged_rows.h"
#include "backends/cpu/gemm/gemm_driver.h"
#include "backends/cpu/pack/prepared_panels.h"
#include "base/checked.h"
#include "base/function_ref.h"
#include "base/macros.h"
#include "plan/step/indices.h"

namespace marlin::cpu {
namespace {

/// Elements of a row that are widened to fp32 at a time.
constexpr int64_t kPiece = 512;

const SegmentKernel* SegmentKernelOf([[maybe_unused]] Isa level) {
#if defined(__x86_64__)
  if (level == Isa::kAmx) return &amx::kSegmentKernel;
#endif
  return nullptr;
}

template <typename View>
auto At(const View& view, int64_t index) {
  using Byte = std::conditional_t<std::is_same_v<View, TensorView>, const uint8_t, uint8_t>;
  return static_cast<Byte*>(view.data()) + index * DTypeBytes(view.dtype());
}

/// Row `i` of a view of rank 2, or of rank 3 with its first two dimensions flattened.
template <typename View>
auto RowOf(const View& view, int64_t i) {
  if (view.rank() == 2) return At(view, i * view.stride(0));
  return At(view, i / view.dim(1) * view.stride(0) + i % view.dim(1) * view.stride(1));
}

int64_t RowCount(const TensorView& view) {
  return view.rank() == 2 ? view.dim(0) : view.dim(0) * view.dim(1);
}

void ConvertRun(const DecoderKernels& kernels, const uint8_t* from, DType from_type, int64_t count,
                uint8_t* to, DType to_type) {
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<size_t>(count * DTypeBytes(to_type)));
    return;
  }
  float piece[kPiece];
  for (int64_t i = 0; i < count; i += kPiece) {
    const int64_t run = std::min(kPiece, count - i);
    kernels.widen(from + i * DTypeBytes(from_type), from_type, run, piece);
    kernels.narrow(piece, run, to_type, to + i * DTypeBytes(to_type));
  }
}

/// Element `first` of a row.
template <typename View>
auto PieceOf(const View& view, int64_t row, int64_t first) {
  return RowOf(view, row) + first * DTypeBytes(view.dtype());
}

/// Calls body(first row, last row) on runs of rows of `columns` elements; in parallel if that is
/// worth a fork and join.
template <typename Body>
void ForRows(ThreadPool& pool, int64_t rows, int64_t columns, const Body& body) {
  // Processing this many elements takes about as long as a fork and join.
  constexpr int64_t kElementsPerTask = 8192;
  const int64_t per_task = std::max<int64_t>(kElementsPerTask / std::max<int64_t>(columns, 1), 1);
  const int64_t tasks = CeilDivide(rows, per_task);
  if (tasks <= 1) return body(int64_t{0}, rows);
  pool.Run(tasks, [&](int64_t task, int) {
    body(task * per_task, std::min(rows, (task + 1) * per_task));
  });
}

/// Calls body(row, first column, columns) for the pieces of all rows.
template <typename Body>
void ForPieces(ThreadPool& pool, const TensorView& rows, const Body& body) {
  ForRows(pool, rows.dim(0), rows.dim(1), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      for (int64_t i = 0; i < rows.dim(1); i += kPiece) {
        body(row, i, std::min(kPiece, rows.dim(1) - i));
      }
    }
  });
}

}  // namespace

const DecoderKernels& DecoderKernelsOf(Isa level) {
  switch (level) {
#if defined(__x86_64__)
    case Isa::kAmx:
    case Isa::kAvx512:
      return avx512::kDecoderKernels;
    case Isa::kAvx2:
      return avx2::kDecoderKernels;
#elif defined(__aarch64__)
    case Isa::kNeon:
      return neon::kDecoderKernels;
#endif
    default:
      return scalar::kDecoderKernels;
  }
}

CpuDecoder::CpuDecoder(Isa level, ThreadPool& pool)
    : level_(level),
      pool_(pool),
      kernels_(DecoderKernelsOf(level)),
      segment_kernel_(SegmentKernelOf(level)),
      exact_(ExactKernelsOf(level)) {}

Status CpuDecoder::Run(const LookUpRowsCall& call, const OperationContext& /*context*/) const {
  const TensorView& table = call.table;
  const MutableTensorView& out = call.out;
  MARLIN_RETURN_IF_ERROR(CheckIndices("ids", call.ids, table.dim(0)));
  ForRows(pool_, out.dim(0), out.dim(1), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      ConvertRun(kernels_, RowOf(table, IndexAt(call.ids, row)), table.dtype(), out.dim(1),
                 RowOf(out, row), out.dtype());
    }
  });
  return {};
}

Status CpuDecoder::Run(const LookUpWeightRowsCall& call,
                       const OperationContext& /*context*/) const {
  const MutableTensorView& out = call.out;
  MARLIN_RETURN_IF_ERROR(CheckIndices("ids", call.ids, call.table.spec.n));
  const PanelView view = static_cast<const PreparedPanels&>(call.table).View(0);
  const int64_t columns = out.dim(1);
  pool_.Run(out.dim(0), [&](int64_t row, int) {
    const int64_t id = IndexAt(call.ids, row);
    float decoded[kBlockRows * kChunkK];
    for (int64_t i = 0; i < columns; i += kChunkK) {
      exact_.decode_block(view, id / kBlockRows, i / kChunkK, decoded);
      kernels_.narrow(decoded + id % kBlockRows * kChunkK, std::min<int64_t>(kChunkK, columns - i),
                      out.dtype(), At(out, row * out.stride(0) + i));
    }
  });
  return {};
}

Status CpuDecoder::Run(const ConvertCall& call, const OperationContext& /*context*/) const {
  const int64_t columns = call.x.dim(call.x.rank() - 1);
  ForRows(pool_, RowCount(call.x), columns, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      ConvertRun(kernels_, RowOf(call.x, row), call.x.dtype(), columns, RowOf(call.out, row),
                 call.out.dtype());
    }
  });
  return {};
}

namespace {

Status AppendRows(const DecoderKernels& kernels, ThreadPool& pool, const AppendToCacheCall& call) {
  const PagedCache& cache = call.cache;
  const PagedRows rows(call.rows, cache);
  MARLIN_RETURN_IF_ERROR(rows.Check(1));
  const int64_t key_elements = cache.kv_heads * cache.page_tokens * cache.key_dim;
  // Appends row `row` of `from` to a page, whose array for that view begins at first_element.
  const auto append = [&](const TensorView& from, int64_t first_element, int64_t row,
                          uint8_t* page) {
    const int64_t features = from.dim(2);
    const int64_t place = rows.Position(row) % cache.page_tokens;
    for (int64_t head = 0; head < cache.kv_heads; ++head) {
      const int64_t element = first_element + (head * cache.page_tokens + place) * features;
      ConvertRun(kernels, RowOf(from, row * cache.kv_heads + head), from.dtype(), features,
                 page + element * DTypeBytes(cache.type), cache.type);
    }
  };
  const int64_t columns = cache.kv_heads * (cache.key_dim + cache.value_dim);
  ForRows(pool, call.keys.dim(0), columns, [&](int64_t first, int64_t last) {
    for (int64_t row = first, sequence = 0; row < last; ++row) {
      while (rows.FirstRow(sequence + 1) <= row) ++sequence;
      uint8_t* const page = rows.PageAt(sequence, rows.Position(row));
      append(call.keys, 0, row, page);
      if (!cache.values_in_keys) append(call.values, key_elements, row, page);
    }
  });
  return {};
}

}  // namespace

Status CpuDecoder::Run(const AppendToCacheCall& call, const OperationContext& /*context*/) const {
  return AppendRows(kernels_, pool_, call);
}

namespace {

void NormalizeRow(const DecoderKernels& kernels, const RmsNormCall& call, int64_t row) {
  const TensorView& x = call.x;
  const int64_t columns = call.weight.dim(0);
  float piece[kPiece];
  float weights[kPiece];
  const uint8_t* from = RowOf(x, row);
  double squares = 0;
  for (int64_t i = 0; i < columns; i += kPiece) {
    const int64_t count = std::min(kPiece, columns - i);
    kernels.widen(from + i * DTypeBytes(x.dtype()), x.dtype(), count, piece);
    squares += static_cast<double>(kernels.sum_of_squares(piece, count));
  }
  const double mean = squares / static_cast<double>(columns);
  const auto factor = static_cast<float>(1.0 / std::sqrt(mean + static_cast<double>(call.epsilon)));
  uint8_t* to = RowOf(call.out, row);
  for (int64_t i = 0; i < columns; i += kPiece) {
    const int64_t count = std::min(kPiece, columns - i);
    kernels.widen(from + i * DTypeBytes(x.dtype()), x.dtype(), count, piece);
    kernels.widen(At(call.weight, i), call.weight.dtype(), count, weights);
    kernels.scale(piece, factor, weights, count, piece);
    kernels.narrow(piece, count, call.out.dtype(), to + i * DTypeBytes(call.out.dtype()));
  }
}

}  // namespace

Status CpuDecoder::Run(const RmsNormCall& call, const OperationContext& /*context*/) const {
  ForRows(pool_, RowCount(call.x), call.weight.dim(0), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) NormalizeRow(kernels_, call, row);
  });
  return {};
}

Status CpuDecoder::Run(const AddToCall& call, const OperationContext& /*context*/) const {
  ForPieces(pool_, call.x, [&](int64_t row, int64_t first, int64_t count) {
    float sum[kPiece];
    float added[kPiece];
    kernels_.widen(PieceOf(call.x, row, first), call.x.dtype(), count, sum);
    kernels_.widen(PieceOf(call.y, row, first), call.y.dtype(), count, added);
    kernels_.add_scaled(added, call.scale, count, sum);
    kernels_.narrow(sum, count, call.x.dtype(), PieceOf(call.x, row, first));
  });
  return {};
}

namespace {

/// Applies RoPE to heads, kPiece pairs at a time so that no width needs an allocation. `start` is
/// the first element of a head.
struct HeadTurner {
  const DecoderKernels& kernels;
  const MutableTensorView& x;
  bool interleaved;
  int64_t pairs;
  float cosine[kPiece];
  float sine[kPiece];
  float turned[2][kPiece];
  float natural[2 * kPiece];

  void TurnToken(const RotaryEmbedding& rotary, int64_t token, int32_t position) {
    for (int64_t first = 0; first < pairs; first += kPiece) {
      const int64_t count = std::min(kPiece, pairs - first);
      kernels.angles(rotary.inverse_frequencies.As<float>() + first, position,
                     rotary.attention_factor, count, cosine, sine);
      for (int64_t head = 0; head < x.dim(1); ++head) {
        Rotate(token * x.stride(0) + head * x.stride(1), first, count);
      }
    }
  }

  void Rotate(int64_t start, int64_t first, int64_t count) {
    if (interleaved) return TurnInterleaved(start + 2 * first, count);
    for (int64_t half = 0; half < 2; ++half) {
      kernels.widen(At(x, start + half * pairs + first), x.dtype(), count, turned[half]);
    }
    kernels.rotate(cosine, sine, count, turned[0], turned[1]);
    for (int64_t half = 0; half < 2; ++half) {
      kernels.narrow(turned[half], count, x.dtype(), At(x, start + half * pairs + first));
    }
  }

  void TurnInterleaved(int64_t start, int64_t count) {
    kernels.widen(At(x, start), x.dtype(), 2 * count, natural);
    for (int64_t i = 0; i < 2 * count; ++i) turned[i % 2][i / 2] = natural[i];
    kernels.rotate(cosine, sine, count, turned[0], turned[1]);
    for (int64_t i = 0; i < 2 * count; ++i) natural[i] = turned[i % 2][i / 2];
    kernels.narrow(natural, 2 * count, x.dtype(), At(x, start));
  }
};

}  // namespace

Status CpuDecoder::Run(const ApplyRotaryCall& call, const OperationContext& /*context*/) const {
  const MutableTensorView& x = call.x;
  const RotaryEmbedding& rotary = call.rotary;
  MARLIN_RETURN_IF_ERROR(CheckIndices("positions", call.positions, kPositionLimit));
  ForRows(pool_, x.dim(0), x.dim(1) * x.dim(2), [&](int64_t first_token, int64_t last_token) {
    HeadTurner turner{kernels_, x, rotary.interleaved, rotary.inverse_frequencies.dim(0), {}, {},
                      {},       {}};
    for (int64_t token = first_token; token < last_token; ++token) {
      turner.TurnToken(rotary, token, static_cast<int32_t>(IndexAt(call.positions, token)));
    }
  });
  return {};
}

namespace {

/// Reads, and perhaps changes, pieces of a row: `body`(values, count).
void ForPiecesOfRow(const DecoderKernels& kernels, const MutableTensorView& x, int64_t row,
                    bool writes, FunctionRef<void(float*, int64_t)> body) {
  float piece[kPiece];
  const int64_t columns = x.dim(x.rank() - 1);
  for (int64_t i = 0; i < columns; i += kPiece) {
    const int64_t count = std::min(kPiece, columns - i);
    uint8_t* const at = PieceOf(x, row, i);
    kernels.widen(at, x.dtype(), count, piece);
    body(piece, count);
    if (writes) kernels.narrow(piece, count, x.dtype(), at);
  }
}

void CenterRow(const DecoderKernels& kernels, const MutableTensorView& x, int64_t row) {
  double sum = 0;
  ForPiecesOfRow(kernels, x, row, false, [&](const float* piece, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(piece[i]);
  });
  const auto mean = static_cast<float>(sum / static_cast<double>(x.dim(1)));
  ForPiecesOfRow(kernels, x, row, true, [&](float* piece, int64_t count) {
    for (int64_t i = 0; i < count; ++i) piece[i] -= mean;
  });
}

float FactorAt(const PositionScale& scale, int64_t position) {
  const int64_t periods = (position + scale.offset) / scale.period;
  return 1.0F + scale.beta * std::log1p(static_cast<float>(periods));
}

}  // namespace

Status CpuDecoder::Run(const CenterRowsCall& call, const OperationContext& /*context*/) const {
  ForRows(pool_, call.x.dim(0), call.x.dim(1), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) CenterRow(kernels_, call.x, row);
  });
  return {};
}

Status CpuDecoder::Run(const ScaleByPositionCall& call, const OperationContext& /*context*/) const {
  const MutableTensorView& x = call.x;
  MARLIN_RETURN_IF_ERROR(CheckIndices("positions", call.positions, kPositionLimit));
  ForRows(pool_, RowCount(x), x.dim(2), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const float factor = FactorAt(call.scale, IndexAt(call.positions, row / x.dim(1)));
      ForPiecesOfRow(kernels_, x, row, true, [&](float* piece, int64_t count) {
        for (int64_t i = 0; i < count; ++i) piece[i] *= factor;
      });
    }
  });
  return {};
}

Status CpuDecoder::Run(const AddRmsNormCall& call, const OperationContext& context) const {
  MARLIN_RETURN_IF_ERROR(Run(AddToCall{call.block, call.residual, 1.0F}, context));
  return Run(RmsNormCall{call.residual, call.weight, call.epsilon, call.out}, context);
}

Status CpuDecoder::Run(const RotateAndAppendCall& call, const OperationContext& context) const {
  return RunUnfused(call, [&](const auto& part) { return Run(part, context); });
}

Status CpuDecoder::Run(const ApplyGateCall& call, const OperationContext& /*context*/) const {
  ForPieces(pool_, call.out, [&](int64_t row, int64_t first, int64_t count) {
    float gates[kPiece];
    float ups[kPiece];
    kernels_.widen(PieceOf(call.gate, row, first), call.gate.dtype(), count, gates);
    kernels_.widen(PieceOf(call.up, row, first), call.up.dtype(), count, ups);
    kernels_.gate(call.options, gates, ups, count, gates);
    kernels_.narrow(gates, count, call.out.dtype(), PieceOf(call.out, row, first));
  });
  return {};
}

namespace {

void GateHeads(const DecoderKernels& kernels, const ApplyOutputGateCall& call, int64_t row) {
  float piece[kPiece];
  const MutableTensorView& x = call.x;
  for (int64_t i = 0; i < x.dim(2); i += kPiece) {
    const int64_t count = std::min(kPiece, x.dim(2) - i);
    uint8_t* const at = PieceOf(x, row, i);
    kernels.widen(at, x.dtype(), count, piece);
    kernels.times_sigmoid(reinterpret_cast<const float*>(PieceOf(call.gate, row, i)), count, piece);
    kernels.narrow(piece, count, x.dtype(), at);
  }
}

}  // namespace

Status CpuDecoder::Run(const ApplyOutputGateCall& call, const OperationContext& /*context*/) const {
  ForRows(pool_, RowCount(call.x), call.x.dim(2), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) GateHeads(kernels_, call, row);
  });
  return {};
}

Status CpuDecoder::Run(const ApplySigmoidCall& call, const OperationContext& /*context*/) const {
  const MutableTensorView& x = call.x;
  ForRows(pool_, x.dim(0), x.dim(1), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      float* values = x.As<float>() + row * x.stride(0);
      for (int64_t i = 0; i < x.dim(1); ++i) values[i] = 1.0F / (1.0F + std::exp(-values[i]));
    }
  });
  return {};
}

Status CpuDecoder::Run(const ScaleAndCapCall& call, const OperationContext& /*context*/) const {
  const MutableTensorView& x = call.x;
  ForRows(pool_, x.dim(0), x.dim(1), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      float* values = x.As<float>() + row * x.stride(0);
      for (int64_t i = 0; i < x.dim(1); ++i) values[i] *= call.scale;
      if (call.softcap != 0.0F) kernels_.cap(call.softcap, x.dim(1), values);
    }
  });
  return {};
}

Status CpuDecoder::Run(const ScaleInputsCall& call, const OperationContext& /*context*/) const {
  const MutableTensorView& x = call.x;
  ForRows(pool_, x.dim(0), x.dim(1), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      float* const weight = call.weights.As<float>() + row;
      float* const values = x.As<float>() + row * x.stride(0);
      for (int64_t i = 0; i < x.dim(1); ++i) values[i] *= *weight;
      *weight = 1.0F;
    }
  });
  return {};
}

}  // namespace marlin::cpu
