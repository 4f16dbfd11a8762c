// ExpandLatents: the kernel that scores keys multiplies latents, as queries, by 32 outputs of a
// head, as keys. A task is 32 outputs for all pages: it widens its weights to fp32 once.
#include <fmt/core.h>

#include <algorithm>

#include "backends/cpu/attention/paged_rows.h"
#include "backends/cpu/decoder/cpu_decoder.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cpu {
namespace {

/// Latents that are multiplied by the weights of a task at a time.
constexpr int64_t kLatentRows = 32;

Status Check(const ExpandLatentsCall& call) {
  for (int64_t i = 0; i < call.pages.dim(0); ++i) {
    const int32_t page = call.pages.As<int32_t>()[i];
    const int32_t tokens = call.tokens.As<int32_t>()[i];
    if (PageOf(call.latents, page) == nullptr) {
      return Status(Code::kInvalidArgument, fmt::format("pages: no page {} at {}", page, i));
    }
    if (tokens < 0 || tokens > call.latents.page_tokens) {
      return Status(Code::kInvalidArgument, fmt::format("tokens: expected 0 to {}, got {} at {}",
                                                        call.latents.page_tokens, tokens, i));
    }
  }
  return {};
}

/// The sizes of a call.
struct Sizes {
  int64_t latent;  ///< Features of a latent, which the products add up.
  int64_t padded;
  int64_t nope;
  int64_t rope;
  int64_t key_blocks;  ///< Tasks of a head's keys, at least one, and of its values.
  int64_t value_blocks;

  explicit Sizes(const ExpandLatentsCall& call)
      : latent(call.latents.value_dim),
        padded(RoundUp(latent, kFeaturePad)),
        nope(call.key_weights.dim(2)),
        rope(call.latents.key_dim - latent),
        key_blocks(std::max(CeilDivide(nope, kKeyBlock), int64_t{1})),
        value_blocks(CeilDivide(call.heads.value_dim, kKeyBlock)) {}

  int64_t tasks_per_head() const { return key_blocks + value_blocks; }
  /// Floats of a worker: latents, widened weights, products, the RoPE part, and the kernel's
  /// ranges.
  int64_t WorkerFloats() const {
    return (kLatentRows + kKeyBlock) * padded + kLatentRows * kKeyBlock +
           RoundUp(rope, kFeaturePad) + 2 * kLatentRows;
  }
};

/// One task at a time, in one worker's memory.
class LatentWorker {
 public:
  LatentWorker(const DecoderKernels& kernels, const ExpandLatentsCall& call, const Sizes& sizes,
               float* memory)
      : kernels_(kernels), call_(call), sizes_(sizes) {
    latents_ = memory;
    weights_ = latents_ + kLatentRows * sizes_.padded;
    products_ = weights_ + kKeyBlock * sizes_.padded;
    rope_ = products_ + kLatentRows * kKeyBlock;
    ranges_ = reinterpret_cast<KeyRange*>(rope_ + RoundUp(sizes_.rope, kFeaturePad));
  }

  /// Outputs [32 * block, ...) of a head's keys, and with the first ones the RoPE part.
  void RunKeys(int64_t head, int64_t block) {
    const PagedCache& heads = call_.heads;
    const int64_t first = block * kKeyBlock;
    const int64_t count = std::min(kKeyBlock, sizes_.nope - first);
    LoadKeyWeights(head, first, count);
    const int64_t begin = head * heads.page_tokens * heads.key_dim;
    ForRows([&](const uint8_t* from, uint8_t* page, int64_t token, int64_t rows) {
      const int64_t to = begin + token * heads.key_dim;
      Multiply(from, rows, count, page, to + first, heads.key_dim);
      for (int64_t row = 0; block == 0 && row < rows; ++row) {
        const int64_t at = row * call_.latents.key_dim + sizes_.latent;
        const DType type = call_.latents.type;
        kernels_.widen(from + at * DTypeBytes(type), type, sizes_.rope, rope_);
        Narrow(rope_, sizes_.rope, page, to + row * heads.key_dim + sizes_.nope);
      }
    });
  }

  void RunValues(int64_t head, int64_t block) {
    const PagedCache& heads = call_.heads;
    const int64_t first = block * kKeyBlock;
    const int64_t count = std::min(kKeyBlock, heads.value_dim - first);
    const TensorView& weights = call_.value_weights;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = head * weights.stride(0) + (first + i) * weights.stride(1);
      Widen(weights.As<uint8_t>() + at * DTypeBytes(weights.dtype()), weights.dtype(),
            weights_ + i * sizes_.padded);
    }
    const int64_t begin = heads.kv_heads * heads.page_tokens * heads.key_dim +
                          head * heads.page_tokens * heads.value_dim;
    ForRows([&](const uint8_t* from, uint8_t* page, int64_t token, int64_t rows) {
      Multiply(from, rows, count, page, begin + token * heads.value_dim + first, heads.value_dim);
    });
  }

 private:
  /// Widens the features of a latent to fp32 and pads them with zeros.
  void Widen(const uint8_t* from, DType type, float* to) const {
    kernels_.widen(from, type, sizes_.latent, to);
    std::fill(to + sizes_.latent, to + sizes_.padded, 0.0F);
  }

  void Narrow(const float* from, int64_t count, uint8_t* page, int64_t element) const {
    const DType type = call_.heads.type;
    kernels_.narrow(from, count, type, page + element * DTypeBytes(type));
  }

  /// Transposes columns [first, first + count) of a head's key weights.
  void LoadKeyWeights(int64_t head, int64_t first, int64_t count) const {
    const TensorView& weights = call_.key_weights;
    std::fill_n(weights_, kKeyBlock * sizes_.padded, 0.0F);
    for (int64_t i = 0; count > 0 && i < sizes_.latent; ++i) {
      const int64_t at = head * weights.stride(0) + i * weights.stride(1) + first;
      kernels_.widen(weights.As<uint8_t>() + at * DTypeBytes(weights.dtype()), weights.dtype(),
                     count, products_);
      for (int64_t j = 0; j < count; ++j) weights_[j * sizes_.padded + i] = products_[j];
    }
  }

  /// Calls body(latents, page of heads, first token, tokens) for up to kLatentRows tokens at a
  /// time.
  template <typename Body>
  void ForRows(const Body& body) const {
    const int64_t row_bytes = call_.latents.key_dim * DTypeBytes(call_.latents.type);
    for (int64_t i = 0; i < call_.pages.dim(0); ++i) {
      const uint8_t* const from = PageOf(call_.latents, call_.pages.As<int32_t>()[i]);
      uint8_t* const page = PageOf(call_.heads, i);
      const int64_t tokens = call_.tokens.As<int32_t>()[i];
      for (int64_t token = 0; token < tokens; token += kLatentRows) {
        body(from + token * row_bytes, page, token, std::min(kLatentRows, tokens - token));
      }
    }
  }

  /// Multiplies rows of latents by `count` outputs; row r of the results begins at element
  /// `first` + r * `stride` of the page.
  void Multiply(const uint8_t* from, int64_t rows, int64_t count, uint8_t* page, int64_t first,
                int64_t stride) const {
    if (count <= 0) return;
    const DType type = call_.latents.type;
    const int64_t row_bytes = call_.latents.key_dim * DTypeBytes(type);
    for (int64_t row = 0; row < rows; ++row) {
      Widen(from + row * row_bytes, type, latents_ + row * sizes_.padded);
    }
    std::fill_n(ranges_, rows, KeyRange{0, static_cast<int32_t>(count)});
    AttentionRows attention{};
    attention.count = rows;
    attention.depth = sizes_.padded;
    attention.queries = latents_;
    attention.ranges = ranges_;
    attention.scores = products_;
    kernels_.score(attention, {weights_, sizes_.padded, DType::kF32, count}, 1.0F, {});
    for (int64_t row = 0; row < rows; ++row) {
      Narrow(products_ + row * kKeyBlock, count, page, first + row * stride);
    }
  }

  const DecoderKernels& kernels_;
  const ExpandLatentsCall& call_;
  const Sizes& sizes_;
  float* latents_;
  float* weights_;
  float* products_;
  float* rope_;
  KeyRange* ranges_;
};

}  // namespace

int64_t CpuDecoder::WorkspaceBytes(const ExpandLatentsCall& call) const {
  return pool_.worker_count() * Sizes(call).WorkerFloats() * int64_t{sizeof(float)};
}

Status CpuDecoder::Run(const ExpandLatentsCall& call, const OperationContext& context) const {
  MARLIN_RETURN_IF_ERROR(Check(call));
  const Sizes sizes(call);
  auto* const memory = static_cast<float*>(context.workspace);
  pool_.Run(call.heads.kv_heads * sizes.tasks_per_head(), [&](int64_t task, int id) {
    LatentWorker worker(kernels_, call, sizes, memory + id * sizes.WorkerFloats());
    const int64_t head = task / sizes.tasks_per_head();
    const int64_t block = task % sizes.tasks_per_head();
    if (block < sizes.key_blocks) {
      worker.RunKeys(head, block);
    } else {
      worker.RunValues(head, block - sizes.key_blocks);
    }
  });
  return {};
}

}  // namespace marlin::cpu
