// Kernels that msl_shim_test.cc compiles with the shim, as a rewriter would leave them: every one
// takes `out`, `in` and the lane. The test holds the expected results.
namespace metal_sim_program {

using namespace metal;

// ---- One thread ----

void HalfArithmetic(device half* out, device const half* in, uint lane) {
  const half a = in[0], b = in[1], c = in[2];
  out[0] = a + b;
  out[1] = a * b;
  out[2] = a / b;
  out[3] = a + b - a;  // Rounded after the sum.
  out[4] = fma(a, b, c);
  out[5] = half4(a, b, c, 1h).x * b;
  out[6] = 0.1h;
  out[7] = half(0.1) + 1.5h;
}

void BfloatArithmetic(device ushort* out, device const float* in, uint lane) {
  const bfloat a = bfloat(in[0]), b = bfloat(in[1]);
  out[0] = as_type<ushort>(a);
  out[1] = as_type<ushort>(b);
  out[2] = as_type<ushort>(bfloat(a + b));
  out[3] = as_type<ushort>(bfloat(a * b));
  out[4] = as_type<ushort>(bfloat(half(in[0])));
  out[5] = as_type<ushort>(bfloat(int(in[2])));
  out[6] = as_type<ushort>(half(a));
  out[7] = as_type<ushort>(bfloat(in[3]));  // NaN.
  out[8] = as_type<ushort>(bfloat(a + b - a));
  out[9] = as_type<ushort>(vec<bfloat, 2>(a, b).y);
  out[10] = as_type<ushort>(fma(bfloat(9), bfloat(29), bfloat(0x1p-60f)));
}

void Literals(device uint* out, device const uint* in, uint lane) {
  out[0] = sizeof(1.0);
  out[1] = sizeof(1.0h);
  out[2] = sizeof(1h);
  out[3] = as_type<uint>(1.0 / 3);
  out[4] = as_type<ushort>(1.0_bf);
  out[5] = sizeof(half3);
  out[6] = sizeof(packed_half3);
  out[7] = alignof(float3);
  out[8] = alignof(packed_float3);
}

void Conversions(device int* out, device const float* in, uint lane) {
  for (int i = 0; i < 6; ++i) out[i] = int(in[i]);
  for (int i = 0; i < 6; ++i) out[6 + i] = int(uchar(in[i]));
  out[12] = int4(float4(in[0], in[1], in[4], in[5])).x;
  out[13] = as_type<int>(in[0]);
  out[14] =
      as_type<half2>(as_type<uint>(in[0])).y == as_type<half>(ushort(as_type<uint>(in[0]) >> 16));
}

void Integers(device uint* out, device const uint* in, uint lane) {
  const uint a = in[0], b = in[1];
  const int s = as_type<int>(in[0]);
  uint n = 0;
  out[n++] = popcount(a);
  out[n++] = clz(a);
  out[n++] = ctz(b);
  out[n++] = clz(ushort(1));
  out[n++] = ctz(0u);
  out[n++] = reverse_bits(a);
  out[n++] = reverse_bits(uchar(1));
  out[n++] = rotate(a, 8u);
  out[n++] = rotate(a, 40u);
  out[n++] = extract_bits(a, 4, 8);
  out[n++] = uint(extract_bits(s, 28, 4));
  out[n++] = insert_bits(a, b, 4, 8);
  out[n++] = mulhi(a, b);
  out[n++] = uint(mulhi(s, s));
  out[n++] = mad24(a, b, 1u);
  out[n++] = hadd(a, 0xffffffffu);
  out[n++] = rhadd(a, 0xffffffffu);
  out[n++] = absdiff(1u, a);
  out[n++] = absdiff(INT_MIN, INT_MAX);
  out[n++] = addsat(a, 0xf0000000u);
  out[n++] = uint(int(addsat(char(100), char(100))));
  out[n++] = subsat(1u, a);
  out[n++] = uint(subsat(INT_MIN, 1));
  out[n++] = uint(clamp(s, -5, 5));
  out[n++] = uint(abs(s));
  out[n++] = (uint2(a, b) << 33).x;
  out[n++] = uint((int2(s) >> 36).y);
  out[n++] = uint((short2(300) * short2(300)).x);
  out[n++] = (uint2(a) / uint2(0, 3)).x;
  out[n++] = (uint2(a) % uint2(b)).x;
  out[n++] = median3(3u, 1u, 2u);
  out[n++] = uint(ulong2(a, b).y * 2 >> 1);
  out[n++] = madsat(0xffffffffu, 2u, 1u);
}

void FloatFunctions(device float* out, device const float* in, uint lane) {
  const float x = in[0], nan = in[1], y = in[2];
  uint n = 0;
  out[n++] = min(x, nan);
  out[n++] = max(nan, x);
  out[n++] = fmin(nan, x);
  out[n++] = clamp(x, 0.0, 1.0);
  out[n++] = saturate(nan);
  out[n++] = saturate(y);
  out[n++] = rint(2.5);
  out[n++] = round(2.5);
  out[n++] = sign(-x);
  out[n++] = sign(nan);
  out[n++] = mix(x, y, 0.25);
  out[n++] = step(x, y);
  out[n++] = step(y, x);
  out[n++] = smoothstep(0.0, 2.0, 0.5);
  out[n++] = select(x, y, true);
  out[n++] = fract(-1.0e-20);
  out[n++] = ldexp(x, 4);
  int exponent;
  out[n++] = frexp(x, exponent);
  out[n++] = exponent;
  out[n++] = fma(x, y, 1.0);
  out[n++] = exp(x);
  out[n++] = exp2(x);
  out[n++] = exp10(2.0);
  out[n++] = log(x);
  out[n++] = log2(8.0);
  out[n++] = pow(x, y);
  out[n++] = powr(x, y);
  out[n++] = tanh(y);
  out[n++] = rsqrt(4.0);
  out[n++] = fmod(-x, 2.0);
  float whole;
  out[n++] = modf(-x, whole);
  out[n++] = whole;
  out[n++] = copysign(x, -0.0);
  out[n++] = sinpi(1.0);
  out[n++] = precise::divide(x, y);
  out[n++] = fast::sqrt(x);
  out[n++] = metal::precise::exp(y);
  out[n++] = fdim(x, y);
  out[n++] = median3(x, y, 1.0);
  out[n++] = nextafter(1.0, 2.0);
  out[n++] = isnan(nan) + 2 * isinf(INFINITY) + 4 * isfinite(x) + 8 * isnormal(1.0e-40) +
             16 * signbit(-0.0) + 32 * isunordered(x, nan) + 64 * isordered(x, nan);
  const half h = half(x);
  out[n++] = exp(h);
  out[n++] = max(h, half(nan));
  out[n++] = isnan(half(nan)) + 2 * isinf(bfloat(INFINITY)) + 4 * isnormal(half(1.0e-6));
  out[n++] = float(exp(bfloat(x)));
}

void Vectors(device float* out, device const float4* in, uint lane) {
  float4 v = in[0];
  v.xy = v.wz;
  v.bg *= 2;
  v.w += 1;
  for (int i = 0; i < 4; ++i) out[i] = v[i];
  const float3 a = in[0].xyz, b = in[1].zyx;
  out[4] = dot(a, b);
  out[5] = cross(a, b).y;
  out[6] = length(float2(3, 4));
  out[7] = normalize(float3(0, 0, 2)).z;
  out[8] = all(a == a.xyz) + 2 * any(a < b) + 4 * any(bool2(false));
  out[9] = clamp(in[0], 1.5, 2.5).z;
  const float2 pair = a.xx + 0.5;
  out[10] = pair.y;
  out[11] = select(a, b, bool3(true, false, true)).z;
  packed_float3 packed = a;
  packed[1] = 7;
  out[12] = (float3(packed) * packed).y;
  out[13] = float4(a.xy, 9, a.z).w;
  const float2x3 m(float3(1, 2, 3), float3(4, 5, 6));
  out[14] = (m * float2(1, 10)).z;
  out[15] = (transpose(m) * float3(1, 1, 1)).y;
  out[16] = float4x4(3.0)[2].z;
  out[17] = determinant(float3x3(float3(2, 0, 0), float3(0, 3, 0), float3(1, 0, 4)));
  out[17] += determinant(float2x2(1, 2, 3, 5)) + determinant(float4x4(2.0));
  out[18] = v.wzyx.y;
  out[19] = (half2(2048) + 1h).x;
}

void Packing(device uint* out, device const float4* in, uint lane) {
  out[0] = pack_float_to_unorm4x8(in[0]);
  out[1] = pack_float_to_snorm4x8(in[0]);
  out[2] = pack_float_to_unorm2x16(in[0].xy);
  out[3] = pack_half_to_unorm565(half3(1, 0.5, 0));
  out[4] = as_type<uint>(unpack_unorm4x8_to_float(0x80ff0001u).w);
  out[5] = as_type<uint>(unpack_snorm4x8_to_float(0x80ff0001u).w);
  out[6] = pack_float_to_unorm10a2(in[0]);
}

void Accesses(device uchar* out, device const uchar* in, uint lane) {
  *out = *in;
  *(device ushort*)(out + 2) = 2;
  *(device uint*)(out + 4) = 4;
  *(device ulong*)(out + 8) = 8;
  *(device float4*)(out + 16) = float4(1);
  *(device float3*)(out + 32) = float3(1);
  ((device half4*)(out + 48))->yz = half2(1);
  *(device float4*)(out + 64) = *(device float4*)(out + 16);
}

// ---- Simdgroups ----

void SimdReductions(device float* out, device const float* in, uint lane) {
  const float x = in[lane];
  const int i = int(lane) + 1;
  device float* own = out + 24 * lane;
  uint n = 0;
  own[n++] = simd_sum(x);
  own[n++] = simd_min(x);
  own[n++] = simd_max(x);
  own[n++] = simd_product(lane < 4 ? x : 1.0);
  own[n++] = simd_and(i | 64);
  own[n++] = simd_or(i);
  own[n++] = simd_xor(i);
  own[n++] = simd_prefix_inclusive_sum(i);
  own[n++] = simd_prefix_exclusive_sum(i);
  own[n++] = simd_prefix_exclusive_product(lane < 3 ? i : 1);
  own[n++] = quad_sum(i);
  own[n++] = quad_max(float2(x, -x)).y;
  own[n++] = simd_sum(half2(x).yx).x;
  own[n++] = ulong(simd_ballot(lane % 3 == 0)) == 0x49249249ul;
  own[n++] = simd_all(lane < 32) + 2 * simd_any(lane == 40) + 4 * simd_is_first();
  own[n++] = quad_all(lane < 4) + 2 * quad_any(lane == 5);
  own[n++] = ulong(simd_active_threads_mask()) == 0xffffffff;
}

void SimdShuffles(device int* out, device const int* in, uint lane) {
  const int x = in[lane];
  device int* own = out + 16 * lane;
  uint n = 0;
  own[n++] = simd_shuffle(x, 31 - lane);
  own[n++] = simd_shuffle_xor(x, 5);
  own[n++] = simd_shuffle_down(x, 3);
  own[n++] = simd_shuffle_up(x, 3);
  own[n++] = simd_shuffle_rotate_down(x, 3);
  own[n++] = simd_shuffle_rotate_up(x, 3);
  own[n++] = simd_shuffle_and_fill_down(x, -x, 3);
  own[n++] = simd_shuffle_and_fill_up(x, -x, 3, 8);
  own[n++] = simd_broadcast(x, 7);
  own[n++] = simd_broadcast_first(x);
  own[n++] = quad_shuffle(x, 3);
  own[n++] = quad_shuffle_xor(x, 1);
  own[n++] = quad_shuffle_rotate_up(x, 1);
  own[n++] = as_type<ushort>(simd_shuffle_xor(bfloat(float(x)), 1));
}

template <typename T>
void Multiply(device float* out, device const T* in, uint lane) {
  simdgroup_matrix<T, 8, 8> a, b;
  simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(2.0);
  simdgroup_load(a, in, 16, ulong2(1, 2));
  simdgroup_load(b, in, 16, 0, true);
  simdgroup_multiply_accumulate(sum, a, b, sum);
  simdgroup_store(sum, out, 8);
  simdgroup_matrix<T, 8, 8> diagonal(T(3)), product;
  simdgroup_multiply(product, diagonal, a);
  out[64 + 2 * lane] = float(product.thread_elements()[0]);
  out[65 + 2 * lane] = float(product.thread_elements()[1]);
}

// ---- Threads that meet ----

void Exchange(device uint* out, device const uint* in, uint lane) {
  typedef uint Tile[32];
  auto& tile = ::metal_sim::ThreadgroupVariable<Tile>(7, "tile");
  tile[lane] = in[lane];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[lane] = tile[31 - lane];
  simdgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  atomic_thread_fence(mem_flags::mem_device, memory_order_acq_rel, thread_scope_threadgroup);
}

void Atomics(device uint* out, device const uint* in, uint lane) {
  device atomic_uint* counter = (device atomic_uint*)out;
  device atomic_float* total = (device atomic_float*)(out + 1);
  device atomic<int>* lowest = (device atomic<int>*)(out + 2);
  atomic_fetch_add_explicit(counter, 3, memory_order_relaxed);
  atomic_fetch_add_explicit(total, 0.5, memory_order_relaxed);
  atomic_fetch_min_explicit(lowest, -int(lane), memory_order_relaxed);
  atomic_fetch_or_explicit((device atomic_uint*)(out + 3), 1u << lane, memory_order_relaxed);
  uint expected = lane;
  if (atomic_compare_exchange_weak_explicit((device atomic_uint*)(out + 4), &expected, lane + 1,
                                            memory_order_relaxed, memory_order_relaxed)) {
    out[8 + lane] = expected + 100;
  } else {
    out[8 + lane] = expected;
  }
  if (lane == 31) atomic_store_explicit((device atomic_uint*)(out + 5), 77u, memory_order_relaxed);
  if (lane == 31)
    out[6] = atomic_load_explicit((device atomic_uint*)(out + 5), memory_order_relaxed);
}

const metal_sim::Argument kArguments[] = {
    {metal_sim::Source::kBuffer, 0, "out"},
    {metal_sim::Source::kBuffer, 1, "in"},
    {metal_sim::Source::kThreadIndexInSimdgroup, 0, "lane"},
};

template <auto kFunction>
void Run() {
  ::metal_sim::Invoke(kFunction, kArguments);
}

#define ENTRY(...) \
  { #__VA_ARGS__, kArguments, 3, Run < &__VA_ARGS__> }
const metal_sim::Kernel kKernels[] = {
    ENTRY(HalfArithmetic),   ENTRY(BfloatArithmetic), ENTRY(Literals),     ENTRY(Conversions),
    ENTRY(Integers),         ENTRY(FloatFunctions),   ENTRY(Vectors),      ENTRY(Packing),
    ENTRY(Accesses),         ENTRY(SimdReductions),   ENTRY(SimdShuffles), ENTRY(Multiply<half>),
    ENTRY(Multiply<bfloat>), ENTRY(Multiply<float>),  ENTRY(Exchange),     ENTRY(Atomics),
};

const metal_sim::Module kModule = {kKernels, sizeof(kKernels) / sizeof(kKernels[0]), nullptr, 0};

}  // namespace metal_sim_program

extern "C" const metal_sim::Module* metal_sim_module() { return &metal_sim_program::kModule; }
