// The PTX instructions that kernels have in `asm` statements. translate_device_code.py calls them
// by their names with the text of the instruction and the statement's operands: a new instruction
// needs a function here.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "cuda_emulation/runtime.h"
#include "cuda_emulation/small_floats.h"
#include "cuda_emulation/warp_products.h"

namespace cuda_emulation::ptx {

template <typename... Operands>
inline void Unknown(const char* text, const Operands&...) {
  Fail(std::string("not emulated: ") + text);
}

template <typename T>
uint32_t Bits(T value) {
  if constexpr (std::is_same_v<T, float>)
    return std::bit_cast<uint32_t>(value);
  else
    return static_cast<uint32_t>(value);
}
template <typename T>
void Set(T& to, uint32_t bits) {
  if constexpr (std::is_same_v<T, float>)
    to = std::bit_cast<float>(bits);
  else
    to = static_cast<T>(bits);
}

/// Operand `place` of an instruction whose operands are numbers in its text or registers; 0 where
/// it has fewer.
template <typename... Registers>
int OperandAt(const char* text, int place, Registers... registers) {
  const int values[] = {0, static_cast<int>(registers)...};
  const char* at = std::strchr(text, ' ');
  for (int i = 0; at != nullptr && i < place; ++i) at = std::strchr(at + 1, ',');
  if (at == nullptr) return 0;
  at += at[1] == ' ' ? 2 : 1;
  return *at == '%' ? values[1 + std::atoi(at + 1)] : std::atoi(at);
}

// Barriers and mbarriers.
template <typename... Operands>
inline void bar_sync(const char* text, Operands... operands) {
  Sync(text, OperandAt(text, 0, operands...), OperandAt(text, 1, operands...), false);
}
template <typename... Operands>
inline void bar_arrive(const char* text, Operands... operands) {
  ArriveAtBarrier(text, OperandAt(text, 0, operands...), OperandAt(text, 1, operands...));
}
/// bar.red.or.pred any, barrier, threads, mine.
template <typename Any, typename... Operands>
inline void bar_red_or_pred(const char* text, Any& any, int mine, Operands... operands) {
  const int barrier = OperandAt(text, 1, 0, 0, operands...);
  const int threads = OperandAt(text, 2, 0, 0, operands...);
  any = Sync(text, barrier, threads, mine != 0).yes > 0 ? 1 : 0;
}
inline void mbarrier_init_shared_cta_b64(const char* text, uint32_t barrier, int arrivals) {
  InitBarrier(text, barrier, arrivals);
}
inline void mbarrier_arrive_shared_cta_b64(const char* text, uint32_t barrier) {
  Arrive(text, barrier, 0);
}
inline void mbarrier_arrive_expect_tx_shared_cta_b64(const char* text, uint32_t barrier,
                                                     int bytes) {
  Arrive(text, barrier, bytes);
}
inline void mbarrier_try_wait_parity_shared_cta_b64(const char* text, uint32_t barrier,
                                                    int parity) {
  Wait(text, barrier, parity);
}
inline void mbarrier_test_wait_parity_shared_cta_b64(const char* text, uint32_t barrier,
                                                     int parity) {
  Wait(text, barrier, parity);
}
inline void setmaxnreg_dec_sync_aligned_u32(const char*) {}
inline void setmaxnreg_inc_sync_aligned_u32(const char*) {}
inline void fence_mbarrier_init_release_cluster(const char*) {}
inline void fence_proxy_async_shared_cta(const char*) {}

// The state of a launch, of which one runs at a time.
inline void griddepcontrol_wait(const char*) {}
inline void griddepcontrol_launch_dependents(const char*) {}
template <typename T>
inline void mov_u32(const char* text, T& to) {
  if (std::strstr(text, "laneid") == nullptr) Unknown(text);
  to = static_cast<T>(Lane());
}
template <typename T>
inline void elect_sync(const char*, T& elected) {
  elected = Lane() == 0 ? 1 : 0;
}

// Asynchronous copies.
inline void cp_async_cg_shared_global(const char* text, uint32_t to, const void* from,
                                      int bytes = 16) {
  CopyAsync(text, to, from, bytes, 16);
}
inline void cp_async_ca_shared_global(const char* text, uint32_t to, const void* from) {
  const int size = OperandAt(text, 2);
  CopyAsync(text, to, from, size, size);
}
inline void cp_async_ca_shared_global(const char* text, uint32_t to, const void* from, int bytes) {
  CopyAsync(text, to, from, bytes, OperandAt(text, 2));
}
inline void cp_async_commit_group(const char*) { CommitCopies(); }
inline void cp_async_wait_group(const char*, int left) { WaitForCopies(left); }
inline void cp_async_wait_all(const char*) { WaitForAllCopies(); }
inline void cp_async_mbarrier_arrive_noinc_shared_cta_b64(const char* text, uint32_t barrier) {
  ArriveWithCopies(text, barrier);
}
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(
    const char* text, uint32_t to, const void* from, int bytes, uint32_t barrier) {
  CopyBulk(text, to, from, bytes, barrier);
}
inline void cp_async_bulk_prefetch_L2_global(const char*, const void* from, int bytes) {
  Prefetched().emplace_back(static_cast<const std::byte*>(from), bytes);
}
inline void prefetch_global_L2(const char*, const void*) {}

// Shared memory.
template <typename... Words>
void Store(const char* text, uint32_t address, Words... words) {
  const uint32_t bits[] = {Bits(words)...};
  std::memcpy(SharedBytes(text, address, sizeof(bits), sizeof(bits)), bits, sizeof(bits));
}
template <typename... Words>
void Load(const char* text, uint32_t address, Words&... words) {
  uint32_t bits[sizeof...(Words)];
  std::memcpy(bits, SharedBytes(text, address, sizeof(bits), sizeof(bits)), sizeof(bits));
  int i = 0;
  (Set(words, bits[i++]), ...);
}
template <typename T>
inline void st_shared_u32(const char* text, uint32_t address, T word) {
  Store(text, address, word);
}
template <typename T>
inline void st_shared_v2_u32(const char* text, uint32_t address, T x, T y) {
  Store(text, address, x, y);
}
template <typename T>
inline void st_shared_v4_u32(const char* text, uint32_t address, T x, T y, T z, T w) {
  Store(text, address, x, y, z, w);
}
template <typename T>
inline void st_shared_v4_u32(const char* text, uint32_t address, T word) {
  Store(text, address, word, word, word, word);
}
template <typename T>
inline void ld_shared_u32(const char* text, T& x, uint32_t address) {
  Load(text, address, x);
}
template <typename T>
inline void ld_shared_v2_u32(const char* text, T& x, T& y, uint32_t address) {
  Load(text, address, x, y);
}
template <typename T>
inline void ld_shared_v4_u32(const char* text, T& x, T& y, T& z, T& w, uint32_t address) {
  Load(text, address, x, y, z, w);
}

// Global memory. Another block runs at once after a load that polls.
template <typename T>
uint32_t* Word(T* address) {
  return reinterpret_cast<uint32_t*>(const_cast<std::remove_const_t<T>*>(address));
}
template <typename T>
inline void ld_relaxed_gpu_global_u32(const char* text, uint32_t& x, T* from) {
  Poll(text);
  x = *Word(from);
}
template <typename T>
inline void ld_acquire_gpu_global_u32(const char* text, uint32_t& x, T* from) {
  ld_relaxed_gpu_global_u32(text, x, from);
}
template <typename T>
inline void ld_relaxed_gpu_global_v4_u32(const char* text, uint32_t& x, uint32_t& y, uint32_t& z,
                                         uint32_t& w, T* from) {
  Poll(text);
  x = Word(from)[0];
  y = Word(from)[1];
  z = Word(from)[2];
  w = Word(from)[3];
}
/// Reads only where the last operand is not 0.
template <typename T>
inline void if_ld_relaxed_gpu_global_v4_u32(const char* text, uint32_t& x, uint32_t& y, uint32_t& z,
                                            uint32_t& w, T* from, int reads) {
  if (reads != 0) ld_relaxed_gpu_global_v4_u32(text, x, y, z, w, from);
}
template <typename T>
inline void st_relaxed_gpu_global_u32(const char*, T* to, uint32_t x) {
  *Word(to) = x;
}
template <typename T>
inline void st_relaxed_gpu_global_v4_u32(const char*, T* to, uint32_t x, uint32_t y, uint32_t z,
                                         uint32_t w) {
  const uint32_t words[4] = {x, y, z, w};
  std::memcpy(to, words, sizeof(words));
}
inline void atom_relaxed_gpu_global_add_u32(const char* text, uint32_t& before, uint32_t* counter) {
  before = *counter;
  *counter += static_cast<uint32_t>(OperandAt(text, 2));
}
inline void atom_acquire_gpu_global_add_u32(const char* text, uint32_t& before, uint32_t* counter) {
  atom_relaxed_gpu_global_add_u32(text, before, counter);
}
inline void red_release_gpu_global_add_u32(const char*, uint32_t* counter, uint32_t term) {
  *counter += term;
}

// Arithmetic.
inline void lop3_b32(const char*, uint32_t& d, uint32_t a, uint32_t b, uint32_t c, uint32_t truth) {
  d = 0;
  for (unsigned i = 0; i < 8; ++i) {
    if ((truth >> i & 1u) == 0) continue;
    d |= ((i & 4u) != 0 ? a : ~a) & ((i & 2u) != 0 ? b : ~b) & ((i & 1u) != 0 ? c : ~c);
  }
}
inline void xor_b32(const char*, uint32_t& d, uint32_t a, uint32_t b) { d = a ^ b; }
inline void fma_rn_bf16x2(const char*, uint32_t& d, uint32_t a, uint32_t b, uint32_t c) {
  d = ByHalves(FmaBf16, a, b, c);
}
inline void mul_rn_bf16x2(const char*, uint32_t& d, uint32_t a, uint32_t b) {
  d = ByHalves(FmaBf16, a, b, 0x80008000u);
}
inline void sub_rn_bf16x2(const char*, uint32_t& d, uint32_t a, uint32_t b) {
  d = ByHalves(FmaBf16, b, 0xbf80bf80u, a);
}
inline void fma_rn_f16x2(const char*, uint32_t& d, uint32_t a, uint32_t b, uint32_t c) {
  d = ByHalves(FmaHalf, a, b, c);
}
inline void mul_rn_f16x2(const char*, uint32_t& d, uint32_t a, uint32_t b) {
  d = ByHalves(FmaHalf, a, b, 0x80008000u);
}
inline void sub_rn_f16x2(const char*, uint32_t& d, uint32_t a, uint32_t b) {
  d = ByHalves(FmaHalf, b, 0xbc00bc00u, a);
}
inline void cvt_rn_bf16x2_f32(const char*, uint32_t& d, float high, float low) {
  d = static_cast<uint32_t>(marlin::FloatToBf16(high)) << 16 | marlin::FloatToBf16(low);
}
inline void cvt_rn_f16x2_f32(const char*, uint32_t& d, float high, float low) {
  d = static_cast<uint32_t>(marlin::FloatToHalf(high)) << 16 | marlin::FloatToHalf(low);
}
inline void cvt_rn_satfinite_e4m3x2_f32(const char*, uint16_t& d, float high, float low) {
  d = __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, __NV_E4M3);
}
inline void cvt_rn_satfinite_e4m3x2_f16x2(const char*, uint16_t& d, uint32_t pair) {
  d = __nv_cvt_halfraw2_to_fp8x2({static_cast<uint16_t>(pair), static_cast<uint16_t>(pair >> 16)},
                                 __NV_SATFINITE, __NV_E4M3);
}
inline void cvt_rn_f16x2_e4m3x2(const char*, uint32_t& d, uint16_t codes) {
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
  d = static_cast<uint32_t>(halves.y) << 16 | halves.x;
}
template <typename T>
inline void cvt_rna_tf32_f32(const char*, T& d, float x) {
  Set(d, (std::bit_cast<uint32_t>(x) + 0x1000u) & 0xffffe000u);
}
inline void ex2_approx_ftz_f32(const char*, float& d, float x) { d = std::exp2(x); }
inline void rcp_approx_ftz_f32(const char*, float& d, float x) { d = 1.0f / x; }
inline void mov_b64(const char*, uint64_t& d, uint32_t low, uint32_t high) {
  d = uint64_t{high} << 32 | low;
}

// Matrices of a warp.
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(const char* text, uint32_t& r0, uint32_t& r1,
                                                     uint32_t& r2, uint32_t& r3, uint32_t address) {
  LoadMatrices(text, address, false, {&r0, &r1, &r2, &r3});
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(const char* text, uint32_t& r0,
                                                           uint32_t& r1, uint32_t& r2, uint32_t& r3,
                                                           uint32_t address) {
  LoadMatrices(text, address, true, {&r0, &r1, &r2, &r3});
}
inline void ldmatrix_sync_aligned_m8n8_x2_shared_b16(const char* text, uint32_t& r0, uint32_t& r1,
                                                     uint32_t address) {
  LoadMatrices(text, address, false, {&r0, &r1});
}
inline void ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16(const char* text, uint32_t& r0,
                                                           uint32_t& r1, uint32_t address) {
  LoadMatrices(text, address, true, {&r0, &r1});
}
inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(const char* text, uint32_t address,
                                                     uint32_t r0, uint32_t r1, uint32_t r2,
                                                     uint32_t r3) {
  StoreMatrices(text, address, false, {r0, r1, r2, r3});
}
inline void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(const char* text, uint32_t address,
                                                           uint32_t r0, uint32_t r1, uint32_t r2,
                                                           uint32_t r3) {
  StoreMatrices(text, address, true, {r0, r1, r2, r3});
}
inline void movmatrix_sync_aligned_m8n8_trans_b16(const char* text, uint32_t& turned,
                                                  uint32_t pair) {
  turned = TurnMatrix(text, pair);
}

#define CUDA_EMULATION_MMA(name, Format)                                                      \
  inline void name(const char* text, float& c0, float& c1, float& c2, float& c3, uint32_t a0, \
                   uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {         \
    MultiplyAdd<Format>(text, {&c0, &c1, &c2, &c3}, {a0, a1, a2, a3}, {b0, b1});              \
  }
CUDA_EMULATION_MMA(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, OfBf16)
CUDA_EMULATION_MMA(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, OfHalf)
CUDA_EMULATION_MMA(mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32, OfTf32)
CUDA_EMULATION_MMA(mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32, OfE4M3)
#undef CUDA_EMULATION_MMA

inline void mma_sync_aligned_m16n8k32_row_col_s32_u8_s8_s32(const char* text, uint32_t& c0,
                                                            uint32_t& c1, uint32_t& c2,
                                                            uint32_t& c3, uint32_t a0, uint32_t a1,
                                                            uint32_t a2, uint32_t a3, uint32_t b0,
                                                            uint32_t b1) {
  MultiplyAddBytes<4>(text, {&c0, &c1, &c2, &c3}, {a0, a1, a2, a3}, {b0, b1});
}
inline void mma_sync_aligned_m16n8k16_row_col_s32_u8_s8_s32(const char* text, uint32_t& c0,
                                                            uint32_t& c1, uint32_t& c2,
                                                            uint32_t& c3, uint32_t a0, uint32_t a1,
                                                            uint32_t b0) {
  MultiplyAddBytes<2>(text, {&c0, &c1, &c2, &c3}, {a0, a1}, {b0});
}

#define CUDA_EMULATION_SPARSE_MMA(name, Format)                                                  \
  inline void name(const char* text, float& c0, float& c1, float& c2, float& c3, uint32_t a0,    \
                   uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, uint32_t b2, \
                   uint32_t b3, uint32_t metadata, int selector) {                               \
    SparseMultiplyAdd<Format>(text, {&c0, &c1, &c2, &c3}, {a0, a1, a2, a3}, {b0, b1, b2, b3},    \
                              metadata, selector);                                               \
  }
CUDA_EMULATION_SPARSE_MMA(mma_sp_ordered_metadata_sync_aligned_m16n8k32_row_col_f32_bf16_bf16_f32,
                          OfBf16)
CUDA_EMULATION_SPARSE_MMA(mma_sp_ordered_metadata_sync_aligned_m16n8k32_row_col_f32_f16_f16_f32,
                          OfHalf)
CUDA_EMULATION_SPARSE_MMA(mma_sp_sync_aligned_m16n8k32_row_col_f32_bf16_bf16_f32, OfBf16)
CUDA_EMULATION_SPARSE_MMA(mma_sp_sync_aligned_m16n8k32_row_col_f32_f16_f16_f32, OfHalf)
#undef CUDA_EMULATION_SPARSE_MMA

}  // namespace cuda_emulation::ptx
