// Layouts of packed weights: rows that are multiplied together are next to one another, in groups of 32 columns.
//
// Each has ROWS rows in STRIPS vectors. `products.cpp` includes this file.
#include "vectors.cpp"

namespace {

// Four bits, as torch packs them for this processor: blocks of 64 rows (of 32 without AVX-512, of 16
// on ARM); for each column, a byte of each two rows. A weight is (w - 8) * scale + zero.
struct Four {
  static constexpr int STRIPS = 4, ROWS = STRIPS * L, BITS = 4, PARTS = 1, CENTER = 8;
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
  void factors(int64_t row, int64_t g, F* scale, F& zero) const {
    const uint16_t* p = scales + 2 * (g * n + row);
    __builtin_prefetch(p + 2 * ROWS);
    for (int i = 0; i < GROUP * L / 2; i += 64)
      __builtin_prefetch(packed + (row + ROWS) * k / 2 + g * GROUP * L / 2 + i);
    I pairs = load(p);
    *scale = bits(up(pairs)), zero = bits(pairs & all((int32_t)0xffff0000));
  }
  void finish(int64_t, F&) const {}
};
// What makes eight-bit weights unsigned where products need that.
#ifdef HAS_SIGN
constexpr int EIGHT_BIT_CENTER = 0;
#else
constexpr int EIGHT_BIT_CENTER = L == 4 ? 0 : 128;
#endif

// Blocks of a GGUF file, of SIZE columns, those of 16 rows together (`pack_blocks`):
//
//   SIZE 32:  scales, minima | low bits | high bits
//   SIZE 256: what all scales, and all minima, are multiplied with, then for each of 8 groups of 32 columns
//             scales, minima | low bits | high bits
//
// Each has a number of each row; minima are there if HAS_MINIMA, and are subtracted where SIZE is 256. Q6_K has a
// scale for each half of a group. Low bits are four vectors: in a byte, the low half is of one column, the high half
// of that 16 after; four neighbouring columns of a row are neighbours. A weight is (q - CENTER) * scale + minimum.
template <int BITS_, int SIZE, bool HAS_MINIMA>
struct Blocks {
  static constexpr int ROWS = 16, STRIPS = ROWS / L, BITS = BITS_, GROUPS = SIZE / GROUP;
  static constexpr bool HAS_ZEROS = HAS_MINIMA;
  static constexpr int PARTS = BITS == 6 ? 2 : 1;  // of a group, each with a scale
  static constexpr int CENTER = HAS_MINIMA ? 0 : BITS == 8 ? EIGHT_BIT_CENTER : 1 << (BITS - 1);
  // Bytes of 16 rows: a float16 of each; all floats; the beginning of a block; a group's scales; a group; a block
  static constexpr int HALVES = 2 * ROWS, FLOATS = HAS_MINIMA ? 2 * HALVES : HALVES;
  static constexpr int HEAD = GROUPS > 1 ? FLOATS : 0, SCALES = GROUPS > 1 ? 2 * ROWS : FLOATS;
  static constexpr int CELL = SCALES + 64 * BITS, BYTES = HEAD + GROUPS * CELL;
  const uint8_t* packed;
  int64_t n, k, apart;  // N, K, and from a row of y to the next

  struct Group {
    const uint8_t* packed;
    void read(int c, I w[STRIPS]) const {
      for (int s = 0; s < STRIPS; s++) {
        const uint8_t* p = packed + s * sizeof(I);
        if (BITS == 8) {
          w[s] = load(p + 64 * c) ^ all(CENTER ? (int32_t)0x80808080 : 0);
          continue;
        }
        const I low = load(p + c % 4 * 64);
        w[s] = (c < 4 ? low : down(low)) & all(0x0f0f0f0f);
        if (BITS == 5) w[s] |= shifted(load(p + 256), 4 - c) & all(0x10101010);
        if (BITS == 6) w[s] |= shifted(load(p + 256 + c % 4 / 2 * 64), 4 - c % 2 * 2 - c / 4 * 4) & all(0x30303030);
      }
    }
    static I shifted(I x, int by) { return by < 0 ? (I)((Bits)x >> -by) : (I)((Bits)x << by); }
  };
  const uint8_t* block(int64_t row, int64_t g) const {
    return packed + (row / ROWS * (k / SIZE) + g / GROUPS) * BYTES;
  }
  Group group(int64_t row, int64_t g) const { return {block(row, g) + HEAD + g % GROUPS * CELL + SCALES}; }
  void factors(int64_t row, int64_t g, F* scale, F& zero) const {
    const uint8_t *first = block(row, g), *p = first + HEAD + g % GROUPS * CELL;
    const int64_t at = row % ROWS;
    auto floats = [at](const uint8_t* from) { return floats16((const uint16_t*)from + at); };
    if (GROUPS == 1) {
      *scale = floats(p);
      if (HAS_MINIMA) zero = floats(p + HALVES);
    } else if (HAS_MINIMA) {
      *scale = floats(first) * of_bytes(p + at);
      zero = -floats(first + HALVES) * of_bytes(p + ROWS + at);
    } else
      for (int i = 0; i < PARTS; i++) scale[i] = floats(first) * of_bytes((const int8_t*)p + i * ROWS + at);
  }
  void finish(int64_t, F&) const {}
};

// Calls `use` with weights in blocks [N, K / SIZE, bytes]: the bytes of a row's block tell their format.
static_assert(Blocks<4, 32, true>::BYTES == 16 * 20 && Blocks<6, 256, false>::BYTES == 16 * 210, "as in header.py");
template <class Use>
auto with_blocks(int64_t bytes, const uint8_t* p, int64_t n, int64_t k, int64_t apart, const Use& use) {
  switch (bytes) {
    case 18: return use(Blocks<4, 32, false>{p, n, k, apart});   // Q4_0
    case 20: return use(Blocks<4, 32, true>{p, n, k, apart});    // Q4_1
    case 22: return use(Blocks<5, 32, false>{p, n, k, apart});   // Q5_0
    case 24: return use(Blocks<5, 32, true>{p, n, k, apart});    // Q5_1
    case 34: return use(Blocks<8, 32, false>{p, n, k, apart});   // Q8_0
    case 148: return use(Blocks<4, 256, true>{p, n, k, apart});  // Q4_K
    case 180: return use(Blocks<5, 256, true>{p, n, k, apart});  // Q5_K
    default: return use(Blocks<6, 256, false>{p, n, k, apart});  // Q6_K, 210
  }
}

// Unpacks a row of the weights, y [K].
template <class W>
void unpack_row(const W& weights, int64_t row, float* y) {
  const int64_t first = row / W::ROWS * W::ROWS, strip = row % W::ROWS / L, lane = row % L;
  for (int64_t g = 0; g < weights.k / GROUP; g++) {
    F scale[W::PARTS], zero = all(0.0f);
    weights.factors(first + strip * L, g, scale, zero);
    const auto group = weights.group(first, g);
    for (int c = 0; c < CHUNKS; c++) {
      I w[W::STRIPS];
      group.read(c, w);
      const float by = scale[c * W::PARTS / CHUNKS][lane];
      for (int i = 0; i < 4; i++, y++) {
        const uint8_t q = ((const uint8_t*)&w[strip])[4 * lane + i];
        *y = (W::CENTER ? q - W::CENTER : W::HAS_ZEROS ? (int)q : (int)(int8_t)q) * by + zero[lane];
      }
    }
  }
}

// Eight bits, int8 [N, K], and a scale for each row, bfloat16 [N].
struct Eight {
  static constexpr int CENTER = EIGHT_BIT_CENTER;
  static constexpr int STRIPS = 1, ROWS = L, BITS = 8, PARTS = 1;
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
  void factors(int64_t row, int64_t g, F* scale, F&) const {
    for (int i = 0; i < L; i++) __builtin_prefetch(packed + (row + L + i) * k + g * GROUP);
    *scale = all(1.0f);
  }
  void finish(int64_t row, F& sum) const { sum *= halves(scales + row); }
};

}  // namespace
