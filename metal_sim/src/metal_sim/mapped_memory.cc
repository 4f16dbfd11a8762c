#include "metal_sim/mapped_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <utility>

namespace metal_sim {
namespace {

size_t PageBytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

Status Refused(size_t bytes) {
  return {Code::kOutOfMemory, "simulator: cannot map " + std::to_string(bytes) + " bytes"};
}

}  // namespace

size_t MappedMemory::WholePages(size_t bytes) {
  const size_t page = PageBytes();
  return (bytes + page - 1) / page * page;
}

Result<MappedMemory> MappedMemory::Reserve(size_t bytes) {
  MappedMemory memory;
  memory.size_ = WholePages(bytes == 0 ? 1 : bytes);
  void* data =
      mmap(nullptr, memory.size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return Refused(memory.size_);
  memory.data_ = static_cast<std::byte*>(data);
  return memory;
}

Result<MappedMemory> MappedMemory::Allocate(size_t bytes) {
  METAL_SIM_ASSIGN_OR_RETURN(MappedMemory memory, Reserve(bytes));
  METAL_SIM_RETURN_IF_ERROR(memory.Open(0, memory.size()));
  return memory;
}

Status MappedMemory::Open(size_t offset, size_t bytes) {
  const size_t first = offset / PageBytes() * PageBytes();
  const size_t length = WholePages(offset + bytes) - first;
  if (mprotect(data_ + first, length, PROT_READ | PROT_WRITE) != 0) return Refused(length);
  return {};
}

MappedMemory::~MappedMemory() {
  if (data_ != nullptr) munmap(data_, size_);
}

MappedMemory::MappedMemory(MappedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace metal_sim
