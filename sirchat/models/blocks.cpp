// Repacks matrices of GGUF files, whose blocks are laid out as in ggml, for `products.cpp`.
//
// In groups, each weight is q * scale + minimum. The product is exact in float32: in each format,
// q and scale have at most 24 bits together. So the results have the bits of `gguf/blocks.py`, which does it by torch.
// `step.cpp` includes this file.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace blocks {

constexpr int GROUP = 32;

inline float half(const uint8_t* p) {  // float16
  uint16_t x;
  memcpy(&x, p, 2);
  const uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, rest = x & 1023;
  if (exponent == 0) return (sign ? -0x1p-24f : 0x1p-24f) * (float)rest;
  const uint32_t bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | rest << 13;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

inline uint16_t bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float wide(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

// The four bits of 32 weights: of the first 16, and of the others.
inline void nibbles(const uint8_t* p, int8_t* __restrict q) {
  for (int i = 0; i < 16; i++) q[i] = p[i] & 15, q[i + 16] = p[i] >> 4;
}

inline void fifth_bits(const uint8_t* p, int8_t* __restrict q) {
  uint32_t bits;
  memcpy(&bits, p, 4);
  for (int i = 0; i < 32; i++) q[i] |= (bits >> i & 1) << 4;
}

// The scales and minima of a block of Q4_K or Q5_K: six bits each, in twelve bytes.
inline void six_bits(const uint8_t* b, float* scale, float* minimum) {
  const float first = half(b), second = -half(b + 2);
  const uint8_t *low = b + 4, *high = b + 8, *mixed = b + 12;
  for (int i = 0; i < 4; i++) {
    scale[i] = first * (low[i] & 63), minimum[i] = second * (high[i] & 63);
    scale[i + 4] = first * ((mixed[i] & 15) | (low[i] >> 2 & 48));
    minimum[i + 4] = second * (mixed[i] >> 4 | (high[i] >> 2 & 48));
  }
}

void read_q4_0(const uint8_t* b, int8_t* __restrict q, float* scale, float* minimum) {
  nibbles(b + 2, q);
  *scale = half(b), *minimum = -8 * *scale;
}

void read_q4_1(const uint8_t* b, int8_t* __restrict q, float* scale, float* minimum) {
  nibbles(b + 4, q);
  *scale = half(b), *minimum = half(b + 2);
}

void read_q5_0(const uint8_t* b, int8_t* __restrict q, float* scale, float* minimum) {
  nibbles(b + 6, q), fifth_bits(b + 2, q);
  *scale = half(b), *minimum = -16 * *scale;
}

void read_q5_1(const uint8_t* b, int8_t* __restrict q, float* scale, float* minimum) {
  nibbles(b + 8, q), fifth_bits(b + 4, q);
  *scale = half(b), *minimum = half(b + 2);
}

void read_q8_0(const uint8_t* b, int8_t* __restrict q, float* scale, float* minimum) {
  memcpy(q, b + 2, 32);
  *scale = half(b), *minimum = 0;
}

void read_q2_k(const uint8_t* b, int8_t* __restrict q, float* scale, float* minimum) {
  for (int i = 0; i < 256; i++) q[i] = b[16 + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
  const float first = half(b + 80), second = -half(b + 82);
  for (int i = 0; i < 16; i++) scale[i] = first * (b[i] & 15), minimum[i] = second * (b[i] >> 4);
}

void read_q3_k(const uint8_t* b, int8_t* __restrict q, float* scale, float* minimum) {
  for (int i = 0; i < 256; i++) {
    const int low = b[32 + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
    q[i] = low + (b[i % 32] >> i / 32 & 1) * 4;
  }
  const float first = half(b + 108);
  for (int i = 0; i < 16; i++) {
    const int low = b[96 + i % 8] >> i / 8 * 4 & 15, high = b[104 + i % 4] >> i / 4 * 2 & 3;
    scale[i] = first * (low + 16 * high - 32), minimum[i] = -4 * scale[i];
  }
}

void read_q4_k(const uint8_t* b, int8_t* __restrict q, float* scale, float* minimum) {
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 32; i++) {
      const uint8_t x = b[16 + 32 * j + i];
      q[64 * j + i] = x & 15, q[64 * j + 32 + i] = x >> 4;
    }
  six_bits(b, scale, minimum);
}

void read_q5_k(const uint8_t* b, int8_t* __restrict q, float* scale, float* minimum) {
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 32; i++) {
      const uint8_t x = b[48 + 32 * j + i], fifth = b[16 + i] >> 2 * j;
      q[64 * j + i] = (x & 15) | (fifth & 1) << 4;
      q[64 * j + 32 + i] = x >> 4 | (fifth >> 1 & 1) << 4;
    }
  six_bits(b, scale, minimum);
}

void read_q6_k(const uint8_t* b, int8_t* __restrict q, float* scale, float* minimum) {
  for (int j = 0; j < 2; j++, q += 128)
    for (int i = 0; i < 32; i++) {
      const uint8_t x = b[64 * j + i], y = b[64 * j + 32 + i], high = b[128 + 32 * j + i];
      q[i] = (x & 15) | (high & 3) << 4, q[i + 32] = (y & 15) | (high >> 2 & 3) << 4;
      q[i + 64] = x >> 4 | (high >> 4 & 3) << 4, q[i + 96] = y >> 4 | (high >> 6) << 4;
    }
  const float first = half(b + 208);
  for (int i = 0; i < 16; i++)
    scale[i] = first * (int8_t)b[192 + i], minimum[i] = -32 * scale[i];
}

// A block format: weights and bytes of a block, weights of a scale, and what reads a block.
struct Format {
  int64_t size, bytes, each;
  void (*read)(const uint8_t*, int8_t*, float*, float*);
};

constexpr int MOST = 256, MOST_SCALES = 16;  // of a block
const Format FORMATS[] = {  // by ggml's number
    {}, {}, {32, 18, 32, read_q4_0}, {32, 20, 32, read_q4_1}, {}, {},
    {32, 22, 32, read_q5_0}, {32, 24, 32, read_q5_1}, {32, 34, 32, read_q8_0}, {},
    {256, 84, 16, read_q2_k}, {256, 110, 16, read_q3_k}, {256, 144, 32, read_q4_k},
    {256, 176, 32, read_q5_k}, {256, 210, 16, read_q6_k},
};

// A matrix [N, K] of a file. Row r of what is made of it is row `order[r]`.
struct Source {
  Format format;
  const uint8_t* blocks;
  int64_t n, k;
  const int64_t* order;

  const uint8_t* row(int64_t r) const { return blocks + order[r] * (k / format.size * format.bytes); }
};

// Calls `work` for parts of `count` things, in several threads.
template <class Work>
void in_parts(int64_t count, int64_t threads, Work work) {
  const int64_t parts = std::max<int64_t>(1, std::min(count, threads));
  std::vector<std::thread> others;
  int64_t begun = 1;
  try {
    for (; begun < parts; begun++)
      others.emplace_back([=] { work(count * begun / parts, count * (begun + 1) / parts); });
  } catch (const std::system_error&) {  // this thread computes what no other could be made for
  }
  auto rest = [&](int64_t from, int64_t to) __attribute__((noinline)) { work(from, to); };
  rest(0, count / parts), rest(count * begun / parts, count);
  for (auto& other : others) other.join();
}

// Transposes 8 rows of 8 bytes.
inline void transpose(uint64_t* x) {
  const uint64_t masks[] = {0x00000000ffffffff, 0x0000ffff0000ffff, 0x00ff00ff00ff00ff};
  for (int apart = 4, step = 0; apart; apart /= 2, step++)
    for (int i = 0; i < 8; i++)
      if (!(i & apart)) {
        const uint64_t changed = (x[i] >> 8 * apart ^ x[i + apart]) & masks[step];
        x[i + apart] ^= changed, x[i] ^= changed << 8 * apart;
      }
}

void pack_eight(const Source& from, int8_t* q, uint16_t* scales, int64_t threads) {
  const Format of = from.format;
  in_parts(from.n, threads, [=](int64_t row, int64_t end) {
    std::vector<float> weights(from.k);
    for (; row < end; row++) {
      const uint8_t* block = from.row(row);
      int32_t most = 0;
      for (float* w = &weights[0]; w < &weights[0] + from.k; block += of.bytes) {
        int8_t steps[MOST];
        float scale[MOST_SCALES], minimum[MOST_SCALES];
        of.read(block, steps, scale, minimum);
        for (int64_t at = 0; at < of.size; at += of.each, w += of.each) {
          const float by = scale[at / of.each], added = minimum[at / of.each];
          for (int i = 0; i < of.each; i++) w[i] = steps[at + i] * by + added;
          int32_t bits[GROUP];  // whose order is that of the sizes
          memcpy(bits, w, of.each * 4);
          for (int i = 0; i < of.each; i++) most = std::max(most, bits[i] & 0x7fffffff);
        }
      }
      float largest;
      memcpy(&largest, &most, 4);
      scales[row] = bfloat16(std::max(largest, 1e-12f) / 127);
      const float scale = wide(scales[row]);
      int8_t* out = q + row * from.k;
      for (int64_t at = 0; at < from.k; at += GROUP) {
        float steps[GROUP];
        int32_t bits[GROUP];
        // at this size, the last bit of a float counts ones; halves go to even numbers
        for (int i = 0; i < GROUP; i++) steps[i] = weights[at + i] / scale + 0x1.8p23f;
        memcpy(bits, steps, sizeof(bits));
        for (int i = 0; i < GROUP; i++)
          out[at + i] = (int8_t)std::min(127, std::max(-127, bits[i] - 0x4b400000));
      }
    }
  });
}

// Four bits: blocks of `rows` rows; for each column a byte of each two rows, which follow one
// another or are from both halves. Scales are [K / 32, N, 2]: (q - 8) * scale + zero.
void pack_four(const Source& from, int64_t rows, bool follow, uint8_t* packed, uint16_t* scales, int64_t threads) {
  const Format of = from.format;
  in_parts(from.n / rows, threads, [=](int64_t part, int64_t end) {
    const int64_t half = rows / 2;
    std::vector<int8_t> steps(rows * of.size);
    for (; part < end; part++)
      for (int64_t at = 0; at < from.k / of.size; at++) {
        for (int64_t r = 0; r < rows; r++) {
          const int64_t row = part * rows + r;
          float scale[MOST_SCALES], minimum[MOST_SCALES];
          // rows of one byte become neighbours: those in low bits first
          const int64_t place = follow ? r / 2 + r % 2 * half : r;
          of.read(from.row(row) + at * of.bytes, &steps[place * of.size], scale, minimum);
          for (int64_t g = 0; g < of.size / GROUP; g++) {
            uint16_t* pair = scales + 2 * ((at * of.size / GROUP + g) * from.n + row);
            pair[0] = bfloat16(scale[g]), pair[1] = bfloat16(minimum[g] + 8 * scale[g]);
          }
        }
        uint8_t* out = packed + part * half * from.k + at * of.size * half;
        const int8_t *low = &steps[0], *high = &steps[half * of.size];
        for (int64_t c = 0; c < of.size; c += 8, out += 8 * half)
          for (int64_t r = 0; r < half; r += 8) {
            uint64_t x[8], y;
            for (int i = 0; i < 8; i++) {
              memcpy(&x[i], low + (r + i) * of.size + c, 8);
              memcpy(&y, high + (r + i) * of.size + c, 8);
              x[i] |= y << 4;
            }
            transpose(x);
            for (int i = 0; i < 8; i++) memcpy(out + i * half + r, &x[i], 8);
          }
      }
  });
}

// Five bits of Q5_0, as `products.cpp` has them, with the scales of the file.
void pack_five(const Source& from, uint32_t* packed, uint8_t* scales, int64_t threads) {
  constexpr int64_t ROWS = 16, PLANES = 5;
  in_parts(from.n / ROWS, threads, [=](int64_t part, int64_t end) {
    const int64_t groups = from.k / GROUP;
    for (int64_t row = part * ROWS; row < end * ROWS; row++)
      for (int64_t g = 0; g < groups; g++) {
        const int64_t at = (row / ROWS * groups + g) * ROWS, in_block = row % ROWS;
        const uint8_t* block = from.row(row) + g * from.format.bytes;
        int8_t steps[GROUP];
        float scale, minimum;
        from.format.read(block, steps, &scale, &minimum);
        uint32_t planes[PLANES] = {};
        for (int c = 0; c < GROUP / 4; c++) {  // of four columns each
          uint32_t four;
          memcpy(&four, steps + 4 * c, 4);
          planes[c % 4] |= (four & 0x0f0f0f0f) << c / 4 * 4;
          planes[4] |= (four >> 4 & 0x01010101) << c;
        }
        for (int p = 0; p < PLANES; p++) packed[at * PLANES + p * ROWS + in_block] = planes[p];
        memcpy(scales + (at + in_block) * 2, block, 2);
      }
  });
}

}  // namespace blocks

// `type` is ggml's number of a block format.
EXPORTED void sirchat_pack_eight(int64_t type, const uint8_t* data, int64_t n, int64_t k, const int64_t* order,
                                 int8_t* q, uint16_t* scales, int64_t threads) {
  blocks::pack_eight({blocks::FORMATS[type], data, n, k, order}, q, scales, threads);
}

EXPORTED void sirchat_pack_four(int64_t type, const uint8_t* data, int64_t n, int64_t k, const int64_t* order,
                                int64_t rows, bool follow, uint8_t* packed, uint16_t* scales, int64_t threads) {
  blocks::pack_four({blocks::FORMATS[type], data, n, k, order}, rows, follow, packed, scales, threads);
}

EXPORTED void sirchat_pack_five(int64_t type, const uint8_t* data, int64_t n, int64_t k, const int64_t* order,
                                uint32_t* packed, uint8_t* scales, int64_t threads) {
  blocks::pack_five({blocks::FORMATS[type], data, n, k, order}, packed, scales, threads);
}
