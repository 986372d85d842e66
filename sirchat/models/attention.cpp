// Attention of single tokens over the rows of a cache, of three types of numbers. `step.cpp` includes
// this file.
#include "products.cpp"

namespace {

struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };  // bfloat16

inline F widen(const float* p) { return (F)load(p); }
inline F widen(const Brain* p) { return halves((const uint16_t*)p); }
inline F widen(const Half* p) { return floats16((const uint16_t*)p); }

inline void narrow(float x, float& y) { y = x; }
inline void narrow(float x, Brain& y) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const bool is_number = (bits & 0x7fffffff) <= 0x7f800000;
  y.bits = is_number ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}
inline void narrow(float x, Half& y) {
#ifdef __ARM_NEON
  const __fp16 half = x;
  memcpy(&y, &half, 2);
#else
  y.bits = _cvtss_sh(x, 0);
#endif
}

inline float sum(F x) { return std::accumulate((float*)&x, (float*)(&x + 1), 0.0f); }

template <class T>
F widen_some(const T* p, int64_t count) {  // at most L, then zeros
  if (count >= L) return widen(p);
  T some[L] = {};
  memcpy(some, p, count * sizeof(T));
  return widen(some);
}

__attribute__((noinline)) float dot(const float* x, const float* y, int64_t n) {
  F sums[4] = {};
  for (int64_t i = 0, at = 0; i < n; i += L, at = (at + 1) % 4)
    sums[at] = fma(widen_some(x + i, n - i), widen_some(y + i, n - i), sums[at]);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Attention of one token's queries q [H, G, D], times log2(e), to n keys and values [H, n, D] of
// numbers T. Each `SPLIT` rows are computed apart, and then put together in order.
template <class T>
struct Attention {
  static constexpr int SPLIT = 128, WIDE = 16 / L;
  // queries at a time; only one for rare types, because code takes time to be compiled
  static constexpr int MOST = std::is_same<T, Brain>::value ? 4 : 1;
  const float* q;
  const T *keys, *values;
  int64_t group, n, size, apart;  // G, n, D, and from a head's rows to the next's
  int64_t splits, length;         // length: D + 2
  float* parts;  // for each split of each query: sum of its weighted values, largest q k, sum of weights

  static F sum_each(const F x[L]) {  // the sums of L vectors
    F sums[L / 4];
    for (int i = 0; i < L / 4; i++, x += 4) {
      F ab = (F)low32((I)x[0], (I)x[1]) + (F)high32((I)x[0], (I)x[1]);
      F cd = (F)low32((I)x[2], (I)x[3]) + (F)high32((I)x[2], (I)x[3]);
      sums[i] = (F)low64((I)ab, (I)cd) + (F)high64((I)ab, (I)cd);
    }
    for (int left = L / 8; left; left /= 2)
      for (int i = 0; i < left; i++) {
        I a = (I)sums[2 * i], b = (I)sums[2 * i + 1];
        sums[i] = (F)lanes02(a, b) + (F)lanes13(a, b);
      }
    return sums[0];
  }

  template <int G>
  void weigh(const T* k, const float* q, int64_t count, float weights[G][SPLIT]) const {
    for (int64_t at = 0; at < count; at += L) {
      F products[G][L];
      for (int64_t i = 0; i < L; i++) {
        const T* row = k + std::min(at + i, count - 1) * size;
        F sums[G] = {};
        for (int64_t d = 0; d < size; d += L) {
          const F key = widen(row + d);
          for (int g = 0; g < G; g++) sums[g] = fma(key, widen(q + g * size + d), sums[g]);
        }
        for (int g = 0; g < G; g++) products[g][i] = sums[g];
      }
      for (int g = 0; g < G; g++) store(weights[g] + at, sum_each(products[g]));
    }
  }

  static void soften(float* w, int64_t count, float* largest_and_sum) {
    F most = (F)load(w), sums = all(0.0f);
    for (int64_t i = L; i < count; i += L) most = most < (F)load(w + i) ? (F)load(w + i) : most;
    const float largest = *std::max_element((float*)&most, (float*)(&most + 1));
    for (int64_t i = 0; i < count; i++) w[i] = power(w[i] - largest);
    std::fill(w + count, w + (count + L - 1) / L * L, 0.0f);
    for (int64_t i = 0; i < count; i += L) sums += (F)load(w + i);
    largest_and_sum[0] = largest, largest_and_sum[1] = sum(sums);
  }

  template <int G, int W>
  void add_values(const T* v, int64_t count, const float weights[G][SPLIT], float* part) const {
    F sums[G][W] = {};
    for (int64_t i = 0; i < count; i++, v += size)
      for (int w = 0; w < W; w++) {
        const F value = widen(v + w * L);
        for (int g = 0; g < G; g++) sums[g][w] = fma(value, all(weights[g][i]), sums[g][w]);
      }
    for (int g = 0; g < G; g++)
      for (int w = 0; w < W; w++) store(part + g * splits * length + w * L, sums[g][w]);
  }

  template <int G>
  void some_queries(int64_t head, int64_t first, int64_t split) const {
    const int64_t start = split * SPLIT, count = std::min<int64_t>(n - start, SPLIT);
    const int64_t query = head * group + first, at = head * apart + start * size;
    float *part = parts + (query * splits + split) * length, weights[G][SPLIT];
    weigh<G>(keys + at, q + query * size, count, weights);
    for (int g = 0; g < G; g++) soften(weights[g], count, part + g * splits * length + size);
    int64_t d = 0;
    for (; d + 4 * WIDE * L <= size; d += 4 * WIDE * L)
      add_values<G, 4 * WIDE>(values + at + d, count, weights, part + d);
    for (; d < size; d += WIDE * L) add_values<G, WIDE>(values + at + d, count, weights, part + d);
  }

  void compute(int64_t head, int64_t split) const {
    for (int64_t g = 0, left = group; left; g += std::min<int64_t>(left, MOST), left = group - g)
      if (left == 1 || MOST < 2) some_queries<1>(head, g, split);
      else if (left == 2) some_queries<std::min(2, MOST)>(head, g, split);
      else if (left == 3) some_queries<std::min(3, MOST)>(head, g, split);
      else some_queries<MOST>(head, g, split);
  }

  void put_together(int64_t query, float* y) const {
    const float *part = parts + query * splits * length, *end = part + splits * length;
    float most = part[size], sum = 0;
    for (auto p = part; p < end; p += length) most = std::max(most, p[size]);
    std::fill(y, y + size, 0.0f);
    for (auto p = part; p < end; p += length) {
      const float share = power(p[size] - most);
      for (int64_t d = 0; d < size; d++) y[d] += share * p[d];
      sum += share * p[size + 1];
    }
    for (int64_t d = 0; d < size; d++) y[d] /= sum;
  }
};

}  // namespace
