// Packed words of other projects: bit order, Marlin tiles, 2:4 sparsity. Accepted words convert
// there and back without loss; mismatched sizes are refused. Input: format, operation, k, n, words.
#include <algorithm>
#include <cstring>
#include <vector>

#include "fuzz_target.h"
#include "marlin/format.h"
#include "marlin/layout.h"
#include "marlin/weights.h"

namespace {

using namespace marlin;

using Words = std::vector<uint32_t>;

constexpr __int128 kMostWords = 1 << 16;

struct Input {
  Format format = Format::kFp4E2M1;
  uint8_t action = 0;
  int64_t k = 0;
  int64_t n = 0;
  Words words;
};

/// Sizes are one byte each; from 224 on eight bytes follow, so that huge sizes occur too.
bool TakeSize(const uint8_t** data, size_t* left, int64_t* size) {
  constexpr uint8_t kFirstLarge = 224;
  if (*left < 1) return false;
  *size = **data;
  size_t taken = 1;
  if (*size >= kFirstLarge && *left > sizeof(*size)) {
    std::memcpy(size, *data + 1, sizeof(*size));
    taken += sizeof(*size);
  }
  *data += taken;
  *left -= taken;
  return true;
}

bool ReadInput(const uint8_t* data, size_t left, Input* input) {
  if (left < 2) return false;
  const auto formats = static_cast<uint8_t>(AllFormats().size());
  input->format = AllFormats()[data[0] % formats].format;
  input->action = data[1];
  data += 2;
  left -= 2;
  if (!TakeSize(&data, &left, &input->k) || !TakeSize(&data, &left, &input->n)) return false;
  input->words.resize(left / sizeof(uint32_t));
  if (!input->words.empty()) std::memcpy(input->words.data(), data, input->words.size() * 4);
  return true;
}

bool IsSmall(const Input& input) {
  if (input.k < 0 || input.n < 0) return false;
  const __int128 k = input.k;
  const __int128 n = input.n;
  return (k + 64) * (n + 64) <= kMostWords;
}

/// The input's words, truncated or extended to a given count.
Words Resized(const Input& input, int64_t count) {
  Words words(static_cast<size_t>(count));
  for (size_t i = 0; i < words.size() && !input.words.empty(); ++i) {
    words[i] = input.words[i % input.words.size()];
  }
  return words;
}

void CheckCodes(const Input& in) {
  if (!GetFormatInfo(in.format).quantized) return;
  const Words words = Resized(in, WordsAlongK(in.format, in.k) * in.n);
  std::vector<uint8_t> codes(static_cast<size_t>(in.k * in.n));
  MARLIN_FUZZ_CHECK(UnpackCodes(in.format, in.k, in.n, words, codes).ok());
  for (const uint8_t code : codes) MARLIN_FUZZ_CHECK(code >> GetFormatInfo(in.format).bits == 0);
  Words packed(words.size());
  MARLIN_FUZZ_CHECK(PackCodes(in.format, in.k, in.n, codes, packed).ok());
  std::vector<uint8_t> again(codes.size());
  MARLIN_FUZZ_CHECK(UnpackCodes(in.format, in.k, in.n, packed, again).ok());
  MARLIN_FUZZ_CHECK(again == codes);
}

void CheckTiles(const Input& in) {
  const Words tiles = Resized(in, MarlinW4WordCount(in.k, in.n));
  Words canonical(static_cast<size_t>((in.k + 7) / 8 * in.n));
  MARLIN_FUZZ_CHECK(RepackFromMarlinW4(in.k, in.n, tiles, canonical).ok());
  Words back(tiles.size());
  MARLIN_FUZZ_CHECK(RepackToMarlinW4(in.k, in.n, canonical, back).ok());
  Words again(canonical.size());
  MARLIN_FUZZ_CHECK(RepackFromMarlinW4(in.k, in.n, back, again).ok());
  MARLIN_FUZZ_CHECK(again == canonical);
  // Without padding the conversion is lossless.
  if (in.k % 32 == 0 && in.n % 32 == 0) MARLIN_FUZZ_CHECK(back == tiles);

  const Words original = Resized(in, in.k / 8 * in.n);
  Words words(original.size());
  const Status read = RepackFromOriginalMarlin(in.k, in.n, original, words);
  MARLIN_FUZZ_CHECK(read.ok() == (in.k % 16 == 0 && in.n % 64 == 0));
  if (!read.ok()) return CheckError(read);
  const auto nibbles = [](const Words& all, uint32_t value) {
    int64_t count = 0;
    for (const uint32_t word : all) {
      for (int i = 0; i < 8; ++i) count += (word >> (4 * i) & 15u) == value ? 1 : 0;
    }
    return count;
  };
  for (uint32_t value = 0; value < 16; ++value) {
    MARLIN_FUZZ_CHECK(nibbles(words, value) == nibbles(original, value));
  }
}

void CheckSparse(const Input& in) {
  const int64_t padded = (in.k + 31) / 32 * 32;
  Sparse24 sparse;
  sparse.k = in.k;
  sparse.n = in.n;
  sparse.values = Resized(in, padded / 16 * in.n);
  sparse.metadata = Resized(in, padded / 32 * in.n);
  if (in.action & 64u) {
    // Mostly valid nibbles, since random ones rarely are.
    constexpr uint32_t kValid[] = {4, 8, 9, 12, 13, 14};
    for (uint32_t& word : sparse.metadata) {
      uint32_t valid = 0;
      for (int i = 0; i < 8; ++i) valid |= kValid[(word >> (4 * i) & 15u) % 6] << (4 * i);
      word = valid;
    }
  }
  Words canonical(static_cast<size_t>((in.k + 7) / 8 * in.n));
  const Status unpacked = UnpackSparse24(in.format, sparse, canonical);
  if (!unpacked.ok()) return CheckError(unpacked);
  const auto packed = PackSparse24(in.format, in.k, in.n, canonical);
  MARLIN_FUZZ_CHECK(packed.ok());
  Words again(canonical.size());
  MARLIN_FUZZ_CHECK(UnpackSparse24(in.format, *packed, again).ok());
  // Two of four values are kept and the rest is 0, so the second pass loses nothing, except that
  // the code of another zero (-0) becomes the first one.
  const auto values = FormatValues(in.format);
  for (size_t i = 0; i < canonical.size(); ++i) {
    for (int code = 0; code < 8; ++code) {
      const float a = values[canonical[i] >> (4 * code) & 15u];
      const float b = values[again[i] >> (4 * code) & 15u];
      MARLIN_FUZZ_CHECK(a == b);
    }
  }
}

/// Words that need not match the given sizes: refused unless they do.
void CheckRefusal(const Input& in) {
  Words target(in.words.size());
  std::vector<uint8_t> codes(in.words.size());
  for (const Status& status : {UnpackCodes(in.format, in.k, in.n, in.words, codes),
                               PackCodes(in.format, in.k, in.n, codes, target),
                               RepackToMarlinW4(in.k, in.n, in.words, target),
                               RepackFromMarlinW4(in.k, in.n, in.words, target),
                               RepackFromOriginalMarlin(in.k, in.n, in.words, target),
                               RepackFromVllmMarlin(in.k, in.n, in.words, target),
                               PackSparse24(in.format, in.k, in.n, in.words).status()}) {
    const bool empty = in.k == 0 || in.n == 0;
    MARLIN_FUZZ_CHECK(!status.ok() || empty || IsSmall(in) || !in.words.empty());
    if (!status.ok()) CheckError(status);
  }
  Sparse24 sparse;
  sparse.k = in.k;
  sparse.n = in.n;
  sparse.values = in.words;
  sparse.metadata = in.words;
  const Status status = UnpackSparse24(in.format, sparse, target);
  if (!status.ok()) CheckError(status);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input;
  if (!ReadInput(data, size, &input)) return 0;
  CheckRefusal(input);
  if (!IsSmall(input)) return 0;
  switch (input.action % 3) {
    case 0:
      CheckCodes(input);
      break;
    case 1:
      CheckTiles(input);
      break;
    default:
      CheckSparse(input);
  }
  return 0;
}
