// Products of many rows of numbers x [M, K] with packed weights [N, K] by a processor's matrix units (AMX).
//
// Weights and x become bfloat16, their products are summed in float32. A thread unpacks some rows of the
// weights into a buffer that stays in its cache, multiplies all rows of x with them, and overwrites them.
// Each number of y is computed by the same operations in one order, whatever M and the number of
// threads are. `products.cpp` includes this file.
#if defined(WITH_TILES) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int SIDE = 16, PAIR = 2 * SIDE;  // rows of a tile, and of two
constexpr int64_t TILE_BYTES = 1024, UNIT = 2 * PAIR;  // rows of the weights that are unpacked together
constexpr int64_t DEEP = 16, WIDE = 4;  // so many groups of them, of so many units in turn

// Whether the system lets this process use tiles.
inline bool may_use_tiles() {
  static const bool may = !syscall(SYS_arch_prctl, 0x1023, 18);  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  return may;
}

// All tiles have 16 rows of 64 bytes, until the end of the block. oneDNN remembers its own, and would go on with these.
class TileShapes {
 public:
  TileShapes() {
    alignas(64) uint8_t all[64] = {1};
    for (int i = 0; i < 8; i++) all[16 + 2 * i] = 64, all[48 + i] = SIDE;
    _tile_storeconfig(before);
    _tile_loadconfig(all);
  }
  ~TileShapes() { _tile_loadconfig(before); }

 private:
  alignas(64) uint8_t before[64];
};

// 32 rows of x from `row` on, of which there may be fewer: for each group, and each of the terms whose sum
// a number is, two tiles.
template <int TERMS>
void to_tiles(const float* x, int64_t m, int64_t k, int64_t row, char* tiles) {
  for (int64_t i = 0; i < PAIR; i++)
    for (int64_t g = 0; g < k / GROUP; g++) {
      F left{}, right{};
      const float* from = x + (row + i) * k + g * GROUP;
      if (row + i < m) left = (F)load(from), right = (F)load(from + L);
      for (int p = 0; p < TERMS; p++) {
        uint16_t both[GROUP];
        store((float*)both, (F)_mm512_cvtne2ps_pbh(right, left));
        memcpy(tiles + ((g * TERMS + p) * PAIR + i) * sizeof(both), both, sizeof(both));
        left -= halves(both), right -= halves(both + L);
      }
    }
}

// The weights of two neighbouring columns, from the low bytes of w; in each lane those of one row.
inline I neighbours(I w, F scale, F zero) {
#define BOTH(i) i, i + 16, i + 1, i + 17, i + 2, i + 18, i + 3, i + 19
  using Words = uint16_t __attribute__((vector_size(64)));
  const Words order = {BOTH(0), BOTH(4), BOTH(8), BOTH(12)};
  const I low = all(255);
  const F even = fma(wide(w & low), scale, zero), odd = fma(wide((I)((Bits)w >> 8) & low), scale, zero);
  return _mm512_permutexvar_epi16((I)order, (I)_mm512_cvtne2ps_pbh(odd, even));
}

// `count` groups of a unit, from g on, to tiles [2, count, 2].
template <class W>
void unpack(const W& weights, int64_t unit, int64_t g, int64_t count, I* tiles) {
  constexpr int S = W::STRIPS, P = W::PARTS, EACH = UNIT / W::ROWS;
  for (int64_t b = 0; b < EACH; b++) {
    const int64_t row = std::min<int64_t>((unit * EACH + b) * W::ROWS, weights.n - W::ROWS);
    for (int64_t i = 0; i < count; i++) {
      const auto group = weights.group(row, g + i);
      F scale[S][P], zero[S][P];
      for (int s = 0; s < S; s++) {
        F added = all(0.0f);
        weights.factors(row + s * L, g + i, scale[s], added);
        for (int p = 0; p < P; p++) zero[s][p] = added - scale[s][p] * all((float)W::CENTER);
      }
      for (int c = 0; c < CHUNKS; c++) {
        I w[S];
        group.read(c, w);
        for (int s = 0; s < S; s++) {
          const int64_t strip = b * S + s;
          I* tile = tiles + ((strip / 2 * count + i) * 2 + strip % 2) * SIDE + 2 * c;
          const F by = scale[s][c * P / CHUNKS], added = zero[s][c * P / CHUNKS];
          tile[0] = neighbours(w[s], by, added);
          tile[1] = neighbours((I)((Bits)w[s] >> 16), by, added);
        }
      }
    }
  }
}

// Adds products of `count` groups of 32 rows of x and 32 of the weights to four tiles of sums.
template <int TERMS>
void add_tiles(const char* x, const char* w, int64_t count, char* sums) {
  constexpr int64_t ROW = 64;
  _tile_loadd(0, sums, ROW);
  _tile_loadd(1, sums + TILE_BYTES, ROW);
  _tile_loadd(2, sums + 2 * TILE_BYTES, ROW);
  _tile_loadd(3, sums + 3 * TILE_BYTES, ROW);
  for (int64_t i = 0; i < count; i++, w += 2 * TILE_BYTES) {
    _tile_loadd(6, w, ROW);
    _tile_loadd(7, w + TILE_BYTES, ROW);
    for (int p = 0; p < TERMS; p++, x += 2 * TILE_BYTES) {
      _tile_stream_loadd(4, x, ROW);  // so that w stays in the first-level cache
      _tile_stream_loadd(5, x + TILE_BYTES, ROW);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, ROW);
  _tile_stored(1, sums + TILE_BYTES, ROW);
  _tile_stored(2, sums + 2 * TILE_BYTES, ROW);
  _tile_stored(3, sums + 3 * TILE_BYTES, ROW);
}

// Some units' sums [units, 2, M / 32, 2, 2], each a tile.
template <class W>
struct Sums {
  static constexpr int64_t STRIPS = UNIT / L;  // of a unit
  const W& weights;
  const float* tiles;
  int64_t m, from, to;  // rows of x, and units

  int64_t row_of(int64_t strip) const { return strip / W::STRIPS * W::ROWS + strip % W::STRIPS * L; }
  // Products of a row of x with L rows of the weights; returns the first of these.
  int64_t read(int64_t i, int64_t strip, F& sum) const {
    const int64_t pairs = (m + PAIR - 1) / PAIR, at = (strip / 2 - from * STRIPS / 2) * pairs + i / PAIR;
    sum = (F)load(tiles + ((at * 4 + i % PAIR / SIDE * 2 + strip % 2) * SIDE + i % SIDE) * L);
    const int64_t last = weights.n - W::ROWS + strip % W::STRIPS * L, row = std::min(row_of(strip), last);
    weights.finish(row, sum);
    return row;
  }
};

// Calls `use` with all sums of products of x with the weights: of WIDE units at most, from a multiple of `step` on.
template <int TERMS, class W, class Use>
void add_products(const W& weights, const float* x, int64_t m, int64_t step, const Use& use) {
  const int64_t k = weights.k, groups = k / GROUP, pairs = (m + PAIR - 1) / PAIR, units = (weights.n + UNIT - 1) / UNIT;
  const int64_t x_bytes = TERMS * 2 * TILE_BYTES, sum_bytes = pairs * 8 * TILE_BYTES;  // of a group; of a unit
  Memory memory;
  char* tiles = memory.of(pairs * groups * x_bytes);
  auto round = [&](int64_t from, int64_t to) {
    for (; from < to; from++) to_tiles<TERMS>(x, m, k, from * PAIR, tiles + from * groups * x_bytes);
  };
  auto part = [&](int64_t from, int64_t to) {
    Memory memory;
    char* sums = memory.of(WIDE * sum_bytes + DEEP * 4 * TILE_BYTES);
    char* unpacked = sums + WIDE * sum_bytes;
    const TileShapes shapes;
    from *= step, to = std::min(to * step, units);
    for (int64_t end; from < to; from = end) {
      end = std::min(to, from + WIDE);
      memset(sums, 0, (end - from) * sum_bytes);
      for (int64_t g = 0, count; g < groups; g += count) {
        count = std::min(DEEP, groups - g);
        for (int64_t unit = from; unit < end; unit++) {
          unpack(weights, unit, g, count, (I*)unpacked);
          for (int64_t i = 0; i < 2 * pairs; i++)
            add_tiles<TERMS>(tiles + (i % pairs * groups + g) * x_bytes, unpacked + i / pairs * count * 2 * TILE_BYTES,
                             count, sums + (unit - from) * sum_bytes + i * 4 * TILE_BYTES);
        }
      }
      use(Sums<W>{weights, (const float*)sums, m, from, end});
    }
  };
  in_parallel(round, pairs);
  in_parallel(part, (units + step - 1) / step);
}

template <class W>
void multiply_by_tiles(const W& weights, const float* x, int64_t m, float* y) {
  add_products<1>(weights, x, m, 1, [=](const Sums<W>& sums) {
    for (int64_t i = 0; i < m; i++)
      for (int64_t strip = sums.from * sums.STRIPS; strip < sums.to * sums.STRIPS; strip++) {
        F sum;
        const int64_t row = sums.read(i, strip, sum);
        store(y + i * weights.apart + row, sum);
      }
  });
}

// For each row of x, the logarithm of the sum of e^logit in each block of logits, [blocks, M], and then the logit
// of its id. x is the sum of two parts in bfloat16, which holds the steps of `Eight` exactly, and rounds other weights.
constexpr int64_t SCORED = WIDE * UNIT;  // logits of a block
template <class W>
void score(const W& weights, const float* x, int64_t m, const int64_t* ids, float* y) {
  float* chosen = y + (weights.n + SCORED - 1) / SCORED * m;
  add_products<2>(weights, x, m, WIDE, [=](const Sums<W>& sums) {
    const int64_t start = sums.from * UNIT, count = std::min(weights.n - start, SCORED);
    for (int64_t i = 0; i < m; i++) {
      float some[L + SCORED], *logits = some + L;
      std::fill(logits, logits + SCORED, -INFINITY);
      for (int64_t strip = 0; strip * L < count; strip++) {
        F sum;  // the last rows may be computed twice
        const int64_t row = sums.read(i, sums.from * sums.STRIPS + strip, sum);
        store(logits + row - start, sum);
      }
      if (start <= ids[i] && ids[i] < start + count) chosen[i] = logits[ids[i] - start];
      F most = (F)load(logits), total{};
      for (int64_t at = L; at < SCORED; at += L) most = most < (F)load(logits + at) ? (F)load(logits + at) : most;
      const float largest = *std::max_element((float*)&most, (float*)(&most + 1));
      for (int64_t at = 0; at < SCORED; at++) logits[at] = power((logits[at] - largest) * 1.44269504f);
      for (int64_t at = 0; at < SCORED; at += L) total += (F)load(logits + at);
      y[start / SCORED * m + i] = largest + std::log(std::accumulate((float*)&total, (float*)(&total + 1), 0.0f));
    }
  });
}

}  // namespace
#endif
