#include "backends/cpu/recurrent/recurrent_sequences.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "base/errors.h"
#include "base/macros.h"
#include "plan/step/indices.h"

namespace marlin::cpu {
namespace {

#define MARLIN_RECURRENT_KERNELS(level) \
  { level::RunDeltaHead, level::RunMamba2Head, level::RunMamba2Norm, level::RunShortConvolution }
constexpr RecurrentKernels kScalar = MARLIN_RECURRENT_KERNELS(scalar);
#if defined(__x86_64__)
constexpr RecurrentKernels kAvx2 = MARLIN_RECURRENT_KERNELS(avx2);
constexpr RecurrentKernels kAvx512 = MARLIN_RECURRENT_KERNELS(avx512);
#elif defined(__aarch64__)
constexpr RecurrentKernels kNeon = MARLIN_RECURRENT_KERNELS(neon);
#endif
#undef MARLIN_RECURRENT_KERNELS

}  // namespace

const RecurrentKernels& RecurrentKernelsOf(Isa level) {
  switch (level) {
#if defined(__x86_64__)
    case Isa::kAmx:
    case Isa::kAvx512:
      return kAvx512;
    case Isa::kAvx2:
      return kAvx2;
#elif defined(__aarch64__)
    case Isa::kNeon:
      return kNeon;
#endif
    default:
      return kScalar;
  }
}

Status RecurrentSequences::Prepare() {
  MARLIN_RETURN_IF_ERROR(CheckFirstRows(rows_.first_rows, rows_.positions.dim(0)));
  for (int64_t s = 0; s < count(); ++s) {
    int32_t* const taking = taking_ + FirstRow(s);
    counts_[s] = 0;
    for (int64_t row = FirstRow(s); row < FirstRow(s + 1); ++row) {
      const int32_t position = rows_.positions.As<int32_t>()[row];
      if (position >= 0) taking[counts_[s]++] = static_cast<int32_t>(row);
    }
    MARLIN_RETURN_IF_ERROR(CheckPages(s));
  }
  return {};
}

float* RecurrentSequences::Page(int64_t sequence, int64_t which) const {
  const int64_t page = rows_.pages.As<int32_t>()[2 * sequence + which];
  const int64_t slab = page < 0 ? -1 : page / states_.slab_pages;
  if (slab < 0 || slab >= static_cast<int64_t>(states_.slabs.size())) return nullptr;
  auto* const data = static_cast<float*>(states_.slabs[static_cast<size_t>(slab)]);
  if (data == nullptr) return nullptr;
  return data + page % states_.slab_pages * states_.page_stride + states_.first_element;
}

Status RecurrentSequences::CheckPages(int64_t sequence) const {
  for (int64_t which = 0; which < 2; ++which) {
    const int32_t page = rows_.pages.As<int32_t>()[2 * sequence + which];
    if (Page(sequence, which) != nullptr) continue;
    if (page == -1 && (which == 0 || counts_[sequence] == 0)) continue;
    return Invalid(fmt::format("pages: no page {} for sequence {}", page, sequence));
  }
  return {};
}

void RecurrentSequences::ClearOthers(int64_t sequence, const MixedColumn& out,
                                     int64_t columns) const {
  if (counts_[sequence] == FirstRow(sequence + 1) - FirstRow(sequence)) return;
  const auto bytes = static_cast<size_t>(columns * DTypeBytes(out.type));
  for (int64_t row = FirstRow(sequence); row < FirstRow(sequence + 1); ++row) {
    if (rows_.positions.As<int32_t>()[row] < 0) std::memset(out.At(row), 0, bytes);
  }
}

void KeepInputs(const ConvRows& conv, const ConvChannels& channels, float* after) {
  const int64_t kept = conv.width - 1;
  for (int64_t i = 0; i < kept; ++i) {
    const int64_t from = i + conv.count;
    float* const to = after + i * conv.channels;
    if (from >= kept) {
      std::copy_n(channels.rows + conv.rows[from - kept] * channels.stride, channels.count, to);
    } else if (channels.before == nullptr) {
      std::fill_n(to, channels.count, 0.0F);
    } else if (const float* const old = channels.before + from * conv.channels; old != to) {
      std::copy_n(old, channels.count, to);
    }
  }
}

void CopyState(const float* before, int64_t elements, float* after) {
  if (before == nullptr) {
    std::fill_n(after, elements, 0.0F);
  } else if (before != after) {
    std::copy_n(before, elements, after);
  }
}

}  // namespace marlin::cpu
