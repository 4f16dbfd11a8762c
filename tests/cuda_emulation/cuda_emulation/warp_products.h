// Matrix instructions of a warp. Layouts follow the figures of the PTX specification, with
// group = lane / 4 and thread = lane % 4. Products are exact; a sum is rounded once, which tensor
// cores do less exactly: results agree where all sums are exact.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "base/scalars.h"
#include "cuda_emulation/runtime.h"

namespace cuda_emulation {

/// Operand types: numbers per register, and number `i` of a register.
struct OfBf16 {
  static constexpr int kPerRegister = 2;
  static float Number(uint32_t r, int i) {
    return marlin::Bf16ToFloat(static_cast<uint16_t>(r >> 16 * i));
  }
};
struct OfHalf {
  static constexpr int kPerRegister = 2;
  static float Number(uint32_t r, int i) {
    return marlin::HalfToFloat(static_cast<uint16_t>(r >> 16 * i));
  }
};
struct OfTf32 {
  static constexpr int kPerRegister = 1;
  static float Number(uint32_t r, int) { return std::bit_cast<float>(r & 0xffffe000u); }
};
struct OfE4M3 {
  static constexpr int kPerRegister = 4;
  static float Number(uint32_t r, int i) {
    return marlin::Fp8E4M3ToFloat(static_cast<uint8_t>(r >> 8 * i));
  }
};

/// Operands of all lanes as matrices; C += A B.
template <int kK>
struct Product {
  double a[16][kK] = {};
  double b[kK][8] = {};

  double Sum(int row, int column, double sum) const {
    for (int k = 0; k < kK; ++k) sum += a[row][k] * b[k][column];
    return sum;
  }
  /// A lane's part of C.
  void AddTo(int lane, const std::array<float*, 4>& c) const {
    for (int i = 0; i < 4; ++i) {
      float& sum = *c[static_cast<size_t>(i)];
      sum = static_cast<float>(Sum(lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2, sum));
    }
  }
};

template <typename Format>
void MultiplyAdd(const char* what, const std::array<float*, 4>& c, const std::array<uint32_t, 4>& a,
                 const std::array<uint32_t, 2>& b) {
  struct Data {
    std::array<float*, 4> c;
    std::array<uint32_t, 4> a;
    std::array<uint32_t, 2> b;
  } mine = {c, a, b};
  Together(what, ~0u, &mine, [](const auto& of) {
    constexpr int kPer = Format::kPerRegister;
    Product<8 * kPer> product;
    for (int lane = 0; lane < 32; ++lane) {
      const Data& data = of(lane);
      for (int i = 0; i < kPer; ++i) {
        const int k = lane % 4 * kPer + i;
        for (int r = 0; r < 4; ++r) {
          product.a[lane / 4 + r % 2 * 8][k + r / 2 * 4 * kPer] =
              Format::Number(data.a[static_cast<size_t>(r)], i);
        }
        for (int r = 0; r < 2; ++r) {
          product.b[k + r * 4 * kPer][lane / 4] = Format::Number(data.b[static_cast<size_t>(r)], i);
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) product.AddTo(lane, of(lane).c);
  });
}

/// Bytes, unsigned in A and signed in B; registers of A: 2 of m16n8k16, 4 of m16n8k32.
template <size_t kRegisters>
void MultiplyAddBytes(const char* what, const std::array<uint32_t*, 4>& c,
                      const std::array<uint32_t, kRegisters>& a,
                      const std::array<uint32_t, kRegisters / 2>& b) {
  struct Data {
    std::array<uint32_t*, 4> c;
    std::array<uint32_t, kRegisters> a;
    std::array<uint32_t, kRegisters / 2> b;
  } mine = {c, a, b};
  Together(what, ~0u, &mine, [](const auto& of) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4;
        const int column = lane % 4 * 2 + i % 2;
        uint32_t& sum = *of(lane).c[static_cast<size_t>(i)];
        for (int k = 0; k < static_cast<int>(kRegisters) * 8; ++k) {
          const int thread = k % 16 / 4;
          const auto reg = static_cast<size_t>(k / 16);
          const int shift = k % 4 * 8;
          const uint32_t x = of(row * 4 + thread).a[2 * reg + static_cast<size_t>(i / 2)] >> shift;
          const uint32_t y = of(column * 4 + thread).b[reg] >> shift;
          sum += static_cast<uint32_t>(static_cast<int>(x & 255) * static_cast<int8_t>(y & 255));
        }
      }
    }
  });
}

/// m16n8k32 whose A keeps two of four numbers: register r of A has block thread + 4 (r / 2) of row
/// group + 8 (r % 2). Thread 2 F of a group gives the metadata of k 0 to 15, thread 2 F + 1 of k 16
/// to 31, for selector F; the low half is for row group, the high half for row group + 8.
template <typename Format>
void SparseMultiplyAdd(const char* what, const std::array<float*, 4>& c,
                       const std::array<uint32_t, 4>& a, const std::array<uint32_t, 4>& b,
                       uint32_t metadata, int selector) {
  struct Data {
    std::array<float*, 4> c;
    std::array<uint32_t, 4> a;
    std::array<uint32_t, 4> b;
    uint32_t metadata;
  } mine = {c, a, b, metadata};
  Together(what, ~0u, &mine, [what, selector](const auto& of) {
    Product<32> product;
    for (int lane = 0; lane < 32; ++lane) {
      for (int r = 0; r < 4; ++r) {
        const auto reg = static_cast<size_t>(r);
        const int block = lane % 4 + 4 * (r / 2);
        const uint32_t word = of(lane / 4 * 4 + 2 * selector + r / 2).metadata;
        const uint32_t nibble = word >> (r % 2 * 16 + block % 4 * 4) & 15u;
        if ((nibble & 3u) >= nibble >> 2) Fail(std::string(what) + ": metadata not in order");
        for (int i = 0; i < 2; ++i) {
          product.a[lane / 4 + r % 2 * 8][block * 4 + static_cast<int>(nibble >> 2 * i & 3u)] =
              Format::Number(of(lane).a[reg], i);
          product.b[lane % 4 * 2 + i + 8 * r][lane / 4] = Format::Number(of(lane).b[reg], i);
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) product.AddTo(lane, of(lane).c);
  });
}

/// The place, in the 8 x 8 matrix, of a lane's number `i`.
inline size_t PlaceOf(int lane, int i, bool transposed) {
  const int row = lane / 4;
  const int column = lane % 4 * 2 + i;
  return static_cast<size_t>(transposed ? column * 8 + row : row * 8 + column);
}

/// ldmatrix: lane l gives the address of row l % 8 of matrix l / 8.
void LoadMatrices(const char* what, uint32_t address, bool transposed,
                  std::initializer_list<uint32_t*> registers);
void StoreMatrices(const char* what, uint32_t address, bool transposed,
                   std::initializer_list<uint32_t> registers);
uint32_t TurnMatrix(const char* what, uint32_t pair);

}  // namespace cuda_emulation
