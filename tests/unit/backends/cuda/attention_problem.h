// Random operands of attention over pages, and its definition in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/attention/attention_layout.h"
#include "backends/cuda/attention/attention_plan.h"
#include "base/scalars.h"

namespace marlin::cuda {

struct AttentionCase {
  int key_dim = 128;
  int value_dim = 128;
  bool fp8 = false;
  bool bf16_queries = false;
  float softcap = 0;
  int window = 0;
  bool chunked = false;
  bool sinks = false;
  bool latent = false;  ///< Values in the keys.
  int kv_heads = 2;
  int group = 3;
  bool one_term = false;  ///< Queries and softmax weights are.

  std::string Name() const {
    return std::to_string(key_dim) + " " + std::to_string(value_dim) + (fp8 ? " e4m3" : " bf16") +
           (bf16_queries ? " bf16 queries" : "") + (one_term ? " one term" : "") +
           (latent ? " latent" : "") + " window " + std::to_string(window);
  }
};

/// Tokens of a sequence, and how many are cached before them.
struct Feed {
  int tokens;
  int before;
};

/// Where a problem's arrays are.
struct AttentionMemory {
  void* cache = nullptr;
  void* queries = nullptr;
  const void* positions = nullptr;
  const void* first_rows = nullptr;
  const void* tables = nullptr;
  const void* sinks = nullptr;
  void* out = nullptr;
};

struct AttentionProblem {
  static constexpr int kPageTokens = 2 * kCachePageTokens;

  AttentionCase of;
  std::vector<uint16_t> cache;      ///< bf16 numbers, or a code in the low byte of each.
  std::vector<float> queries;       ///< [rows, heads, key_dim]
  std::vector<int32_t> positions;   ///< [rows]
  std::vector<int32_t> first_rows;  ///< [sequences + 1]
  std::vector<int32_t> tables;      ///< [sequences, blocks]: pages in random order.
  std::vector<float> sinks;         ///< [heads]
  int blocks = 1;

  AttentionProblem(const AttentionCase& c, const std::vector<Feed>& feeds)
      : of(c), first_rows{0}, random_(5) {
    for (const Feed& feed : feeds) {
      for (int i = 0; i < feed.tokens; ++i) positions.push_back(feed.before + i);
      first_rows.push_back(static_cast<int32_t>(positions.size()));
      blocks = std::max(blocks, (feed.before + feed.tokens + kPageTokens - 1) / kPageTokens);
    }
    tables.resize(feeds.size() * static_cast<size_t>(blocks));
    std::iota(tables.begin(), tables.end(), 0);
    std::shuffle(tables.begin(), tables.end(), random_);
    cache.resize(static_cast<size_t>(PageElements()) * tables.size());
    for (uint16_t& element : cache) element = of.fp8 ? Code() : FloatToBf16(Draw());
    queries.resize(positions.size() * static_cast<size_t>(Heads() * of.key_dim));
    for (float& query : queries) {
      query = of.bf16_queries ? Bf16ToFloat(FloatToBf16(Draw())) : Draw();
    }
    for (int head = 0; head < Heads(); ++head) sinks.push_back(Draw());
  }

  int Rows() const { return static_cast<int>(positions.size()); }
  int Sequences() const { return static_cast<int>(first_rows.size()) - 1; }
  int Heads() const { return of.kv_heads * of.group; }
  int64_t PageElements() const {
    return int64_t{of.kv_heads} * kPageTokens * (of.key_dim + (of.latent ? 0 : of.value_dim));
  }
  int64_t OutElements() const { return int64_t{Rows()} * Heads() * of.value_dim; }
  float Scale() const { return 1.0F / std::sqrt(static_cast<float>(of.key_dim)); }

  /// The place in the cache of the first feature of a key or value.
  int64_t At(int sequence, int kv_head, int key, bool is_value) const {
    const int page = tables[static_cast<size_t>(sequence * blocks + key / kPageTokens)];
    const int64_t place = int64_t{kv_head} * kPageTokens + key % kPageTokens;
    const int64_t keys = int64_t{of.kv_heads} * kPageTokens * of.key_dim;
    const int64_t of_page =
        is_value && !of.latent ? keys + place * of.value_dim : place * of.key_dim;
    return page * PageElements() + of_page;
  }

  /// Arrays as a device has them.
  std::vector<uint8_t> CacheBytes() const {
    return of.fp8 ? BytesOf<uint8_t>(cache, [](uint16_t x) { return static_cast<uint8_t>(x); })
                  : BytesOf<uint16_t>(cache, [](uint16_t x) { return x; });
  }
  std::vector<uint8_t> QueryBytes() const {
    return of.bf16_queries ? BytesOf<uint16_t>(queries, [](float x) { return FloatToBf16(x); })
                           : BytesOf<float>(queries, [](float x) { return x; });
  }

  AttentionShape Shape() const {
    return {Rows(),          Sequences(),          of.kv_heads, of.group,
            of.value_dim,    blocks * kPageTokens, of.key_dim,  of.fp8,
            of.bf16_queries, of.one_term};
  }

  /// Without what a plan adds.
  AttentionArguments Arguments(const AttentionMemory& at) const {
    AttentionArguments args;
    const auto view = [&](void* data, Element type, int width) {
      RowsView rows;
      rows.data = data;
      rows.type = type;
      rows.rows = int64_t{Rows()} * Heads();
      rows.inner = Heads();
      rows.stride = int64_t{Heads()} * width;
      rows.inner_stride = width;
      return rows;
    };
    args.queries = view(at.queries, of.bf16_queries ? Element::kBf16 : Element::kF32, of.key_dim);
    args.out = view(at.out, Element::kF32, of.value_dim);
    args.sequences.positions = static_cast<const int32_t*>(at.positions);
    args.sequences.first_rows = static_cast<const int32_t*>(at.first_rows);
    args.sequences.block_tables = static_cast<const int32_t*>(at.tables);
    args.sequences.rows = Rows();
    args.sequences.count = Sequences();
    args.sequences.blocks = blocks;
    args.pages.slabs[0] = at.cache;
    args.pages.slab_count = 1;
    args.pages.slab_pages = static_cast<uint32_t>(tables.size());
    args.pages.page_stride = PageElements();
    args.pages.type = of.fp8 ? Element::kE4M3 : Element::kBf16;
    args.pages.page_tokens = kPageTokens;
    args.pages.kv_heads = args.kv_heads = of.kv_heads;
    args.pages.key_dim = args.key_dim = of.key_dim;
    args.pages.value_dim = args.value_dim = of.value_dim;
    args.pages.values_in_keys = of.latent;
    args.group = of.group;
    args.scale = Scale();
    args.softcap = of.softcap;
    args.window = of.window;
    args.chunked = of.chunked;
    args.one_term = of.one_term;
    if (of.sinks) args.sinks = static_cast<const float*>(at.sinks);
    return args;
  }

  /// [rows, heads, value_dim]
  std::vector<double> Results() const {
    std::vector<double> results(static_cast<size_t>(OutElements()));
    for (int sequence = 0; sequence < Sequences(); ++sequence) {
      for (int row = first_rows[static_cast<size_t>(sequence)];
           row < first_rows[static_cast<size_t>(sequence) + 1]; ++row) {
        for (int head = 0; head < Heads(); ++head) {
          Attend(sequence, row, head,
                 &results[static_cast<size_t>((row * Heads() + head) * of.value_dim)]);
        }
      }
    }
    return results;
  }

 private:
  template <typename To, typename Elements, typename Convert>
  static std::vector<uint8_t> BytesOf(const Elements& elements, const Convert& convert) {
    std::vector<To> converted;
    for (const auto element : elements) converted.push_back(convert(element));
    const auto* const bytes = reinterpret_cast<const uint8_t*>(converted.data());
    return {bytes, bytes + converted.size() * sizeof(To)};
  }

  float Draw() { return normal_(random_); }
  /// A code from 1/4 to 2, of either sign.
  uint16_t Code() {
    const auto bits = static_cast<uint32_t>(random_());
    return static_cast<uint16_t>((bits & 0x80U) | (0x28U + (bits >> 8) % 24));
  }
  double Cached(int64_t at) const {
    const uint16_t element = cache[static_cast<size_t>(at)];
    return of.fp8 ? Fp8E4M3ToFloat(static_cast<uint8_t>(element)) : Bf16ToFloat(element);
  }

  void Attend(int sequence, int row, int head, double* result) const {
    const int position = positions[static_cast<size_t>(row)];
    const int kv_head = head / of.group;
    int first = 0;
    if (of.window > 0) {
      first = of.chunked ? position / of.window * of.window : std::max(position - of.window + 1, 0);
    }
    const float* const query = &queries[static_cast<size_t>((row * Heads() + head) * of.key_dim)];
    std::vector<double> scores;
    double most =
        of.sinks ? sinks[static_cast<size_t>(head)] : -std::numeric_limits<double>::infinity();
    for (int key = first; key <= position; ++key) {
      const int64_t at = At(sequence, kv_head, key, false);
      double score = 0;
      for (int i = 0; i < of.key_dim; ++i) score += double{query[i]} * Cached(at + i);
      score *= double{Scale()};
      if (of.softcap != 0) score = of.softcap * std::tanh(score / of.softcap);
      scores.push_back(score);
      most = std::max(most, score);
    }
    double sum = of.sinks ? std::exp(sinks[static_cast<size_t>(head)] - most) : 0;
    for (double& score : scores) sum += score = std::exp(score - most);
    for (int key = first; key <= position; ++key) {
      const int64_t at = At(sequence, kv_head, key, true);
      const double weight = scores[static_cast<size_t>(key - first)] / sum;
      for (int i = 0; i < of.value_dim; ++i) result[i] += weight * Cached(at + i);
    }
  }

  std::mt19937 random_;
  std::normal_distribution<float> normal_;
};

}  // namespace marlin::cuda
