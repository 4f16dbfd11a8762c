// The checksum of tensors on disk: 64-bit XXH3, as 16 hexadecimal digits.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace marlin {

/// Hashes a stream of bytes incrementally. Movable.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(Checksum&&) noexcept;
  Checksum& operator=(Checksum&&) noexcept;

  void Update(const void* data, int64_t bytes);
  uint64_t Digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

uint64_t ChecksumOf(std::string_view bytes);

/// "xxh3:0123456789abcdef".
std::string ChecksumText(uint64_t digest);

}  // namespace marlin
