#include "cuda_emulation/warp_products.h"

#include <cstring>

namespace cuda_emulation {
namespace {

using Matrix = std::array<uint16_t, 64>;

uint32_t PairOf(const Matrix& matrix, int lane, bool transposed) {
  return matrix[PlaceOf(lane, 0, transposed)] |
         static_cast<uint32_t>(matrix[PlaceOf(lane, 1, transposed)]) << 16;
}
void SetPair(Matrix* matrix, int lane, bool transposed, uint32_t pair) {
  (*matrix)[PlaceOf(lane, 0, transposed)] = static_cast<uint16_t>(pair);
  (*matrix)[PlaceOf(lane, 1, transposed)] = static_cast<uint16_t>(pair >> 16);
}

}  // namespace

void LoadMatrices(const char* what, uint32_t address, bool transposed,
                  std::initializer_list<uint32_t*> registers) {
  struct Data {
    uint32_t address;
    uint32_t* const* registers;
  } mine = {address, registers.begin()};
  const int count = static_cast<int>(registers.size());
  Together(what, ~0u, &mine, [&](const auto& of) {
    for (int i = 0; i < count; ++i) {
      Matrix matrix;
      for (int row = 0; row < 8; ++row) {
        std::memcpy(&matrix[static_cast<size_t>(row) * 8],
                    SharedBytes(what, of(i * 8 + row).address, 16, 16), 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        *of(lane).registers[i] = PairOf(matrix, lane, transposed);
      }
    }
  });
}

void StoreMatrices(const char* what, uint32_t address, bool transposed,
                   std::initializer_list<uint32_t> registers) {
  struct Data {
    uint32_t address;
    const uint32_t* registers;
  } mine = {address, registers.begin()};
  const int count = static_cast<int>(registers.size());
  Together(what, ~0u, &mine, [&](const auto& of) {
    for (int i = 0; i < count; ++i) {
      Matrix matrix;
      for (int lane = 0; lane < 32; ++lane) {
        SetPair(&matrix, lane, transposed, of(lane).registers[i]);
      }
      for (int row = 0; row < 8; ++row) {
        std::memcpy(SharedBytes(what, of(i * 8 + row).address, 16, 16),
                    &matrix[static_cast<size_t>(row) * 8], 16);
      }
    }
  });
}

uint32_t TurnMatrix(const char* what, uint32_t pair) {
  struct Data {
    uint32_t pair;
    uint32_t turned;
  } mine = {pair, 0};
  Together(what, ~0u, &mine, [](const auto& of) {
    Matrix matrix;
    for (int lane = 0; lane < 32; ++lane) SetPair(&matrix, lane, false, of(lane).pair);
    for (int lane = 0; lane < 32; ++lane) of(lane).turned = PairOf(matrix, lane, true);
  });
  return mine.turned;
}

}  // namespace cuda_emulation
