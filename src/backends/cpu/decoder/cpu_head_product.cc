// HeadProduct: the weights of a head are like keys, and rows of x like queries, so that the kernel
// that scores keys computes it. A task is 32 outputs of a head for all rows. Few rows read 16-bit
// weights in place; for more, a task widens them to fp32 once.
#include <algorithm>

#include "backends/cpu/decoder/cpu_decoder.h"
#include "base/checked.h"

namespace marlin::cpu {
namespace {

/// Rows of x that are multiplied by the weights of a task at a time.
constexpr int64_t kHeadRows = 32;
/// Up to this many rows read weights in place.
constexpr int64_t kHeadRowsInPlace = 8;

int64_t PaddedInputs(const HeadProductCall& call) { return RoundUp(call.x.dim(2), kFeaturePad); }

/// Floats of a worker: rows of x, widened weights, products, and the kernel's ranges.
int64_t WorkerFloats(int64_t inputs) {
  return (kHeadRows + kKeyBlock) * inputs + kHeadRows * kKeyBlock + 2 * kHeadRows;
}

/// One task at a time, in one worker's memory.
class HeadWorker {
 public:
  HeadWorker(const DecoderKernels& kernels, const HeadProductCall& call, float* memory)
      : kernels_(kernels), call_(call), inputs_(PaddedInputs(call)) {
    x_ = memory;
    weights_ = x_ + kHeadRows * inputs_;
    products_ = weights_ + kKeyBlock * inputs_;
    ranges_ = reinterpret_cast<KeyRange*>(products_ + kHeadRows * kKeyBlock);
  }

  void Run(int64_t head, int64_t first, int64_t count) {
    const KeyRows weights = Weights(head, first, count);
    std::fill_n(ranges_, kHeadRows, KeyRange{0, static_cast<int32_t>(count)});
    const int64_t all = call_.x.dim(0);
    for (int64_t row = 0; row < all; row += kHeadRows) {
      AttentionRows rows{};
      rows.count = std::min(kHeadRows, all - row);
      rows.depth = inputs_;
      rows.queries = x_;
      rows.ranges = ranges_;
      rows.scores = products_;
      for (int64_t i = 0; i < rows.count; ++i) Widen(call_.x, row + i, head, x_ + i * inputs_);
      kernels_.score(rows, weights, 1.0F, {});
      const MutableTensorView& out = call_.out;
      for (int64_t i = 0; i < rows.count; ++i) {
        const int64_t at = (row + i) * out.stride(0) + head * out.stride(1) + first;
        kernels_.narrow(products_ + i * kKeyBlock, count, out.dtype(),
                        out.As<uint8_t>() + at * DTypeBytes(out.dtype()));
      }
    }
  }

 private:
  /// Widens a row to fp32 and pads it with zeros.
  void Widen(const TensorView& from, int64_t i, int64_t j, float* to) const {
    const int64_t inputs = from.dim(2);
    const int64_t at = i * from.stride(0) + j * from.stride(1);
    kernels_.widen(from.As<uint8_t>() + at * DTypeBytes(from.dtype()), from.dtype(), inputs, to);
    std::fill(to + inputs, to + inputs_, 0.0F);
  }

  KeyRows Weights(int64_t head, int64_t first, int64_t count) const {
    const TensorView& weights = call_.weights;
    if (weights.dim(2) == inputs_ && call_.x.dim(0) <= kHeadRowsInPlace) {
      const int64_t at = head * weights.stride(0) + first * weights.stride(1);
      return {weights.As<uint8_t>() + at * DTypeBytes(weights.dtype()), weights.stride(1),
              weights.dtype(), count};
    }
    for (int64_t i = 0; i < count; ++i) Widen(weights, head, first + i, weights_ + i * inputs_);
    return {weights_, inputs_, DType::kF32, count};
  }

  const DecoderKernels& kernels_;
  const HeadProductCall& call_;
  int64_t inputs_;
  float* x_;
  float* weights_;
  float* products_;
  KeyRange* ranges_;
};

}  // namespace

int64_t CpuDecoder::WorkspaceBytes(const HeadProductCall& call) const {
  return pool_.worker_count() * WorkerFloats(PaddedInputs(call)) * int64_t{sizeof(float)};
}

Status CpuDecoder::Run(const HeadProductCall& call, const OperationContext& context) const {
  const int64_t outputs = call.weights.dim(1);
  const int64_t blocks = CeilDivide(outputs, kKeyBlock);
  const int64_t floats = WorkerFloats(PaddedInputs(call));
  auto* const memory = static_cast<float*>(context.workspace);
  pool_.Run(call.x.dim(1) * blocks, [&](int64_t task, int worker) {
    const int64_t first = task % blocks * kKeyBlock;
    HeadWorker(kernels_, call, memory + worker * floats)
        .Run(task / blocks, first, std::min(kKeyBlock, outputs - first));
  });
  return {};
}

}  // namespace marlin::cpu
