#include "backends/cpu/pack/prepared_panels.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "backends/cpu/pack/pack_panels.h"
#include "base/checked.h"
#include "base/macros.h"
#include "layout/sparse_24.h"
#include "layout/weights_shapes.h"

namespace marlin::cpu {
namespace {

/// Blocks packed together, chunk by chunk: their columns share cache lines and pages of the source.
constexpr int64_t kTaskBlocks = 4;
constexpr int64_t kTableBytes = 256 * sizeof(float);

/// Writes the values of all stored codes, replicated over the unused index bits.
void FillTable(const QuantizedWeights& weights, float* table) {
  const int bits = GetFormatInfo(weights.spec.format).bits;
  if (bits > 8) {
    std::fill(table, table + 256, 0.0f);
    return;
  }
  const std::span<const float> values = CodeValues(weights);
  const size_t flips =
      weights.spec.sparsity == Sparsity::k24 ? CodeOfZero(values).value_or(0) : size_t{0};
  for (size_t i = 0; i < 256; ++i) table[i] = values[(i ^ flips) % values.size()];
}

}  // namespace

void PreparedPanels::LayOut() {
  const FormatInfo& info = GetFormatInfo(spec.format);
  layout_.format = spec.format;
  layout_.scale_type = spec.scale_type;
  layout_.zero_type = spec.zero_type;
  layout_.global_scale_divides = spec.global_scale_divides;
  traits.sparse = spec.sparsity == Sparsity::k24;
  layout_.bits = traits.sparse ? -info.bits : info.bits;
  layout_.blocks = CeilDivide(spec.n, kBlockRows);
  layout_.chunks = CeilDivide(spec.k, kChunkK);
  const int64_t padded_k = layout_.chunks * kChunkK;
  // A single group covers the padding too, so that no chunk straddles its end.
  layout_.group_size =
      GroupCount(spec) <= 1 ? std::max<int64_t>(padded_k, kChunkK) : spec.group_size;
  layout_.groups = info.quantized ? CeilDivide(padded_k, layout_.group_size) : 0;
  const bool two_levels = spec.super_group_size > 0;
  layout_.groups_per_super_group =
      two_levels && GroupCount(spec) > 1 ? spec.super_group_size / spec.group_size : 1;
  layout_.super_groups =
      two_levels ? CeilDivide(layout_.groups, layout_.groups_per_super_group) : 0;
  const auto array_bytes = [&](int64_t groups, DType type) {
    return RoundUp(layout_.blocks * groups * kBlockRows * DTypeBytes(type), kBufferAlignment);
  };
  const auto group_bytes = [&](DType type, bool present) {
    return present ? array_bytes(layout_.groups, type) : int64_t{0};
  };
  codes_stride_ = layout_.blocks * layout_.chunks * ChunkBytes(layout_.bits);
  scales_stride_ = group_bytes(StoredScaleDType(spec), info.quantized);
  zeros_stride_ = group_bytes(ScaleDType(spec.zero_type), spec.has_zeros);
  biases_stride_ = group_bytes(StoredBiasDType(spec), spec.has_biases);
  super_scales_stride_ = array_bytes(layout_.super_groups, ScaleDType(spec.scale_type));
  super_biases_stride_ = spec.has_biases ? super_scales_stride_ : 0;
  scales_offset_ = spec.experts * codes_stride_;
  zeros_offset_ = scales_offset_ + spec.experts * scales_stride_;
  biases_offset_ = zeros_offset_ + spec.experts * zeros_stride_;
  super_scales_offset_ = biases_offset_ + spec.experts * biases_stride_;
  super_biases_offset_ = super_scales_offset_ + spec.experts * super_scales_stride_;
  table_offset_ = super_biases_offset_ + spec.experts * super_biases_stride_;
  globals_offset_ = table_offset_ + kTableBytes;
  bytes = table_offset_;
  image_bytes_ = RoundUp(globals_offset_ + spec.experts * int64_t{sizeof(float)}, kBufferAlignment);
}

Result<std::shared_ptr<const PreparedPanels>> PreparedPanels::Make(
    std::span<const WeightColumns> columns, bool validated, const Backend* backend,
    ThreadPool& pool) {
  const BlockColumns blocks(columns);
  const QuantizedWeights& model = *columns.front().weights;
  auto panels = std::make_shared<PreparedPanels>();
  panels->spec = model.spec;
  panels->spec.n = blocks.n();
  panels->backend = backend;
  const WeightsSpec& spec = panels->spec;
  panels->LayOut();
  MARLIN_ASSIGN_OR_RETURN(panels->buffer_, AlignedBuffer::Allocate(panels->image_bytes_));
  panels->base_ = panels->buffer_.As<uint8_t>();
  std::memset(panels->buffer_.data() + panels->table_offset_, 0,
              static_cast<size_t>(panels->image_bytes_ - panels->table_offset_));
  FillTable(model, panels->buffer_.As<float>(panels->table_offset_));
  auto* globals = panels->buffer_.As<float>(panels->globals_offset_);
  for (int64_t expert = 0; expert < spec.experts; ++expert) {
    globals[expert] = spec.has_global_scale ? model.global_scale.As<float>()[expert] : 1.0f;
  }
  const int64_t tasks = CeilDivide(panels->layout_.blocks, kTaskBlocks);
  const bool check = !validated && !GetFormatInfo(spec.format).quantized;
  std::atomic<bool> finite{true};
  pool.Run(spec.experts * tasks, [&](int64_t task, int) {
    const int64_t first = task % tasks * kTaskBlocks;
    if (!panels->PackBlocks(blocks, task / tasks, first, check)) finite = false;
  });
  if (!finite) return Status(Code::kNonFiniteInput, "prepare: a weight is NaN or Inf");
  return std::shared_ptr<const PreparedPanels>(std::move(panels));
}

Result<std::shared_ptr<const PreparedPanels>> PreparedPanels::FromImage(const PreparedImage& image,
                                                                        const Backend* backend) {
  auto panels = std::make_shared<PreparedPanels>();
  panels->spec = image.spec;
  panels->backend = backend;
  panels->LayOut();
  if (panels->image_bytes_ != static_cast<int64_t>(image.data.size())) {
    return Status(Code::kMalformedFile, "prepared weights: expected " +
                                            std::to_string(panels->image_bytes_) + " bytes, got " +
                                            std::to_string(image.data.size()));
  }
  panels->base_ = reinterpret_cast<const uint8_t*>(image.data.data());
  panels->owner_ = image.owner;
  return std::shared_ptr<const PreparedPanels>(std::move(panels));
}

bool PreparedPanels::PackBlocks(const BlockColumns& columns, int64_t expert, int64_t first_block,
                                bool check) const {
  const int64_t count = std::min(kTaskBlocks, layout_.blocks - first_block);
  BlockPacker packers[kTaskBlocks];
  for (int64_t i = 0; i < count; ++i) packers[i] = BlockPacker(columns, first_block + i, expert);
  const std::span<const BlockPacker> blocks(packers, static_cast<size_t>(count));
  const int64_t chunk_bytes = ChunkBytes(layout_.bits);
  uint8_t* base = buffer_.As<uint8_t>();
  uint8_t* codes = base + expert * codes_stride_ + first_block * layout_.chunks * chunk_bytes;
  bool finite = true;
  for (int64_t chunk = 0; chunk < layout_.chunks; ++chunk) {
    if (chunk + 1 < layout_.chunks) BlockPacker::Prefetch(blocks, chunk + 1);
    for (int64_t i = 0; i < count; ++i) {
      uint8_t* out = codes + (i * layout_.chunks + chunk) * chunk_bytes;
      packers[i].PackChunk(chunk, out);
      finite = finite && (!check || ChunkIsFinite(spec.format, out));
    }
  }
  const auto pack_groups = [&](const TensorView QuantizedWeights::*array, DType type,
                               int64_t groups, int64_t offset, int64_t stride) {
    if (stride == 0) return;
    const int64_t block_bytes = groups * kBlockRows * DTypeBytes(type);
    for (int64_t i = 0; i < count; ++i) {
      packers[i].PackGroups(array, groups,
                            base + offset + expert * stride + (first_block + i) * block_bytes);
    }
  };
  const int64_t groups = layout_.groups;
  pack_groups(&QuantizedWeights::scales, StoredScaleDType(spec), groups, scales_offset_,
              scales_stride_);
  pack_groups(&QuantizedWeights::zeros, ScaleDType(spec.zero_type), groups, zeros_offset_,
              zeros_stride_);
  pack_groups(&QuantizedWeights::biases, StoredBiasDType(spec), groups, biases_offset_,
              biases_stride_);
  const DType super_type = ScaleDType(spec.scale_type);
  pack_groups(&QuantizedWeights::super_scales, super_type, layout_.super_groups,
              super_scales_offset_, super_scales_stride_);
  pack_groups(&QuantizedWeights::super_biases, super_type, layout_.super_groups,
              super_biases_offset_, super_biases_stride_);
  return finite;
}

PanelView PreparedPanels::View(int64_t expert) const {
  PanelView view = layout_;
  const uint8_t* base = base_;
  view.codes = base + expert * codes_stride_;
  view.scales = scales_stride_ > 0 ? base + scales_offset_ + expert * scales_stride_ : nullptr;
  view.zeros = zeros_stride_ > 0 ? base + zeros_offset_ + expert * zeros_stride_ : nullptr;
  view.biases = biases_stride_ > 0 ? base + biases_offset_ + expert * biases_stride_ : nullptr;
  view.super_scales = super_scales_stride_ > 0
                          ? base + super_scales_offset_ + expert * super_scales_stride_
                          : nullptr;
  view.super_biases = super_biases_stride_ > 0
                          ? base + super_biases_offset_ + expert * super_biases_stride_
                          : nullptr;
  view.table = reinterpret_cast<const float*>(base + table_offset_);
  view.global_scale = reinterpret_cast<const float*>(base + globals_offset_)[expert];
  return view;
}

}  // namespace marlin::cpu
