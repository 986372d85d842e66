// Repacks matrices of GGUF files, whose blocks are laid out as in ggml, for `products.cpp`.
//
// In groups, each weight is q * scale + minimum. The product is exact in float32: in each format,
// q and scale have at most 24 bits together. So eight bits, to which `pack_eight` rounds, are those of `packed.py`.
// `step.cpp` includes this file.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>
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

// The scales and minima of a block of Q4_K or Q5_K, as six bits in twelve bytes.
inline void six_bits(const uint8_t* b, uint8_t* scale, uint8_t* minimum) {
  for (int i = 0; i < 4; i++) {
    scale[i] = b[4 + i] & 63, minimum[i] = b[8 + i] & 63;
    scale[i + 4] = (b[12 + i] & 15) | (b[4 + i] >> 2 & 48), minimum[i + 4] = b[12 + i] >> 4 | (b[8 + i] >> 2 & 48);
  }
}

inline void scales_and_minima(const uint8_t* b, float* scale, float* minimum) {
  uint8_t small[2][8];
  six_bits(b, small[0], small[1]);
  for (int i = 0; i < 8; i++) scale[i] = half(b) * small[0][i], minimum[i] = -half(b + 2) * small[1][i];
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
  scales_and_minima(b, scale, minimum);
}

void read_q5_k(const uint8_t* b, int8_t* __restrict q, float* scale, float* minimum) {
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 32; i++) {
      const uint8_t x = b[48 + 32 * j + i], fifth = b[16 + i] >> 2 * j;
      q[64 * j + i] = (x & 15) | (fifth & 1) << 4;
      q[64 * j + 32 + i] = x >> 4 | (fifth >> 1 & 1) << 4;
    }
  scales_and_minima(b, scale, minimum);
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
constexpr Format FORMATS[] = {  // by ggml's number
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

// Calls `work` for parts of `count` things, in several threads; returns whether memory sufficed.
template <class Work>
bool in_parts(int64_t count, int64_t threads, Work work) {
  const int64_t parts = std::max<int64_t>(1, std::min(count, threads));
  std::vector<std::thread> others;
  std::atomic<bool> suffices{true};
  auto try_part = [&](int64_t from, int64_t to) __attribute__((noinline)) {
    try {
      work(from, to);
    } catch (const std::bad_alloc&) {
      suffices = false;
    }
  };
  int64_t begun = 1;
  try {
    for (; begun < parts; begun++)
      others.emplace_back([&, begun] { try_part(count * begun / parts, count * (begun + 1) / parts); });
  } catch (...) {  // this thread computes what no other could be made for
  }
  try_part(0, count / parts), try_part(count * begun / parts, count);
  for (auto& other : others) other.join();
  return suffices;
}

bool pack_eight(const Source& from, int8_t* q, uint16_t* scales, int64_t threads) {
  const Format of = from.format;
  return in_parts(from.n, threads, [=](int64_t row, int64_t end) {
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

// Blocks of 16 rows together, in the layout of `weights.cpp`, with all that the file has.
template <int TYPE>
bool pack_blocks(const Source& from, uint8_t* packed, int64_t threads) {
  constexpr int Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14;
  constexpr Format format = FORMATS[TYPE];
  constexpr bool is_k = TYPE >= Q4_K, has_minima = TYPE == 3 || TYPE == 7 || TYPE == Q4_K || TYPE == Q5_K;
  constexpr int bits = TYPE == Q8_0 ? 8 : TYPE == Q6_K ? 6 : TYPE == Q5_K || TYPE == 6 || TYPE == 7 ? 5 : 4;
  constexpr int ROWS = 16, floats = 2 * ROWS, head = is_k ? floats << (TYPE != Q6_K) : 0;
  constexpr int scales = is_k ? 2 * ROWS : floats << has_minima, cell = scales + 64 * bits;
  constexpr int groups = format.size / GROUP, bytes = head + groups * cell;
  return in_parts(from.n / ROWS, threads, [=](int64_t part, int64_t end) {
    const int64_t count = from.k / format.size;
    for (int64_t at = part * count; at < end * count; at++)
      for (int64_t r = 0; r < ROWS; r++) {
        const uint8_t* block = from.row(at / count * ROWS + r) + at % count * format.bytes;
        uint8_t *out = packed + at * bytes, *floats_out = out + 2 * r, *first = out + head;
        int8_t steps[MOST];
        float unused[2][MOST_SCALES];
        format.read(block, steps, unused[0], unused[1]);
        memcpy(floats_out, block + (TYPE == Q6_K ? 208 : 0), 2);
        if (has_minima) memcpy(floats_out + floats, block + 2, 2);
        uint8_t small[2][8];
        if (is_k && has_minima) six_bits(block, small[0], small[1]);
        for (int g = 0; g < groups; g++, first += cell) {
          for (int p = 0; p < 2 && is_k; p++)
            first[p * ROWS + r] = has_minima ? small[p][g] : block[192 + 2 * g + p];
          uint32_t planes[8] = {};
          for (int c = 0; c < GROUP / 4; c++) {  // of four columns each
            uint32_t four;
            memcpy(&four, steps + g * GROUP + 4 * c, 4);
            if (bits == 8) {
              planes[c] = four;
              continue;
            }
            planes[c % 4] |= (four & 0x0f0f0f0f) << c / 4 * 4;
            if (bits == 5) planes[4] |= (four >> 4 & 0x01010101) << c;
            if (bits == 6) planes[4 + c % 4 / 2] |= (four >> 4 & 0x03030303) << (c % 2 * 2 + c / 4 * 4);
          }
          for (int p = 0; p < bits; p++) memcpy(first + scales + p * 64 + 4 * r, &planes[p], 4);
        }
      }
  });
}

}  // namespace blocks

// `type` is ggml's number of a block format. Both return whether memory sufficed.
EXPORTED bool sirchat_pack_eight(int64_t type, const uint8_t* data, int64_t n, int64_t k, const int64_t* order,
                                 int8_t* q, uint16_t* scales, int64_t threads) {
  return blocks::pack_eight({blocks::FORMATS[type], data, n, k, order}, q, scales, threads);
}

EXPORTED bool sirchat_pack_blocks(int64_t type, const uint8_t* data, int64_t n, int64_t k, const int64_t* order,
                                  uint8_t* packed, int64_t threads) {
  const blocks::Source from{blocks::FORMATS[type], data, n, k, order};
  switch (type) {
    case 2: return blocks::pack_blocks<2>(from, packed, threads);    // Q4_0
    case 3: return blocks::pack_blocks<3>(from, packed, threads);    // Q4_1
    case 6: return blocks::pack_blocks<6>(from, packed, threads);    // Q5_0
    case 7: return blocks::pack_blocks<7>(from, packed, threads);    // Q5_1
    case 8: return blocks::pack_blocks<8>(from, packed, threads);    // Q8_0
    case 12: return blocks::pack_blocks<12>(from, packed, threads);  // Q4_K
    case 13: return blocks::pack_blocks<13>(from, packed, threads);  // Q5_K
    default: return blocks::pack_blocks<14>(from, packed, threads);  // Q6_K
  }
}
