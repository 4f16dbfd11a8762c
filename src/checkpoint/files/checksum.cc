#include "checkpoint/files/checksum.h"

#include <fmt/core.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace marlin {

struct Checksum::State {
  XXH3_state_t xxh3;
};

Checksum::Checksum() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh3); }
Checksum::~Checksum() = default;
Checksum::Checksum(Checksum&&) noexcept = default;
Checksum& Checksum::operator=(Checksum&&) noexcept = default;

void Checksum::Update(const void* data, int64_t bytes) {
  XXH3_64bits_update(&state_->xxh3, data, static_cast<size_t>(bytes));
}

uint64_t Checksum::Digest() const { return XXH3_64bits_digest(&state_->xxh3); }

uint64_t ChecksumOf(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::string ChecksumText(uint64_t digest) { return fmt::format("xxh3:{:016x}", digest); }

}  // namespace marlin
