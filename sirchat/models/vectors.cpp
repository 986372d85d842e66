// Vectors of numbers of three kinds of processors, and what they compute. `weights.cpp` includes this file.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <type_traits>

#ifdef __ARM_NEON
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

namespace {

constexpr int GROUP = 32, CHUNKS = GROUP / 4;

// Vectors of L numbers. In a vector of bytes, each of L rows of the weights has four neighbours.
#ifdef __AVX512BW__
constexpr int L = 16;
#elif defined(__AVX2__)
constexpr int L = 8;
#else
constexpr int L = 4;
#endif
using I = long long __attribute__((vector_size(4 * L)));
using F = float __attribute__((vector_size(4 * L)));
using Ints = int32_t __attribute__((vector_size(4 * L)));
using Bits = uint32_t __attribute__((vector_size(4 * L)));
inline I all(int32_t x) { return (I)(x - Ints{}); }
inline F all(float x) { return x - F{}; }
inline F wide(I x) { return __builtin_convertvector((Ints)x, F); }
inline F bits(I x) { return (F)x; }
inline I up(I x) { return (I)((Ints)x << 16); }
inline I down(I x) { return (I)((Bits)x >> 4); }
inline I add(I x, I y) { return (I)((Ints)x + (Ints)y); }
inline void store(float* p, F x) { memcpy(p, &x, sizeof(x)); }
inline I load(const void* p) {
  I x;
  memcpy(&x, p, sizeof(x));
  return x;
}

#ifdef __AVX512BW__
inline F fma(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
#ifdef __AVX512VNNI__
#define HAS_DOT 1
inline I dot(I sum, I w, I x) { return _mm512_dpbusd_epi32(sum, w, x); }
#else
inline I add16(I x, I y) { return _mm512_add_epi16(x, y); }
inline I pairs(I w, I x) { return _mm512_maddubs_epi16(w, x); }
inline I times(I x, short y) { return _mm512_madd_epi16(x, _mm512_set1_epi16(y)); }
#endif
// Four columns of 32 rows each; `__builtin_shuffle` is GCC's alone.
#define ROW(i) i, i + 32, i + 64, i + 96
#define ROWS4(i) ROW(i), ROW(i + 1), ROW(i + 2), ROW(i + 3)
#define ROWS16(i) ROWS4(i), ROWS4(i + 4), ROWS4(i + 8), ROWS4(i + 12)
inline void columns4(const uint8_t* p, I& left, I& right) {
  using Bytes = uint8_t __attribute__((vector_size(64)));
  const Bytes x = (Bytes)load(p), y = (Bytes)load(p + 64);
  left = (I)__builtin_shufflevector(x, y, ROWS16(0)), right = (I)__builtin_shufflevector(x, y, ROWS16(16));
}
inline I low32(I x, I y) { return _mm512_unpacklo_epi32(x, y); }
inline I high32(I x, I y) { return _mm512_unpackhi_epi32(x, y); }
inline I low64(I x, I y) { return _mm512_unpacklo_epi64(x, y); }
inline I high64(I x, I y) { return _mm512_unpackhi_epi64(x, y); }
inline I lanes02(I x, I y) { return _mm512_shuffle_i64x2(x, y, 0x88); }
inline I lanes13(I x, I y) { return _mm512_shuffle_i64x2(x, y, 0xdd); }
inline F halves(const uint16_t* p) {  // bfloat16
  return bits(up(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))));
}
inline F of_bytes(const uint8_t* p) { return wide(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline F of_bytes(const int8_t* p) { return wide(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline F floats16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
constexpr bool PAIRED = false;  // whether a byte of four bits has two rows that follow one another
inline int64_t second(int64_t apart) { return 8 * apart; }
inline I row_pair(const uint8_t* p, int64_t apart) {  // 32 bytes of a row, and of the fourth after
  I low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i*)(p + 4 * apart)), 1);
}
#elif defined(__AVX2__)
inline F fma(F x, F y, F z) { return _mm256_fmadd_ps(x, y, z); }
#ifdef __AVXVNNI__
#define HAS_DOT 1
inline I dot(I sum, I w, I x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#else
#define HAS_SIGN 1
inline I add16(I x, I y) { return _mm256_add_epi16(x, y); }
inline I pairs(I w, I x) { return _mm256_maddubs_epi16(w, x); }
inline I times(I x, short y) { return _mm256_madd_epi16(x, _mm256_set1_epi16(y)); }
#endif
inline void columns4(const uint8_t* p, I& left, I& right) {
  __m128i k[4];
  for (int i = 0; i < 4; i++) k[i] = _mm_loadu_si128((const __m128i*)(p + 16 * i));
  __m128i x = _mm_unpacklo_epi8(k[0], k[1]), y = _mm_unpacklo_epi8(k[2], k[3]);
  left = _mm256_set_m128i(_mm_unpackhi_epi16(x, y), _mm_unpacklo_epi16(x, y));
  x = _mm_unpackhi_epi8(k[0], k[1]), y = _mm_unpackhi_epi8(k[2], k[3]);
  right = _mm256_set_m128i(_mm_unpackhi_epi16(x, y), _mm_unpacklo_epi16(x, y));
}
inline I low32(I x, I y) { return _mm256_unpacklo_epi32(x, y); }
inline I high32(I x, I y) { return _mm256_unpackhi_epi32(x, y); }
inline I low64(I x, I y) { return _mm256_unpacklo_epi64(x, y); }
inline I high64(I x, I y) { return _mm256_unpackhi_epi64(x, y); }
inline I lanes02(I x, I y) { return _mm256_permute2x128_si256(x, y, 0x20); }
inline I lanes13(I x, I y) { return _mm256_permute2x128_si256(x, y, 0x31); }
inline F halves(const uint16_t* p) {
  return bits(up(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p))));
}
inline F of_bytes(const uint8_t* p) { return wide(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
inline F of_bytes(const int8_t* p) { return wide(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
inline F floats16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
constexpr bool PAIRED = false;
inline int64_t second(int64_t apart) { return 4 * apart; }
inline I row_pair(const uint8_t* p, int64_t) { return load(p); }
#else
#define HAS_DOT 1
inline F fma(F x, F y, F z) { return (F)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y); }
inline I dot(I sum, I w, I x) {  // both are signed here
  const int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
#ifdef __ARM_FEATURE_DOTPROD
  return (I)vdotq_s32((int32x4_t)sum, a, b);
#else
  int16x8_t left = vmull_s8(vget_low_s8(a), vget_low_s8(b)), right = vmull_high_s8(a, b);
  return add(sum, (I)vpaddq_s32(vpaddlq_s16(left), vpaddlq_s16(right)));
#endif
}
inline void columns4(const uint8_t* p, I& left, I& right) {
  const uint8_t every8[] = {0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27};
  const uint8x16x2_t x = vld1q_u8_x2(p);
  const uint8x16_t at = vld1q_u8(every8);
  left = (I)vqtbl2q_u8(x, at), right = (I)vqtbl2q_u8(x, vaddq_u8(at, vdupq_n_u8(4)));
}
inline I low32(I x, I y) { return (I)vzip1q_u32((uint32x4_t)x, (uint32x4_t)y); }
inline I high32(I x, I y) { return (I)vzip2q_u32((uint32x4_t)x, (uint32x4_t)y); }
inline I low64(I x, I y) { return (I)vzip1q_u64((uint64x2_t)x, (uint64x2_t)y); }
inline I high64(I x, I y) { return (I)vzip2q_u64((uint64x2_t)x, (uint64x2_t)y); }
inline I lanes02(I x, I) { return x; }
inline I lanes13(I, I y) { return y; }
inline F halves(const uint16_t* p) { return bits(up((I)vmovl_u16(vld1_u16(p)))); }
template <class T>
inline F of_bytes(const T* p) { return F{(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
inline F floats16(const uint16_t* p) {
  float16x4_t x;
  memcpy(&x, p, 8);
  return (F)vcvt_f32_f16(x);
}
constexpr bool PAIRED = true;
inline int64_t second(int64_t) { return 16; }
inline I row_pair(const uint8_t* p, int64_t) { return load(p); }
#endif

inline float power(float x) {  // 2^x for x <= 0
  x = x < -126.0f ? -126.0f : x;
  const float whole = x + 0x1.8p23f, t = (x - (whole - 0x1.8p23f)) * 0.693147181f;
  float y = 1 + t * (1 + t * (1 / 2.f + t * (1 / 6.f + t * (1 / 24.f + t * (1 / 120.f + t / 720)))));
  int32_t exponent, bits;
  memcpy(&exponent, &whole, 4), memcpy(&bits, &y, 4);
  bits += exponent << 23;
  memcpy(&y, &bits, 4);
  return y;
}

// Add the products of four unsigned weights and four signed numbers to each sum. With four bits, a
// whole group fits into pairs of sums of 16 bits.
#ifdef HAS_DOT
inline I dot4(I sum, I w, I x) { return dot(sum, w, x); }
inline I end4(I sum) { return sum; }
inline I dot5(I sum, I w, I x) { return dot(sum, w, x); }
inline I dot8(I sum, I w, I x) { return dot(sum, w, x); }
#else
inline I dot4(I sum, I w, I x) { return add16(sum, pairs(w, x)); }
inline I end4(I sum) { return times(sum, 1); }
inline I dot5(I sum, I w, I x) { return add(sum, times(pairs(w, x), 1)); }
inline I dot8(I sum, I w, I x) {  // pairs of larger weights would not fit into 16 bits
#ifdef HAS_SIGN
  return add(sum, times(pairs(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), 1));
#endif
  const I low = all(0x0f0f0f0f);
  sum = add(sum, times(pairs(w & low, x), 1));
  return add(sum, times(pairs(down(w) & low, x), 16));
}
#endif

}  // namespace
