// Products of rows of numbers x [M, K] with packed weights [N, K]: y = x W^T, float32 [M, N].
//
// x is rounded to 8 bits in groups of 32, or to 16 where one number is far above the others. A thread
// multiplies all rows of x with some rows of the weights, which it reads once. Each number of y is
// computed by the same operations in one order, whatever M and the number of threads are.
// `attention.cpp` includes this file.
#include <torch/csrc/stable/c/shim.h>

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

constexpr int GROUP = 32, CHUNKS = GROUP / 4, TILE = 8;
constexpr int64_t FEW = 32;  // rows of x that `tiles.cpp` does not multiply faster

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

// Rows of x, rounded to 8 bits: x = q * scale in each group. In a group with an outlier, beside which
// the others would be rounded to little, what that leaves has 8 bits, too: x = (q + rest / FINE) * scale.
struct Rounded {
  static constexpr int FINE = 254;                  // half a step of q is 127 steps of the rest
  static constexpr int OUTLIER = 127 * GROUP / 12;  // sum of a group whose largest is 12 times the mean
  int64_t rows, groups;
  int8_t *q, *rest;             // [M, K]; a rest is written and read only where there is one
  float *scales, *fine, *sums;  // [M, K / 32]; a step of the rest, and the sums of the rounded x
  int32_t *totals, *rests;      // the sums of q and of the rest
  int8_t* has_rest;

  static int64_t size(int64_t m, int64_t k) { return m * (2 * k + 21 * (k / GROUP)); }
  Rounded(int64_t m, int64_t k, char* memory) : rows(m), groups(k / GROUP) {
    scales = (float*)memory, fine = scales + m * groups, sums = fine + m * groups;
    totals = (int32_t*)(sums + m * groups), rests = totals + m * groups;
    q = (int8_t*)(rests + m * groups), rest = q + m * k, has_rest = rest + m * k;
  }

  void round(const float* x, int64_t row, int64_t from, int64_t to) {  // these groups of a row
    // Tiles of 8 rows; in each, the rows' first groups, then their second ones, and so on.
    const int64_t tile = row & -TILE, apart = std::min<int64_t>(rows - tile, TILE);
    x += from * GROUP;
    for (int64_t g = from; g < to; g++, x += GROUP) {
      float scale, left[GROUP];
      int32_t bits[GROUP], most = 0, sizes = 0;
      memcpy(bits, x, sizeof(bits));
      // as whole numbers, so that what is no number is larger than all that are
      for (int i = 0; i < GROUP; i++) most = std::max(most, bits[i] & 0x7fffffff);
      memcpy(&scale, &most, 4);
      scale /= 127;
      const float factor = scale > 1e-37f ? 1 / scale : 0;
      for (int i = 0; i < GROUP; i++) left[i] = x[i] * factor;
      const int64_t at = tile * groups + g * apart + row - tile;
      int8_t* steps = q + at * GROUP;
      totals[at] = to_bytes(left, steps), scales[at] = scale, sums[at] = scale * totals[at];
      for (int i = 0; i < GROUP; i++) sizes += std::abs(steps[i]);
      has_rest[at] = 0 < sizes && sizes < OUTLIER;
      fine[at] = scale / FINE;
      if (!has_rest[at]) continue;
      for (int i = 0; i < GROUP; i++) left[i] = (left[i] - steps[i]) * FINE;
      rests[at] = to_bytes(left, rest + at * GROUP), sums[at] += fine[at] * rests[at];
    }
  }

 private:
  static int32_t to_bytes(const float* x, int8_t* y) {  // returns the sum
    float numbers[GROUP];
    int32_t bits[GROUP], sum = 0;
    int8_t bytes[GROUP];
    // at this size, the last bit of a float counts ones
    for (int i = 0; i < GROUP; i++) numbers[i] = x[i] + 0x1.8p23f;
    memcpy(bits, numbers, sizeof(bits));
    for (int i = 0; i < GROUP; i++) bytes[i] = (int8_t)bits[i];
    for (int i = 0; i < GROUP; i++) sum += bytes[i];
    memcpy(y, bytes, GROUP);
    return sum;
  }
};

// Four bits, as torch packs them for this processor: blocks of 64 rows (of 32 without AVX-512, of 16
// on ARM); for each column, a byte of each two rows. A weight is (w - 8) * scale + zero.
struct Four {
  static constexpr int STRIPS = 4, ROWS = STRIPS * L, CENTER = 8;
  static constexpr bool HAS_ZEROS = true;
  const uint8_t* packed;
  const uint16_t* scales;  // bfloat16 [K / 32, N, 2]
  int64_t n, k, apart;  // N, K, and from a row of y to the next

  struct Group {  // the weights of a block in one group of columns
    const uint8_t* packed;
    void read(int c, I w[STRIPS]) const {  // four columns of all rows
      I left, right;
      columns4(packed + 4 * c * ROWS / 2, left, right);
      const I low = all(0x0f0f0f0f);
      w[0] = left & low, w[1] = right & low;
      w[2] = down(left) & low, w[3] = down(right) & low;
      if (PAIRED) {  // they are the even and the odd rows of each half
        const I even[] = {w[0], w[1]}, odd[] = {w[2], w[3]};
        for (int i = 0; i < 2; i++) w[2 * i] = low32(even[i], odd[i]), w[2 * i + 1] = high32(even[i], odd[i]);
      }
    }
  };
  Group group(int64_t row, int64_t g) const {
    return {packed + row * k / 2 + g * GROUP * ROWS / 2};
  }
  void factors(int64_t row, int64_t g, F& scale, F& zero) const {
    const uint16_t* p = scales + 2 * (g * n + row);
    __builtin_prefetch(p + 2 * ROWS);
    for (int i = 0; i < GROUP * L / 2; i += 64)
      __builtin_prefetch(packed + (row + ROWS) * k / 2 + g * GROUP * L / 2 + i);
    I pairs = load(p);
    scale = bits(up(pairs)), zero = bits(pairs & all((int32_t)0xffff0000));
  }
  static I add_dot(I sum, I w, I x) { return dot4(sum, w, x); }
  static I end(I sum, int32_t total) { return add(end4(sum), all(-CENTER * total)); }
  void finish(int64_t, F&) const {}
};

// Five bits: for 16 rows and a group, in vectors of four neighbours of each row, the low four bits of four columns and
// of those 16 after (4 vectors), then the fifth bits of all columns. A weight is (w - 16) * scale; scales are float16
// [N / 16, K / 32, 16].
struct Five {
  static constexpr int ROWS = 16, STRIPS = ROWS / L, CENTER = 16, BYTES = 5 * 64;  // of a group
  static constexpr bool HAS_ZEROS = false;
  const uint8_t* packed;
  const uint16_t* scales;
  int64_t n, k, apart;  // N, K, and from a row of y to the next

  struct Group {
    const uint8_t* packed;
    void read(int c, I w[STRIPS]) const {
      if (c < BYTES / 64) __builtin_prefetch(packed + 4096 + 64 * c);
      for (int s = 0; s < STRIPS; s++) {
        const I four = load(packed + c % 4 * 64 + s * sizeof(I)), fifths = load(packed + 256 + s * sizeof(I));
        const I fifth = c < 4 ? (I)((Bits)fifths << (4 - c)) : (I)((Bits)fifths >> (c - 4));
        w[s] = ((c < 4 ? four : down(four)) & all(0x0f0f0f0f)) | (fifth & all(0x10101010));
      }
    }
  };
  Group group(int64_t row, int64_t g) const { return {packed + (row / ROWS * (k / GROUP) + g) * BYTES}; }
  void factors(int64_t row, int64_t g, F& scale, F&) const {
    scale = floats16(scales + (row / ROWS * (k / GROUP) + g) * ROWS + row % ROWS);
  }
  static I add_dot(I sum, I w, I x) { return dot5(sum, w, x); }
  static I end(I sum, int32_t total) { return add(sum, all(-CENTER * total)); }
  void finish(int64_t, F&) const {}
};

// Eight bits, int8 [N, K], and a scale for each row, bfloat16 [N].
struct Eight {
#ifdef HAS_SIGN
  static constexpr int CENTER = 0;
#else
  static constexpr int CENTER = L == 4 ? 0 : 128;
#endif
  static constexpr int STRIPS = 1, ROWS = L;
  static constexpr bool HAS_ZEROS = false;
  const uint8_t* packed;
  const uint16_t* scales;
  int64_t n, k, apart;  // N, K, and from a row of y to the next

  struct Group {
    I columns[CHUNKS];
    void read(int c, I w[STRIPS]) const { w[0] = columns[c]; }
  };
  Group group(int64_t row, int64_t g) const {
    const uint8_t* p = packed + row * k + g * GROUP;
    I fours[2][4];  // each lane has 4 columns of 4 rows
    for (int i = 0; i < 2; i++, p += second(k)) {
      I a = row_pair(p, k), b = row_pair(p + k, k);
      I c = row_pair(p + 2 * k, k), d = row_pair(p + 3 * k, k);
      I ab = low32(a, b), cd = low32(c, d);
      fours[i][0] = low64(ab, cd), fours[i][1] = high64(ab, cd);
      ab = high32(a, b), cd = high32(c, d);
      fours[i][2] = low64(ab, cd), fours[i][3] = high64(ab, cd);
    }
    Group group;
    const I center = all(CENTER ? (int32_t)0x80808080 : 0);  // makes them unsigned
    for (int i = 0; i < 4; i++) {
      group.columns[i] = lanes02(fours[0][i], fours[1][i]) ^ center;
      group.columns[i + 4] = lanes13(fours[0][i], fours[1][i]) ^ center;
    }
    return group;
  }
  void factors(int64_t row, int64_t g, F& scale, F&) const {
    for (int i = 0; i < L; i++) __builtin_prefetch(packed + (row + L + i) * k + g * GROUP);
    scale = all(1.0f);
  }
  static I add_dot(I sum, I w, I x) { return dot8(sum, w, x); }
  static I end(I sum, int32_t total) { return add(sum, all(-CENTER * total)); }
  void finish(int64_t row, F& sum) const { sum *= halves(scales + row); }
};

// One row of x with all rows of a block.
template <class W>
void one_row(const W& weights, const Rounded& x, int64_t row, float* y) {
  constexpr int S = W::STRIPS;
  F sums[S];
  for (F& sum : sums) sum = all(0.0f);
  auto add_group = [&](int64_t g, auto has_rest) {
    const auto *q = (const int32_t*)(x.q + g * GROUP), *rest = (const int32_t*)(x.rest + g * GROUP);
    I dots[S], of_rest[S];
    for (int s = 0; s < S; s++) dots[s] = of_rest[s] = all(0);
    const auto group = weights.group(row, g);
    for (int c = 0; c < CHUNKS; c++) {
      I w[S];
      group.read(c, w);
      for (int s = 0; s < S; s++) dots[s] = W::add_dot(dots[s], w[s], all(q[c]));
      for (int s = 0; s < S && has_rest; s++) of_rest[s] = W::add_dot(of_rest[s], w[s], all(rest[c]));
    }
    for (int s = 0; s < S; s++) {
      F scale, zero;
      weights.factors(row + s * L, g, scale, zero);
      sums[s] = fma(wide(W::end(dots[s], x.totals[g])), scale * all(x.scales[g]), sums[s]);
      if (W::HAS_ZEROS) sums[s] = fma(zero, all(x.sums[g]), sums[s]);
      if (has_rest) sums[s] = fma(wide(W::end(of_rest[s], x.rests[g])), scale * all(x.fine[g]), sums[s]);
    }
  };
  for (int64_t g = 0; g < x.groups; g++)
    if (x.has_rest[g]) add_group(g, std::true_type());
    else add_group(g, std::false_type());
  for (int s = 0; s < S; s++) {
    weights.finish(row + s * L, sums[s]);
    store(y + row + s * L, sums[s]);
  }
}

// The sums of a group w [8] with the rests of `count` rows of x, from `at` on; 0 without one.
template <class W>
__attribute__((noinline)) void dots_of_rests(const I* w, const Rounded& x, int64_t at, int count, I* dots) {
  for (int i = 0; i < count; i++, at++) {
    dots[i] = all(0);
    const int32_t* rest = (const int32_t*)(x.rest + at * GROUP);
    for (int c = 0; c < CHUNKS && x.has_rest[at]; c++) dots[i] = W::add_dot(dots[i], w[c], all(rest[c]));
    if (x.has_rest[at]) dots[i] = W::end(dots[i], x.rests[at]);
  }
}

// M rows of x from m on, with L rows of the weights, unpacked to w [K / 32, 8].
template <int M, class W>
void some_rows(const W& weights, const I* w, const Rounded& x, int64_t m, int64_t row, float* y) {
  F sums[M];
  for (F& sum : sums) sum = all(0.0f);
  int64_t at = m * x.groups;
  for (int64_t g = 0; g < x.groups; g++, w += CHUNKS, at += M) {
    const int32_t* q = (const int32_t*)(x.q + at * GROUP);
    I dots[M];
    for (I& dot : dots) dot = all(0);
    for (int c = 0; c < CHUNKS; c++)
      for (int i = 0; i < M; i++) dots[i] = W::add_dot(dots[i], w[c], all(q[i * CHUNKS + c]));
    F scale, zero;
    weights.factors(row, g, scale, zero);
    for (int i = 0; i < M; i++) {
      sums[i] = fma(wide(W::end(dots[i], x.totals[at + i])), scale * all(x.scales[at + i]), sums[i]);
      if (W::HAS_ZEROS) sums[i] = fma(zero, all(x.sums[at + i]), sums[i]);
    }
    int8_t any = 0;
    for (int i = 0; i < M; i++) any |= x.has_rest[at + i];
    if (!any) continue;
    I of_rests[M];
    dots_of_rests<W>(w, x, at, M, of_rests);
    for (int i = 0; i < M; i++) sums[i] = fma(wide(of_rests[i]), scale * all(x.fine[at + i]), sums[i]);
  }
  for (int i = 0; i < M; i++) {
    weights.finish(row, sums[i]);
    store(y + (m + i) * weights.apart + row, sums[i]);
  }
}

template <class W>
void many_rows(const W& weights, const Rounded& x, int64_t row, float* y, I* unpacked) {
  const int64_t size = x.groups * CHUNKS;
  for (int64_t g = 0; g < x.groups; g++) {
    const auto group = weights.group(row, g);
    for (int c = 0; c < CHUNKS; c++) {
      I w[W::STRIPS];
      group.read(c, w);
      for (int s = 0; s < W::STRIPS; s++) unpacked[s * size + g * CHUNKS + c] = w[s];
    }
  }
  constexpr decltype(&some_rows<1, W>) tile[] = {
      some_rows<1, W>, some_rows<2, W>, some_rows<3, W>, some_rows<4, W>,
      some_rows<5, W>, some_rows<6, W>, some_rows<7, W>, some_rows<8, W>};
  for (int s = 0; s < W::STRIPS; s++)
    for (int64_t m = 0; m < x.rows; m += TILE)
      tile[std::min<int64_t>(x.rows - m, TILE) - 1](weights, unpacked + s * size, x, m, row + s * L, y);
}

// Numbers of y from block `from` to before block `to` of the weights' rows.
template <class W>
void multiply_blocks(const W& weights, const Rounded& x, int64_t from, int64_t to, float* y, I* unpacked) {
  for (int64_t at = from; at < to; at++) {
    const int64_t row = std::min<int64_t>(at * W::ROWS, weights.n - W::ROWS);
    if (x.rows < 2) one_row(weights, x, row, y);
    else many_rows(weights, x, row, y, unpacked);
  }
}

template <class W>
int64_t count_blocks(const W& weights) { return (weights.n + W::ROWS - 1) / W::ROWS; }

template <class W>
int64_t unpacked_size(const W& weights) { return W::STRIPS * weights.k / 4 * (int64_t)sizeof(I); }

struct Memory {  // aligned for vectors
  std::unique_ptr<char[]> bytes;
  int64_t size = 0;
  char* of(int64_t wanted) {
    if (wanted > size) bytes.reset(new char[(size = wanted) + 64]);
    return (char*)(((uintptr_t)bytes.get() + 63) & -64);
  }
};

template <class Work>
void in_parallel(Work& work, int64_t count) {
  auto call = [](int64_t from, int64_t to, void* w) { (*(Work*)w)(from, to); };
  if (torch_parallel_for(0, count, 1, call, &work)) throw std::bad_alloc();  // no other error is possible here
}

}  // namespace

#include "tiles.cpp"

namespace {

template <class W>
void multiply(const W& weights, const float* x, int64_t m, float* y) {
#ifdef HAS_TILES
  if (m > FEW && may_use_tiles()) return multiply_by_tiles(weights, x, m, y);
#endif
  Memory memory;
  Rounded rounded(m, weights.k, memory.of(Rounded::size(m, weights.k)));
  auto round = [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) rounded.round(x + i * weights.k, i, 0, rounded.groups);
  };
  auto part = [&](int64_t from, int64_t to) {
    Memory unpacked;
    multiply_blocks(weights, rounded, from, to, y, m < 2 ? nullptr : (I*)unpacked.of(unpacked_size(weights)));
  };
  if (m < 4) round(0, m);
  else in_parallel(round, m);
  in_parallel(part, count_blocks(weights));
}

template <class T>
T* data(AtenTensorHandle tensor) {
  void* p;
  aoti_torch_get_data_ptr(tensor, &p);
  return (T*)p;
}

AOTITorchError empty(int64_t rows, int64_t columns, AtenTensorHandle* y) {
  const int64_t shape[] = {rows, columns}, strides[] = {columns, 1};
  const int32_t float32 = aoti_torch_dtype_float32(), cpu = aoti_torch_device_type_cpu();
  return aoti_torch_empty_strided(2, shape, strides, float32, cpu, 0, y);
}

int64_t size_of(AtenTensorHandle tensor, int dim) {
  int64_t* sizes;
  aoti_torch_get_sizes(tensor, &sizes);
  return sizes[dim];
}

// Operators are given x, packed weights, their scales, and perhaps ids.
template <class W>
W weights_of(const AtenTensorHandle* given) {
  const int64_t n = size_of(given[1], 0);
  return {data<uint8_t>(given[1]), data<uint16_t>(given[2]), n, size_of(given[0], 1), n};
}

template <class W>
AOTITorchError product(const AtenTensorHandle* given, AtenTensorHandle* y) {
  const W weights = weights_of<W>(given);
  const int64_t m = size_of(given[0], 0);
  if (auto error = empty(m, weights.n, y)) return error;
  multiply(weights, data<float>(given[0]), m, data<float>(*y));
  return 0;
}

template <int COUNT, AOTITorchError (*F)(const AtenTensorHandle*, AtenTensorHandle*)>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  auto tensors = (AtenTensorHandle*)stack;
  AtenTensorHandle y;
  const auto error = F(tensors, &y);
  for (int i = 0; i < COUNT; i++) aoti_torch_delete_tensor_object(tensors[i]);
  if (error) throw std::bad_alloc();
  tensors[0] = y;
}

#ifdef HAS_TILES
AOTITorchError scores(const AtenTensorHandle* given, AtenTensorHandle* y) {
  const Eight weights = weights_of<Eight>(given);
  const int64_t m = size_of(given[0], 0);
  if (auto error = empty((weights.n + SCORED - 1) / SCORED + 1, m, y)) return error;
  score(weights, data<float>(given[0]), m, data<int64_t>(given[3]), data<float>(*y));
  return 0;
}

void register_scores(TorchLibraryHandle definitions, TorchLibraryHandle kernels) {
  if (!may_use_tiles()) return;
  aoti_torch_library_def(definitions, "score_8(Tensor x, Tensor packed, Tensor scales, Tensor ids) -> Tensor");
  torch_library_impl(kernels, "score_8", boxed<4, scores>, TORCH_ABI_VERSION);
}
#else
void register_scores(TorchLibraryHandle, TorchLibraryHandle) {}
#endif

const int registered = [] {
  TorchLibraryHandle definitions, kernels;  // never deleted, or torch would forget them
  aoti_torch_library_init_fragment("sirchat", __FILE__, __LINE__, &definitions);
  aoti_torch_library_init_impl("sirchat", "CPU", __FILE__, __LINE__, &kernels);
  aoti_torch_library_def(definitions, "multiply_4(Tensor x, Tensor packed, Tensor scales) -> Tensor");
  aoti_torch_library_def(definitions, "multiply_5(Tensor x, Tensor packed, Tensor scales) -> Tensor");
  aoti_torch_library_def(definitions, "multiply_8(Tensor x, Tensor packed, Tensor scales) -> Tensor");
  register_scores(definitions, kernels);
  torch_library_impl(kernels, "multiply_4", boxed<3, product<Four>>, TORCH_ABI_VERSION);
  torch_library_impl(kernels, "multiply_5", boxed<3, product<Five>>, TORCH_ABI_VERSION);
  return torch_library_impl(kernels, "multiply_8", boxed<3, product<Eight>>, TORCH_ABI_VERSION);
}();

}  // namespace
