// Products of rows of numbers x [M, K] with packed weights [N, K]: y = x W^T, float32 [M, N].
//
// x is rounded to 8 bits in groups of 32, or to 16 where one number is far above the others. A thread
// multiplies all rows of x, four at a time, with a block of rows of the weights, which stays in its cache. Each
// number of y is computed by the same operations in one order, whatever M and the number of threads are.
// `attention.cpp` includes this file.
#include <torch/csrc/stable/c/shim.h>

#include "weights.cpp"

namespace {

constexpr int TILE = 4;  // rows of x that are multiplied at a time
constexpr int64_t FEW = 32;  // rows of x that `tiles.cpp` does not multiply faster

// Rows of x, rounded to 8 bits: x = q * scale in each group. In a group with an outlier, beside which
// the others would be rounded to little, what that leaves has 8 bits, too: x = (q + rest / FINE) * scale.
struct Rounded {
  static constexpr int FINE = 254;                  // half a step of q is 127 steps of the rest
  static constexpr int OUTLIER = 127 * GROUP / 12;  // sum of a group whose largest is 12 times the mean
  int64_t rows, groups;
  int8_t *q, *rest;             // [M, K]; a rest is written and read only where there is one
  float *scales, *fine, *sums;  // [M, K / 32]; a step of the rest, and the sums of the rounded x
  float *totals, *rests;        // [M, K / 32, 3]: the sums of q and of the rest in a group, and in its halves
  int8_t* has_rest;

  static int64_t size(int64_t m, int64_t k) { return m * (2 * k + 37 * (k / GROUP)); }
  Rounded(int64_t m, int64_t k, char* memory) : rows(m), groups(k / GROUP) {
    scales = (float*)memory, fine = scales + m * groups, sums = fine + m * groups;
    totals = sums + m * groups, rests = totals + 3 * m * groups;
    q = (int8_t*)(rests + 3 * m * groups), rest = q + m * k, has_rest = rest + m * k;
  }

  void round(const float* x, int64_t row, int64_t from, int64_t to) {  // these groups of a row
    // In each tile, the rows' first groups, then their second ones, and so on.
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
      scales[at] = scale, sums[at] = scale * to_bytes(left, steps, totals + 3 * at);
      for (int i = 0; i < GROUP; i++) sizes += std::abs(steps[i]);
      has_rest[at] = 0 < sizes && sizes < OUTLIER;
      fine[at] = scale / FINE;
      if (!has_rest[at]) continue;
      for (int i = 0; i < GROUP; i++) left[i] = (left[i] - steps[i]) * FINE;
      sums[at] += fine[at] * to_bytes(left, rest + at * GROUP, rests + 3 * at);
    }
  }

 private:
  static float to_bytes(const float* x, int8_t* y, float* sums) {  // returns the sum
    float numbers[GROUP];
    int32_t bits[GROUP], first = 0, second = 0;
    int8_t bytes[GROUP];
    // at this size, the last bit of a float counts ones
    for (int i = 0; i < GROUP; i++) numbers[i] = x[i] + 0x1.8p23f;
    memcpy(bits, numbers, sizeof(bits));
    for (int i = 0; i < GROUP; i++) bytes[i] = (int8_t)bits[i];
    for (int i = 0; i < GROUP / 2; i++) first += bytes[i], second += bytes[i + GROUP / 2];
    memcpy(y, bytes, GROUP);
    sums[1] = first, sums[2] = second;
    return sums[0] = first + second;
  }
};
// Sums of products of a group's parts, in each of which the weights have one scale.
#ifdef HAS_DOT
constexpr int dot_bits(int) { return 5; }  // one instruction for all, so that less is compiled
#else
constexpr int dot_bits(int bits) { return bits; }
#endif
template <int BITS, int PARTS>
struct Dots {
  I sums[PARTS];
  static Dots zeros() {
    Dots dots;
    for (I& sum : dots.sums) sum = all(0);
    return dots;
  }
  void add(int part, I w, I x) {  // four columns
    I& sum = sums[part];
    sum = BITS == 4 ? dot4(sum, w, x) : BITS == 8 ? dot8(sum, w, x) : dot5(sum, w, x);
  }
  // Adds them to y; `totals` are the sums of x in the group and its halves, `step` is that of x.
  void add_to(F& y, const float* totals, int center, const F* scales, float step) const {
    F parts[PARTS];  // whole numbers below 2^24, so that none is rounded
    for (int i = 0; i < PARTS; i++)
      parts[i] = fma(all((float)-center), all(totals[PARTS > 1 ? i + 1 : 0]), wide(BITS == 4 ? end4(sums[i]) : sums[i]));
    if (PARTS == 1) y = fma(parts[0], scales[0] * all(step), y);
    else y = fma(fma(parts[PARTS - 1], scales[PARTS - 1], parts[0] * scales[0]), all(step), y);
  }
};
// Calls `use` with a group's chunks, in order, and the part of each, as a constant.
template <int PARTS, class Use>
inline void each_chunk(const Use& use) {
  for (int c = 0; c < CHUNKS / PARTS; c++) use(c, std::integral_constant<int, 0>());
  for (int c = CHUNKS / PARTS; c < CHUNKS; c++) use(c, std::integral_constant<int, PARTS - 1>());
}
template <class W>
using DotsOf = Dots<dot_bits(W::BITS), W::PARTS>;

// Adds products of a group with the rest of row `at` of x to y, of all rows of a block.
template <class W>
__attribute__((noinline)) void add_rest(const W& weights, int64_t row, int64_t g, const Rounded& x, int64_t at, F* y) {
  DotsOf<W> dots[W::STRIPS];
  for (auto& each : dots) each = DotsOf<W>::zeros();
  const auto group = weights.group(row, g);
  each_chunk<W::PARTS>([&](int c, auto part) {
    I w[W::STRIPS];
    group.read(c, w);
    for (int s = 0; s < W::STRIPS; s++) dots[s].add(part, w[s], all(((const int32_t*)(x.rest + at * GROUP))[c]));
  });
  for (int s = 0; s < W::STRIPS; s++) {
    F scales[W::PARTS], zero;
    weights.factors(row + s * L, g, scales, zero);
    dots[s].add_to(y[s], x.rests + 3 * at, W::CENTER, scales, x.fine[at]);
  }
}

// A tile of M rows of x, from m on, with all rows of a block.
template <int M, class W>
void multiply_tile(const W& weights, const Rounded& x, int64_t m, int64_t row, float* y) {
  constexpr int S = W::STRIPS;
  F sums[M][S];
  for (auto& each : sums)
    for (F& sum : each) sum = all(0.0f);
  for (int64_t g = 0; g < x.groups; g++) {
    const int64_t at = m * x.groups + g * M;
    const auto* q = (const int32_t*)(x.q + at * GROUP);
    DotsOf<W> dots[M][S];
    for (auto& each : dots)
      for (auto& one : each) one = DotsOf<W>::zeros();
    const auto group = weights.group(row, g);
    each_chunk<W::PARTS>([&](int c, auto part) {
      I w[S];
      group.read(c, w);
      for (int i = 0; i < M; i++)
        for (int s = 0; s < S; s++) dots[i][s].add(part, w[s], all(q[i * CHUNKS + c]));
    });
    for (int s = 0; s < S; s++) {
      F scales[W::PARTS], zero;
      weights.factors(row + s * L, g, scales, zero);
      for (int i = 0; i < M; i++) {
        dots[i][s].add_to(sums[i][s], x.totals + 3 * (at + i), W::CENTER, scales, x.scales[at + i]);
        if (W::HAS_ZEROS) sums[i][s] = fma(zero, all(x.sums[at + i]), sums[i][s]);
      }
    }
    for (int i = 0; i < M; i++)
      if (x.has_rest[at + i]) add_rest(weights, row, g, x, at + i, sums[i]);
  }
  for (int i = 0; i < M; i++)
    for (int s = 0; s < S; s++) {
      weights.finish(row + s * L, sums[i][s]);
      store(y + (m + i) * weights.apart + row + s * L, sums[i][s]);
    }
}

// Numbers of y from block `from` to before block `to` of the weights' rows.
template <class W>
void multiply_blocks(const W& weights, const Rounded& x, int64_t from, int64_t to, float* y) {
  for (int64_t at = from; at < to; at++) {
    const int64_t row = std::min<int64_t>(at * W::ROWS, weights.n - W::ROWS);
    for (int64_t m = 0; m < x.rows; m += TILE)
      switch (x.rows - m) {
        case 1: multiply_tile<1>(weights, x, m, row, y); break;
        case 2: multiply_tile<2>(weights, x, m, row, y); break;
        case 3: multiply_tile<3>(weights, x, m, row, y); break;
        default: multiply_tile<TILE>(weights, x, m, row, y);
      }
  }
}

template <class W>
int64_t count_blocks(const W& weights) { return (weights.n + W::ROWS - 1) / W::ROWS; }

struct Memory {  // aligned for vectors
  std::unique_ptr<char[]> bytes;
  int64_t size = 0;
  char* of(int64_t wanted) {
    if (wanted > size) bytes.reset(new char[wanted + 64]), size = wanted;
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
  if (!m) return;
  Memory memory;
  Rounded rounded(m, weights.k, memory.of(Rounded::size(m, weights.k)));
  auto round = [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) rounded.round(x + i * weights.k, i, 0, rounded.groups);
  };
  auto part = [&](int64_t from, int64_t to) { multiply_blocks(weights, rounded, from, to, y); };
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

// Operators are given x, packed weights and their scales, which blocks have in them, and perhaps ids.
template <class W>
W weights_of(const AtenTensorHandle* given) {
  const int64_t n = size_of(given[1], 0);
  return {data<uint8_t>(given[1]), data<uint16_t>(given[2]), n, size_of(given[0], 1), n};
}

template <class Use>
AOTITorchError use_blocks(AtenTensorHandle blocks, const Use& use) {  // [N, K / 32 or 256, bytes]
  const int64_t n = size_of(blocks, 0), bytes = size_of(blocks, 2), size = bytes < 128 ? 32 : 256;
  return with_blocks(bytes, data<uint8_t>(blocks), n, size_of(blocks, 1) * size, n, use);
}

template <class W>
AOTITorchError multiply_into(AtenTensorHandle* y, const W& weights, AtenTensorHandle x) {
  const int64_t m = size_of(x, 0);
  if (auto error = empty(m, weights.n, y)) return error;
  multiply(weights, data<float>(x), m, data<float>(*y));
  return 0;
}

template <class W>
AOTITorchError product(const AtenTensorHandle* given, AtenTensorHandle* y) {
  return multiply_into(y, weights_of<W>(given), given[0]);
}

AOTITorchError product_of_blocks(const AtenTensorHandle* given, AtenTensorHandle* y) {
  return use_blocks(given[1], [=](const auto& weights) { return multiply_into(y, weights, given[0]); });
}

AOTITorchError rows_of_blocks(const AtenTensorHandle* given, AtenTensorHandle* y) {
  return use_blocks(given[0], [=](const auto& weights) {
    const int64_t count = size_of(given[1], 0), *ids = data<int64_t>(given[1]);
    if (auto error = empty(count, weights.k, y)) return error;
    float* rows = data<float>(*y);
    auto part = [&](int64_t from, int64_t to) {
      for (; from < to; from++) unpack_row(weights, ids[from], rows + from * weights.k);
    };
    in_parallel(part, count);
    return AOTITorchError(0);
  });
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
template <class W>
AOTITorchError score_with(const W& weights, AtenTensorHandle x, AtenTensorHandle ids, AtenTensorHandle* y) {
  const int64_t m = size_of(x, 0);
  if (auto error = empty((weights.n + SCORED - 1) / SCORED + 1, m, y)) return error;
  score(weights, data<float>(x), m, data<int64_t>(ids), data<float>(*y));
  return 0;
}

AOTITorchError scores(const AtenTensorHandle* given, AtenTensorHandle* y) {
  return score_with(weights_of<Eight>(given), given[0], given[3], y);
}

AOTITorchError scores_of_blocks(const AtenTensorHandle* given, AtenTensorHandle* y) {
  return use_blocks(given[1], [=](const auto& weights) { return score_with(weights, given[0], given[2], y); });
}

void register_scores(TorchLibraryHandle definitions, TorchLibraryHandle kernels) {
  if (!may_use_tiles()) return;
  aoti_torch_library_def(definitions, "score_8(Tensor x, Tensor packed, Tensor scales, Tensor ids) -> Tensor");
  aoti_torch_library_def(definitions, "score_blocks(Tensor x, Tensor blocks, Tensor ids) -> Tensor");
  torch_library_impl(kernels, "score_8", boxed<4, scores>, TORCH_ABI_VERSION);
  torch_library_impl(kernels, "score_blocks", boxed<3, scores_of_blocks>, TORCH_ABI_VERSION);
}
#else
void register_scores(TorchLibraryHandle, TorchLibraryHandle) {}
#endif

const int registered = [] {
  TorchLibraryHandle definitions, kernels;  // never deleted, or torch would forget them
  aoti_torch_library_init_fragment("sirchat", __FILE__, __LINE__, &definitions);
  aoti_torch_library_init_impl("sirchat", "CPU", __FILE__, __LINE__, &kernels);
  for (auto schema : {"multiply_4(Tensor x, Tensor packed, Tensor scales) -> Tensor",
                      "multiply_8(Tensor x, Tensor packed, Tensor scales) -> Tensor",
                      "multiply_blocks(Tensor x, Tensor blocks) -> Tensor",
                      "unpack_rows(Tensor blocks, Tensor ids) -> Tensor"})
    aoti_torch_library_def(definitions, schema);
  register_scores(definitions, kernels);
  torch_library_impl(kernels, "multiply_4", boxed<3, product<Four>>, TORCH_ABI_VERSION);
  torch_library_impl(kernels, "multiply_8", boxed<3, product<Eight>>, TORCH_ABI_VERSION);
  torch_library_impl(kernels, "multiply_blocks", boxed<2, product_of_blocks>, TORCH_ABI_VERSION);
  return torch_library_impl(kernels, "unpack_rows", boxed<2, rows_of_blocks>, TORCH_ABI_VERSION);
}();

}  // namespace
