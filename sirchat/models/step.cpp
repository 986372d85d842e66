// Reads one token in each of a few conversations, or a few in one: the whole decode step of a model
// like Llama or Gemma 3, which `native_step.py` describes once.
//
// The items of a part, such as blocks of a product's rows, go to whichever thread is free, and the
// next part begins when all are done. Each number is computed by the same operations in one order,
// whatever the number of threads is, and alone or among other conversations.
#include "attention.cpp"
#include "threads.cpp"

#ifdef _WIN32
#define EXPORTED extern "C" __declspec(dllexport)
inline int64_t process() { return 0; }  // there is no fork
#else
#include <unistd.h>
#define EXPORTED extern "C" __attribute__((visibility("default")))
inline int64_t process() { return getpid(); }
#endif

#include "blocks.cpp"

// What `native_step.py` describes, in fields of 8 bytes.
enum Kind : int64_t { FOUR, EIGHT, FLOAT32, BFLOAT16, FLOAT16 };  // or bytes of a row's block

struct Matrix {  // [N, K]
  int64_t kind, n, k;
  const void *weights, *scales;
};

struct Product {  // of one input with several matrices; the bias has all their rows
  int64_t count;
  Matrix parts[3];
  const float* bias;
  int64_t rows() const {
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += parts[i].n;
    return sum;
  }
};

struct Norm {  // without weights: there is none
  const float* weight;
  double epsilon;
};

struct Layer {
  Norm attention, added, network, last, heads;  // `heads` has weights [H_q + H, D]
  Product queries_keys_values, output, gate_up, down;
  int64_t rotation_index, window, is_wanted;  // `window`: rows that it sees; states are wanted
};

struct Model {
  int64_t size, inner, queries, keys, head_size, layer_count, wanted;  // d, ..., H_q, H, D, ...
  int64_t cache_kind, uses_gelu, rounds_embeddings, refined;  // to bfloat16; how many largest logits
  double scale, embedding_scale;
  Matrix embeddings;
  Norm norm;
  Product head;
  const Layer* layers;
};

struct Token {
  int64_t id, held, capacity;
  const float *cos, *sin;  // [D] of the first rotation
  int64_t rotation_stride; // numbers from a rotation to the next
  char* rows;              // [layers, 3, H, capacity, D]: keys, keys as first written, values
};

namespace {

// Weights as plain numbers. Four rows of them are multiplied with one or two rows of x at a time.
template <class T>
struct Plain {
  static constexpr int ROWS = 4;
  const T* weights;
  int64_t n, k, apart;

  template <int M>
  void some_rows(int64_t row, const float* x, float* y) const {
    F sums[M][ROWS] = {};
    for (int64_t i = 0; i < k; i += L) {
      F w[ROWS];
      for (int r = 0; r < ROWS; r++) w[r] = widen_some(weights + (row + r) * k + i, k - i);
      for (int m = 0; m < M; m++) {
        const F some = widen_some(x + m * k + i, k - i);
        for (int r = 0; r < ROWS; r++) sums[m][r] = fma(w[r], some, sums[m][r]);
      }
    }
    for (int m = 0; m < M; m++)
      for (int r = 0; r < ROWS; r++) y[m * apart + row + r] = sum(sums[m][r]);
  }
  void multiply(const float* x, int64_t m, int64_t from, int64_t to, float* y) const {
    for (int64_t at = from; at < to; at++) {
      const int64_t row = std::min<int64_t>(at * ROWS, n - ROWS);
      for (int64_t i = 0; i < m; i += 2)
        if (m - i > 1) some_rows<2>(row, x + i * k, y + i * apart);
        else some_rows<1>(row, x + i * k, y + i * apart);
    }
  }
};

template <class T>
void read_row(const T* weights, int64_t k, float by, float* y) {
  float some[L];
  for (int64_t i = 0; i < k; i += L) {
    store(some, widen_some(weights + i, k - i) * all(by));
    memcpy(y + i, some, std::min<int64_t>(k - i, L) * sizeof(float));
  }
}

// A row of eight bits, without its scale.
void read_row(const int8_t* q, int64_t k, float by, float* y) {
  for (int64_t i = 0; i < k; i++) y[i] = q[i] * by;
}

inline float scale_of(const Matrix& m, int64_t row) {
  float scale;
  const uint32_t bits = ((const uint16_t*)m.scales)[row] << 16;
  memcpy(&scale, &bits, 4);
  return scale;
}

void unpack_block_row(const Matrix& m, int64_t row, float* y) {
  with_blocks(m.kind, (const uint8_t*)m.weights, m.n, m.k, 0, [=](const auto& weights) { unpack_row(weights, row, y); });
}

__attribute__((noinline)) void normalize(const float* x, const Norm& norm, int64_t n, float* y) {
  const float by = 1 / std::sqrt(dot(x, x, n) / n + (float)norm.epsilon);
  for (int64_t i = 0; i < n; i++) y[i] = x[i] * norm.weight[i] * by;
}

// An embedding, a layer's inner numbers and so on of all tokens, each [B, numbers].
struct Buffers {
  Memory memory;
  float *x, *normed, *heads, *attended, *added, *both, *inner, *parts;
  char* rounded;

  void make(std::initializer_list<std::pair<float**, int64_t>> floats, int64_t rounding) {
    int64_t size = rounding + 64;
    for (auto& [_, count] : floats) size += (count + 16) * 4;
    char* p = memory.of(size);
    for (auto& [place, count] : floats) *place = (float*)p, p += (count + 15) / 16 * 64;
    rounded = p;
  }
};

class Step {
 public:
  explicit Step(const Model& model) : model(model) {}
  ~Step() {
    if (owner != process()) threads.release();  // a fork has no threads
  }

  void read(const Token* tokens, int64_t count, int64_t wanted_threads, float* logits, float* states) {
    if (owner != process()) {
      new (&mutex) std::mutex;
      threads.release(), owner = process();
    }
    std::lock_guard<std::mutex> lock(mutex);
    if (!threads || wanted != wanted_threads) threads.reset(new Threads(wanted_threads)), wanted = wanted_threads;
    this->tokens = tokens, m = count;
    make_buffers();
    const Threads::Token begun(*threads);
    for (int64_t b = 0; b < m; b++) embed(tokens[b].id, b);
    for (int64_t at = 0; at < model.layer_count; at++) {
      const Layer& layer = model.layers[at];
      read_layer(layer, at);
      if (!layer.is_wanted) continue;
      for (int64_t b = 0; b < m; b++)
        memcpy(states + b * model.wanted * model.size, b_of(buffers.x, model.size, b), 4 * model.size);
      states += model.size;
    }
    if (logits) compute_logits(logits);
  }

 private:
  static float* b_of(float* rows, int64_t size, int64_t b) { return rows + b * size; }
  int64_t query_size() const { return model.queries * model.head_size; }
  int64_t heads_size() const { return query_size() + 2 * model.keys * model.head_size; }

  void make_buffers() {
    int64_t parts = 0;
    const int64_t widest = std::max({model.size, model.inner, query_size()});
    for (int64_t b = 0; b < m; b++) parts += (tokens[b].held / 128 + 1) * model.queries * (model.head_size + 2);
    buffers.make({{&buffers.x, m * model.size}, {&buffers.normed, m * model.size},
                  {&buffers.heads, m * heads_size()}, {&buffers.attended, m * query_size()},
                  {&buffers.added, m * model.size}, {&buffers.both, 2 * m * model.inner},
                  {&buffers.inner, m * model.inner}, {&buffers.parts, parts}},
                 Rounded::size(m, widest));
  }

  void embed(int64_t id, int64_t b) {
    const Matrix& of = model.embeddings;
    float *x = b_of(buffers.x, of.k, b), by = model.embedding_scale;
    if (of.kind == EIGHT) {
      read_row((const int8_t*)of.weights + id * of.k, of.k, scale_of(of, id), x);
      for (int64_t i = 0; i < of.k; i++) x[i] *= by;
    } else if (of.kind == FLOAT32) read_row((const float*)of.weights + id * of.k, of.k, by, x);
    else if (of.kind == BFLOAT16) read_row((const Brain*)of.weights + id * of.k, of.k, by, x);
    else {
      unpack_block_row(of, id, x);
      for (int64_t i = 0; i < of.k; i++) x[i] *= by;
    }
    for (int64_t i = 0; i < of.k && model.rounds_embeddings; i++) {
      Brain rounded;
      narrow(x[i], rounded), read_row(&rounded, 1, 1, x + i);
    }
  }

  void read_layer(const Layer& layer, int64_t at) {
    const int64_t d = model.size;
    each_row([&](int64_t b) { normalize(b_of(buffers.x, d, b), layer.attention, d, b_of(buffers.normed, d, b)); });
    multiply(layer.queries_keys_values, buffers.normed, buffers.heads);
    const int64_t heads = model.queries + 2 * model.keys;
    threads->split(m * heads, 2048 / model.head_size + 1, [&](int64_t from, int64_t to, int64_t) {
      for (int64_t i = from; i < to; i++) turn_head(layer, at, i / heads, i % heads);
    });
    if (model.cache_kind == FLOAT32) attend<float>(layer, at);
    else if (model.cache_kind == BFLOAT16) attend<Brain>(layer, at);
    else attend<Half>(layer, at);
    multiply(layer.output, buffers.attended, buffers.added);
    each_row([&](int64_t b) { add_and_normalize(layer.added, &layer.network, b); });
    multiply(layer.gate_up, buffers.normed, buffers.both);
    threads->split(m * model.inner, 2048, [&](int64_t from, int64_t to, int64_t) { gate(from, to); });
    multiply(layer.down, buffers.inner, buffers.added);
    each_row([&](int64_t b) { add_and_normalize(layer.last, nullptr, b); });
  }

  template <class Work>
  void each_row(const Work& work) {
    threads->split(m, 1, [&](int64_t from, int64_t to, int64_t) { for (; from < to; from++) work(from); });
  }

  void add_and_normalize(const Norm& of_added, const Norm* next, int64_t b) {
    const int64_t d = model.size;
    float *x = b_of(buffers.x, d, b), *added = b_of(buffers.added, d, b);
    if (of_added.weight) normalize(added, of_added, d, added);
    for (int64_t i = 0; i < d; i++) x[i] += added[i];
    if (next) normalize(x, *next, d, b_of(buffers.normed, d, b));
  }

  // Normalizes and rotates a query or key; scales a query, and writes a key or value into the cache.
  void turn_head(const Layer& layer, int64_t layer_at, int64_t b, int64_t head) {
    const int64_t size = model.head_size, half = size / 2, of_keys = head - model.queries;
    const Token& token = tokens[b];
    float* x = b_of(buffers.heads, heads_size(), b) + head * size;
    if (of_keys < model.keys) {
      if (layer.heads.weight) normalize(x, {layer.heads.weight + head * size, layer.heads.epsilon}, size, x);
      const int64_t offset = layer.rotation_index * token.rotation_stride;
      const float *cos = token.cos + offset, *sin = token.sin + offset;
      for (int64_t i = 0; i < half; i++) {
        const float left = x[i], right = x[i + half];
        x[i] = left * cos[i] + right * sin[i], x[i + half] = right * cos[i + half] + left * sin[i + half];
      }
    }
    if (of_keys < 0) {
      for (int64_t i = 0; i < size; i++) x[i] *= (float)(model.scale * 1.4426950408889634);
      return;
    }
    const bool is_value = of_keys >= model.keys;
    const int64_t bytes = model.cache_kind == FLOAT32 ? 4 : 2;
    char* row = token.rows + (rows_of(token, layer_at, is_value ? 2 : 0) + token.held * size +
                              of_keys % model.keys * token.capacity * size) * bytes;
    for (int64_t i = 0; i < size; i++)
      if (model.cache_kind == FLOAT32) narrow(x[i], ((float*)row)[i]);
      else if (model.cache_kind == BFLOAT16) narrow(x[i], ((Brain*)row)[i]);
      else narrow(x[i], ((Half*)row)[i]);
    if (!is_value) memcpy(row + model.keys * token.capacity * size * bytes, row, size * bytes);
  }

  // Where in a cache a layer's keys, keys as first written or values begin.
  int64_t rows_of(const Token& token, int64_t layer, int64_t which) const {
    return (layer * 3 + which) * model.keys * token.capacity * model.head_size;
  }

  template <class T>
  __attribute__((noinline)) void attend(const Layer& layer, int64_t at) {
    std::vector<Attention<T>> each;
    int64_t most = 1;
    float* parts = buffers.parts;
    for (int64_t b = 0; b < m; b++) {
      const int64_t size = model.head_size, all = tokens[b].held + 1, n = std::min(all, layer.window);
      const int64_t splits = (n + 127) / 128, skipped = (all - n) * size;
      const T* rows = (const T*)tokens[b].rows + skipped;
      each.push_back({b_of(buffers.heads, heads_size(), b), rows + rows_of(tokens[b], at, 0),
                      rows + rows_of(tokens[b], at, 2), model.queries / model.keys, n, size,
                      tokens[b].capacity * size, splits, size + 2, parts});
      parts += splits * model.queries * (size + 2), most = std::max(most, splits);
    }
    threads->split(m * model.keys * most, 1, [&](int64_t from, int64_t to, int64_t) {
      for (; from < to; from++) {
        const auto& one = each[from / most / model.keys];
        if (from % most < one.splits) one.compute(from / most % model.keys, from % most);
      }
    });
    const int64_t cost = most * model.head_size;
    threads->split(m * model.queries, 16384 / cost + 1, [&](int64_t from, int64_t to, int64_t) {
      for (; from < to; from++)
        each[from / model.queries].put_together(from % model.queries, buffers.attended + from * model.head_size);
    });
  }

  void gate(int64_t from, int64_t to) {  // these inner numbers of all tokens
    for (int64_t at = from; at < to;) {
      const int64_t b = at / model.inner, start = at - b * model.inner;
      const int64_t count = std::min(to - at, model.inner - start);
      const float *gates = b_of(buffers.both, 2 * model.inner, b) + start, *ups = gates + model.inner;
      float* y = buffers.inner + at;
      for (int64_t i = 0; i < count; i++) {
        const float x = gates[i];
        const float of = model.uses_gelu ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
        const float low = power(-1.44269504f * std::fabs(of));  // e to the power of -|of|
        y[i] = x * ups[i] * ((of < 0 ? low : 1.0f) / (1 + low));
      }
      at += count;
    }
  }

  // y [B, rows] = x [B, K] W^T + bias
  void multiply(const Product& product, const float* x, float* y) {
    const int64_t k = product.parts[0].k, rows = product.rows();
    const Rounded rounded = round(product, x, k);
    float* start = y;
    for (int64_t i = 0; i < product.count; i++) {
      const Matrix& of = product.parts[i];
      const auto* w = (const uint8_t*)of.weights;
      const auto* scales = (const uint16_t*)of.scales;
      if (of.kind == FOUR) multiply(Four{w, scales, of.n, k, rows}, rounded, y);
      else if (of.kind == EIGHT) multiply(Eight{w, scales, of.n, k, rows}, rounded, y);
      else if (of.kind == FLOAT32) multiply(Plain<float>{(const float*)w, of.n, k, rows}, x, y);
      else if (of.kind == BFLOAT16) multiply(Plain<Brain>{(const Brain*)w, of.n, k, rows}, x, y);
      else with_blocks(of.kind, w, of.n, k, rows, [&](const auto& weights) { multiply(weights, rounded, y); });
      y += of.n;
    }
    for (int64_t b = 0; product.bias && b < m; b++)
      for (int64_t i = 0; i < rows; i++) start[b * rows + i] += product.bias[i];
  }

  Rounded round(const Product& product, const float* x, int64_t k) {
    Rounded rounded(m, k, buffers.rounded);
    bool are_plain = true;
    for (int64_t i = 0; i < product.count; i++) {
      const int64_t kind = product.parts[i].kind;
      are_plain &= kind == FLOAT32 || kind == BFLOAT16;
    }
    const int64_t groups = rounded.groups;
    if (!are_plain) threads->split(m * groups, 128, [&](int64_t from, int64_t to, int64_t) {
      for (int64_t next; from < to; from = next) {
        const int64_t row = from / groups, start = from % groups;
        next = std::min(to, (row + 1) * groups);
        rounded.round(x + row * k, row, start, start + next - from);
      }
    });
    return rounded;
  }

  template <class W>
  void multiply(const W& weights, const Rounded& x, float* y) {
    const int64_t bytes = W::ROWS * weights.k * W::BITS / 8;
    threads->split(count_blocks(weights), 16384 / bytes + 1, [&](int64_t from, int64_t to, int64_t) {
      multiply_blocks(weights, x, from, to, y);
    });
  }

  template <class T>
  void multiply(const Plain<T>& weights, const float* x, float* y) {
    const int64_t bytes = Plain<T>::ROWS * weights.k * sizeof(T);
    threads->split(count_blocks(weights), 16384 / bytes + 1,
                   [&](int64_t from, int64_t to, int64_t) { weights.multiply(x, m, from, to, y); });
  }

  void compute_logits(float* logits) {
    const int64_t d = model.size, count = model.head.rows();
    each_row([&](int64_t b) { normalize(b_of(buffers.x, d, b), model.norm, d, b_of(buffers.normed, d, b)); });
    multiply(model.head, buffers.normed, logits);
    if (model.refined)
      each_row([&](int64_t b) {
        const bool is_followed = b + 1 < m && tokens[b + 1].rows == tokens[b].rows;
        refine(b_of(buffers.normed, d, b), logits + b * count, count, is_followed ? tokens[b + 1].id : -1);
      });
  }

  // Computes the largest logits again, and that of the id that follows (-1: none), from x that was not rounded.
  void refine(const float* x, float* y, int64_t count, int64_t next) {
    const Matrix& head = model.head.parts[0];
    std::vector<std::pair<float, int64_t>> best;  // the largest first
    std::vector<float> row(head.k);
    auto see = [&](int64_t i) {
      if ((int64_t)best.size() == model.refined && !(y[i] > best.back().first)) return;
      auto place = best.begin();
      while (place != best.end() && !(y[i] > place->first)) place++;
      best.insert(place, {y[i], i});
      if ((int64_t)best.size() > model.refined) best.pop_back();
    };
    constexpr int BLOCK = 4;
    int64_t i = 0;
    for (; i < std::min(model.refined, count); i++) see(i);
    for (; i + BLOCK * L <= count; i += BLOCK * L) {
      Ints larger{};
      for (int j = 0; j < BLOCK; j++) larger |= (Ints)((F)load(y + i + j * L) > all(best.back().first));
      bool any = false;
      for (int j = 0; j < L; j++) any |= larger[j];
      for (int j = 0; j < BLOCK * L && any; j++) see(i + j);
    }
    for (; i < count; i++) see(i);
    if (0 <= next && next < count) best.push_back({0, next});
    for (auto& [_, at] : best) {
      const float by = head.kind == EIGHT ? scale_of(head, at) : 1;
      if (head.kind == EIGHT) read_row((const int8_t*)head.weights + at * head.k, head.k, 1, &row[0]);
      else unpack_block_row(head, at, &row[0]);
      y[at] = dot(&row[0], x, head.k) * by + (model.head.bias ? model.head.bias[at] : 0);
    }
  }

  Model model;
  Buffers buffers;
  const Token* tokens = nullptr;
  int64_t m = 0, wanted = 0, owner = process();
  std::mutex mutex;
  std::unique_ptr<Threads> threads;
};

}  // namespace

EXPORTED void* sirchat_new_step(const Model* model) { return new (std::nothrow) Step(*model); }

EXPORTED void sirchat_end_step(void* step) { delete (Step*)step; }

// Reads `count` tokens into their caches; logits [B, V] and states [B, wanted, d], either may be null.
// Returns whether memory sufficed; without, the tokens can be read again.
EXPORTED bool sirchat_read(void* step, const Token* tokens, int64_t count, int64_t threads, float* logits, float* states) {
  try {
    ((Step*)step)->read(tokens, count, threads, logits, states);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}
