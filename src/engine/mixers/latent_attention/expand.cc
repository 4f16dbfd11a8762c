#include "engine/mixers/latent_attention/expand.h"

#include <algorithm>

#include "base/checked.h"
#include "model/placement.h"
#include "ops/device/device.h"
#include "plan/step/decoder_backend.h"

namespace marlin {
namespace {

/// Bytes of expanded heads, at most: in memory of the host, where tasks are small, and on a GPU,
/// which the tiles of some heads have to occupy.
constexpr int64_t kMostHostBytes = int64_t{64} << 20;
constexpr int64_t kMostDeviceBytes = int64_t{512} << 20;

/// A pass expands latents if it needs at most so much of the products of the other form. Measured
/// on a CPU (decision 0026): at 0.80, a prompt of 96 tokens with DeepSeek's shape, it takes three
/// quarters of the time, and at 0.88, one of 48 tokens, a little more time.
constexpr double kMostProducts = 0.8;

}  // namespace

bool HasExpandLatents(const Device& device) {
  const DecoderBackend* const decoder = Internals::Impl(device).decoder();
  return decoder != nullptr && decoder->Has(DecoderOperation::kExpandLatents);
}

int64_t ExpandedBytes(int64_t token_bytes, int64_t tokens, bool host_memory) {
  // Tokens of the largest page of any device, which the others divide.
  constexpr int64_t kPage = 256;
  const int64_t most = host_memory ? kMostHostBytes : kMostDeviceBytes;
  const int64_t rounded = RoundUp(std::clamp(tokens, int64_t{1}, INT64_MAX - kPage), kPage);
  return std::min(SaturatingProduct(token_bytes, rounded), most);
}

ExpandedMemory::ExpandedMemory(const DecoderConfig& config, DType cache_type, Accuracy accuracy,
                               bool host_memory)
    : heads_(config.shape.heads),
      type_(accuracy == Accuracy::kExact ? DType::kF32 : ExpandedType(cache_type)),
      bytes_(0) {
  const Dimensions& shape = config.shape;
  token_bytes_ = (shape.nope_dim + shape.rope_dim + shape.v_dim) * DTypeBytes(type_);
  bytes_ =
      ExpandedBytes(SaturatingProduct(heads_, token_bytes_), config.max_positions, host_memory);
}

int64_t ExpandedMemory::HeadsAtATime(int64_t count, int64_t page_tokens) const {
  const int64_t of_head = SaturatingProduct(SaturatingProduct(count, page_tokens), token_bytes_);
  const int64_t most = std::min(bytes_ / std::max<int64_t>(of_head, 1), heads_);
  // Equal parts: the last one would occupy a device less.
  return most < 1 ? 0 : CeilDivide(heads_, CeilDivide(heads_, most));
}

bool ExpandsLatents(const Device& device, const DecoderConfig& config,
                    std::span<const PassSequence> sequences, Determinism determinism) {
  if (!HasExpandLatents(device)) return false;
  if (determinism == Determinism::kBatchInvariant) return false;
  const Dimensions& shape = config.shape;
  double pairs = 0;
  double rows = 0;
  double keys = 0;
  for (const PassSequence& sequence : sequences) {
    const auto own = static_cast<double>(sequence.rows);
    const auto length = static_cast<double>(sequence.length);
    pairs += own * (length - own) + own * (own + 1) / 2;
    rows += own;
    keys += length;
  }
  const auto with_kv_b = static_cast<double>(shape.kv_rank * (shape.nope_dim + shape.v_dim));
  const auto of_latents = static_cast<double>(2 * shape.kv_rank + shape.rope_dim);
  const auto of_heads = static_cast<double>(shape.nope_dim + shape.rope_dim + shape.v_dim);
  return rows > 0 && pairs * of_heads + keys * with_kv_b <=
                         kMostProducts * (pairs * of_latents + rows * with_kv_b);
}

ExpandedTables TablesOf(std::span<const PassSequence> sequences,
                        std::span<const int32_t> block_tables, int64_t page_tokens) {
  ExpandedTables tables;
  tables.block_tables.assign(block_tables.size(), -1);
  const size_t blocks = sequences.empty() ? 0 : block_tables.size() / sequences.size();
  for (size_t s = 0; s < sequences.size(); ++s) {
    const int64_t length = sequences[s].length;
    for (int64_t first = 0; first < length; first += page_tokens) {
      const size_t at = s * blocks + static_cast<size_t>(first / page_tokens);
      if (block_tables[at] < 0) continue;
      tables.block_tables[at] = static_cast<int32_t>(tables.pages.size());
      tables.pages.push_back(block_tables[at]);
      tables.tokens.push_back(static_cast<int32_t>(std::min(page_tokens, length - first)));
    }
  }
  return tables;
}

}  // namespace marlin
