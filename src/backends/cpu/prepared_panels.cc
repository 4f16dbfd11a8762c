#include "backends/cpu/prepared_panels.h"

#include <algorithm>

#include "backends/cpu/pack_panels.h"
#include "base/checked.h"
#include "base/macros.h"
#include "base/mutant.h"

namespace marlin::cpu {
namespace {

/// Blocks whose chunks are packed in turn: their columns share cache lines and pages of a row.
constexpr int64_t kRunBlocks = 4;

/// The values of all codes, replicated over the index bits that a format leaves unused.
void FillTable(const QuantizedWeights& weights, float* table) {
  const int bits = GetFormatInfo(weights.spec.format).bits;
  if (bits > 8) {
    std::fill(table, table + 256, 0.0f);
    return;
  }
  const std::span<const float> values = weights.codebook.empty()
                                            ? FormatValues(weights.spec.format)
                                            : std::span<const float>(weights.codebook);
  for (size_t i = 0; i < 256; ++i)
    table[i] = values[i % MARLIN_MUTATE(9, values.size(), values.size() - 1)];
}

const uint8_t* ExpertData(const TensorView& view, int64_t experts, int64_t expert) {
  return view.As<uint8_t>() + view.ByteCount() / experts * expert;
}

}  // namespace

Result<std::shared_ptr<const PreparedPanels>> PreparedPanels::Make(const QuantizedWeights& weights,
                                                                   const Backend* backend,
                                                                   ThreadPool& pool) {
  const WeightsSpec& spec = weights.spec;
  const FormatInfo& info = GetFormatInfo(spec.format);
  auto panels = std::make_shared<PreparedPanels>();
  PanelView& layout = panels->layout_;
  panels->spec = spec;
  panels->backend = backend;
  layout.format = spec.format;
  layout.scale_type = spec.scale_type;
  layout.bits = info.bits;
  layout.blocks = CeilDivide(spec.n, kBlockRows);
  layout.chunks = CeilDivide(spec.k, kChunkK);
  const int64_t padded_k = layout.chunks * kChunkK;
  const int64_t groups = GroupCount(spec);
  // One group covers the padding too, so that a chunk never straddles it.
  layout.group_size = groups <= 1 ? std::max<int64_t>(padded_k, kChunkK) : spec.group_size;
  layout.groups = info.quantized ? CeilDivide(padded_k, layout.group_size) : 0;

  const auto group_bytes = [&](int64_t element_bytes, bool present) {
    return present ? RoundUp(layout.blocks * layout.groups * kBlockRows * element_bytes,
                             kBufferAlignment)
                   : int64_t{0};
  };
  const int64_t scale_bytes = DTypeBytes(ScaleDType(spec.scale_type));
  const int64_t bias_bytes = DTypeBytes(BiasDType(spec.scale_type));
  panels->codes_stride_ = layout.blocks * layout.chunks * ChunkBytes(info.bits);
  panels->scales_stride_ = group_bytes(scale_bytes, info.quantized);
  panels->zeros_stride_ = group_bytes(2, spec.has_zeros);
  panels->biases_stride_ = group_bytes(bias_bytes, spec.has_biases);
  panels->scales_offset_ = spec.experts * panels->codes_stride_;
  panels->zeros_offset_ = panels->scales_offset_ + spec.experts * panels->scales_stride_;
  panels->biases_offset_ = panels->zeros_offset_ + spec.experts * panels->zeros_stride_;
  const int64_t total = panels->biases_offset_ + spec.experts * panels->biases_stride_;
  MARLIN_ASSIGN_OR_RETURN(panels->buffer_, AlignedBuffer::Allocate(total));
  MARLIN_ASSIGN_OR_RETURN(panels->table_, AlignedBuffer::Allocate(256 * sizeof(float)));
  panels->bytes = total;
  FillTable(weights, panels->table_.As<float>());
  panels->global_scales_.assign(static_cast<size_t>(spec.experts), 1.0f);
  for (int64_t expert = 0; spec.has_global_scale && expert < spec.experts; ++expert) {
    panels->global_scales_[static_cast<size_t>(expert)] = weights.global_scale.As<float>()[expert];
  }

  const int64_t runs = CeilDivide(layout.blocks, kRunBlocks);
  pool.Run(spec.experts * runs, [&](int64_t task, int) {
    panels->PackRun(weights, task / runs, task % runs * kRunBlocks);
  });
  return std::shared_ptr<const PreparedPanels>(std::move(panels));
}

void PreparedPanels::PackRun(const QuantizedWeights& weights, int64_t expert,
                             int64_t first_block) const {
  const int64_t end_block = std::min(first_block + kRunBlocks, layout_.blocks);
  const int64_t chunk_bytes = ChunkBytes(layout_.bits);
  const ChunkSource source{ExpertData(weights.codes, spec.experts, expert), spec.k, spec.n,
                           layout_.bits};
  uint8_t* base = buffer_.As<uint8_t>();
  uint8_t* codes = base + expert * codes_stride_;
  for (int64_t chunk = 0; chunk < layout_.chunks; ++chunk) {
    if (chunk + 1 < layout_.chunks) {
      PrefetchChunk(source, first_block, end_block - first_block, chunk + 1);
    }
    for (int64_t block = first_block; block < end_block; ++block) {
      PackChunk(source, block, chunk, codes + (block * layout_.chunks + chunk) * chunk_bytes);
    }
  }
  const auto pack_groups = [&](const TensorView& view, int64_t offset, int64_t stride) {
    if (stride == 0) return;
    const int64_t element_bytes = DTypeBytes(view.dtype());
    for (int64_t block = first_block; block < end_block; ++block) {
      PackGroups(
          ExpertData(view, spec.experts, expert), element_bytes, GroupCount(spec), layout_.groups,
          spec.n, block,
          base + offset + expert * stride + block * layout_.groups * kBlockRows * element_bytes);
    }
  };
  pack_groups(weights.scales, scales_offset_, scales_stride_);
  pack_groups(weights.zeros, zeros_offset_, zeros_stride_);
  pack_groups(weights.biases, biases_offset_, biases_stride_);
}

PanelView PreparedPanels::View(int64_t expert) const {
  PanelView view = layout_;
  const uint8_t* base = buffer_.As<uint8_t>();
  view.codes = base + expert * codes_stride_;
  view.scales = scales_stride_ > 0
                    ? base + scales_offset_ + MARLIN_MUTATE(34, expert, 0) * scales_stride_
                    : nullptr;
  view.zeros = zeros_stride_ > 0 ? base + zeros_offset_ + expert * zeros_stride_ : nullptr;
  view.biases = biases_stride_ > 0 ? base + biases_offset_ + expert * biases_stride_ : nullptr;
  view.table = table_.As<float>();
  view.global_scale = global_scales_[static_cast<size_t>(expert)];
  return view;
}

}  // namespace marlin::cpu
