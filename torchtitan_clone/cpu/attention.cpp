// Attention to a range of keys in fp32 on a CPU; library.py compiles this file, and attention.py calls it.
//
// FlashAttention (arXiv 2205.14135, 2307.08691): no row of scores is ever in memory as a whole, and backward computes
// them again. Keys are packed so that one vector has the same feature of several keys.

#include "attention.h"

namespace {

constexpr int64_t ROWS = LANES == 8 ? 4 : 8;
constexpr int64_t PANEL = 2 * LANES;           // keys that are packed together; ROWS x PANEL sums fit into registers
constexpr int64_t QUERIES = 32, KEYS = 512;    // of a block of scores, which stays in the cache
constexpr int64_t WIDTH = KEYS + LANES;        // between two rows of scores, which are then not at equal cache lines

typedef Memory<float> Floats;
typedef Heads<float> Tensor;

// c = a b, or c += a b, for R rows of a [rows, depth] and V vectors of the columns of b [depth, columns]. What is added to
// c is summed first: a sum over many blocks then has fewer roundings than terms.
template <bool ADD, int R, int V>
void multiply_tile(int64_t depth, const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row,
                   float* c, int64_t c_row) {
  Vector sums[R][V];  // in registers, where all loops over them are unrolled
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) sums[r][v] = Vector{};
  for (int64_t d = 0; d < depth; ++d) {
    Vector right[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) right[v] = load(b + d * b_row + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sums[r][v] += a[r * a_row + d * a_column] * right[v];
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      float* place = c + r * c_row + v * LANES;
      store(place, ADD ? load(place) + sums[r][v] : sums[r][v]);
    }
}

template <bool ADD, int V>
void multiply_columns(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_column, const float* b,
                      int64_t b_row, float* c, int64_t c_row) {
  int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS)
    multiply_tile<ADD, ROWS, V>(depth, a + r * a_row, a_row, a_column, b, b_row, c + r * c_row, c_row);
  for (; r < rows; ++r)
    multiply_tile<ADD, 1, V>(depth, a + r * a_row, a_row, a_column, b, b_row, c + r * c_row, c_row);
}

template <bool ADD>
void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row, int64_t a_column,
              const float* b, int64_t b_row, float* c, int64_t c_row) {
  int64_t i = 0;
  for (; i + PANEL <= columns; i += PANEL)
    multiply_columns<ADD, 2>(rows, depth, a, a_row, a_column, b + i, b_row, c + i, c_row);
  for (; i < columns; i += LANES)
    multiply_columns<ADD, 1>(rows, depth, a, a_row, a_column, b + i, b_row, c + i, c_row);
}

// Writes x [tokens, H] as [tokens / PANEL, H, PANEL], with zeros after the last token.
void pack(const float* x, int64_t tokens, int64_t H, float* panels) {
  for (int64_t first = 0; first < tokens; first += PANEL, panels += PANEL * H)
    if (first + PANEL <= tokens) {
      for (int64_t h = 0; h < H; h += 4) transpose_rows<PANEL>(x + first * H + h, H, panels + h * PANEL);
    } else {
      for (int64_t i = 0; i < PANEL; ++i)
        for (int64_t h = 0; h < H; ++h) panels[h * PANEL + i] = first + i < tokens ? x[(first + i) * H + h] : 0.0f;
    }
}

// Writes x [rows, H] times packed keys to scores [rows, width].
void multiply_packed(int64_t rows, int64_t H, const float* x, const float* panels, int64_t width, float* scores) {
  for (int64_t i = 0; i < width; i += PANEL)
    multiply_columns<false, 2>(rows, H, x, H, 1, panels + i * H, PANEL, scores + i, WIDTH);
}

void attend_block(const Block& block, int64_t H, bool accumulate, const float* queries, const float* panels,
                  const float* values, float scale, float* scores, const Tensor& out, float* logs) {
  Softmax softmax[QUERIES];
  for (int64_t i = 0; accumulate && i < block.rows; ++i) softmax[i].add(logs[i], scale);
  for (int64_t first = block.first_key; first < block.end; first += KEYS) {
    const int64_t width = std::min(KEYS, block.end - first);
    multiply_packed(block.rows, H, queries, panels + first * H, width, scores);
    for (int64_t i = 0; i < block.rows; ++i) {
      float* row = scores + i * WIDTH;
      block.mask(i, first, width, row);
      const auto write = [row](int64_t j, Vector probability) { store(row + j, probability); };
      softmax[i].add(row, padded(width, PANEL), scale, write, [=](float factor) {
        for (int64_t h = 0; h < H; h += LANES) store(out[i] + h, load(out[i] + h) * factor);
      });
    }
    (accumulate || first > block.first_key ? multiply<true> : multiply<false>)(
        block.rows, H, width, scores, WIDTH, 1, values + first * H, H, out.data, out.token_stride);
  }
  for (int64_t i = 0; i < block.rows; ++i) {
    const bool sees = softmax[i].sees_keys();
    for (int64_t h = 0; h < H; h += LANES) store(out[i] + h, sees ? load(out[i] + h) / softmax[i].total : Vector{});
    logs[i] = softmax[i].log(scale);
  }
}

// Memory of a thread: keys of a head, these and values packed, two blocks of scores, gradients [S, H], rows of a block.
struct Scratch {
  Floats keys, key_panels, value_panels, scores, grads, k_grad, v_grad, queries, out_grads;
};

// Writes the gradients by the queries of a block, and adds to those by keys and values.
void attend_block_backward(const Block& block, int64_t H, bool accumulate, const Tensor& grad, const Tensor& queries,
                           const Tensor& out, const float* logs, float scale, const Scratch& scratch,
                           const Tensor& q_grad) {
  float* scores = scratch.scores.get();
  float* grads = scratch.grads.get();
  copy_rows(queries, block.rows, H, scratch.queries.get());
  copy_rows(grad, block.rows, H, scratch.out_grads.get());
  for (const Tensor& x : {queries, grad, out}) prefetch(x, QUERIES, block.next_rows, H);
  float products[QUERIES];  // of each result and its gradient
  if (block.end <= block.first_key && !accumulate)
    for (int64_t i = 0; i < block.rows; ++i) std::fill_n(q_grad[i], H, 0.0f);
  for (int64_t i = 0; i < block.rows; ++i) {
    Vector product = {};
    for (int64_t h = 0; h < H; h += LANES) product += load(grad[i] + h) * load(out[i] + h);
    products[i] = sum(product);
  }
  for (int64_t first = block.first_key; first < block.end; first += KEYS) {
    const int64_t width = std::min(KEYS, block.end - first);
    multiply_packed(block.rows, H, scratch.queries.get(), scratch.key_panels.get() + first * H, width, scores);
    multiply_packed(block.rows, H, scratch.out_grads.get(), scratch.value_panels.get() + first * H, width, grads);
    for (int64_t i = 0; i < block.rows; ++i) {
      float* row = scores + i * WIDTH;
      float* grad_row = grads + i * WIDTH;
      block.mask(i, first, width, row);
      for (int64_t j = 0; j < padded(width, PANEL); j += LANES) {
        const Vector probability = exponential(load(row + j) * scale - logs[i]);
        store(row + j, probability);
        store(grad_row + j, probability * (load(grad_row + j) - products[i]) * scale);
      }
    }
    (accumulate || first > block.first_key ? multiply<true> : multiply<false>)(
        block.rows, H, width, grads, WIDTH, 1, scratch.keys.get() + first * H, H, q_grad.data, q_grad.token_stride);
    multiply<true>(width, H, block.rows, grads, 1, WIDTH, scratch.queries.get(), H, scratch.k_grad.get() + first * H,
                   H);
    multiply<true>(width, H, block.rows, scores, 1, WIDTH, scratch.out_grads.get(), H,
                   scratch.v_grad.get() + first * H, H);
  }
}

}  // namespace

// Clang takes no structured bindings in parallel regions.
extern "C" int32_t attend(const Tensor* q, const Tensor* k, const Tensor* v, const int32_t* starts, const int32_t* ends,
                          const Tensor* out, float* logs, const Sizes* size, float scale) {
  if (!are_bounds(starts, *size) || !are_bounds(ends, *size)) return false;
  const int64_t B = size->B, S = size->S, N = size->N, K = size->K, H = size->H;
#pragma omp parallel
  {
    const Floats panels = memory<float>(padded(S, PANEL) * H), rows = memory<float>(S * H);
    const Floats queries = memory<float>(QUERIES * H), scores = memory<float>(QUERIES * WIDTH);
#pragma omp for schedule(dynamic)
    for (int64_t head = 0; head < B * N; ++head) {
      const int64_t b = head / N, n = head % N, kv = n / (N / K);
      copy_rows(k->from(b, 0, kv, H), S, H, rows.get());
      pack(rows.get(), S, H, panels.get());
      copy_rows(v->from(b, 0, kv, H), S, H, rows.get());
      for_each_block(*size, b, n, starts, ends, QUERIES, PANEL, [&](const Block& block, int64_t row) {
        const Tensor block_queries = q->from(b, block.first_query, n, H);
        copy_rows(block_queries, block.rows, H, queries.get());
        prefetch(block_queries, QUERIES, block.next_rows, H);
        attend_block(block, H, size->accumulate, queries.get(), panels.get(), rows.get(), scale, scores.get(),
                     out->from(b, block.first_query, n, H), logs + row);
      });
    }
  }
  return true;
}

extern "C" int32_t attend_backward(const Tensor* grad, const Tensor* q, const Tensor* k, const Tensor* v,
                                   const int32_t* starts, const int32_t* ends, const Tensor* out, const float* logs,
                                   const Tensor* q_grad, const Tensor* k_grad, const Tensor* v_grad, const Sizes* size,
                                   float scale) {
  if (!are_bounds(starts, *size) || !are_bounds(ends, *size)) return false;
  const int64_t B = size->B, S = size->S, N = size->N, K = size->K, H = size->H, groups = N / K;
#pragma omp parallel
  {
    const int64_t keys = S * H, panels = padded(S, PANEL) * H, scores = QUERIES * WIDTH, rows = QUERIES * H;
    const Scratch scratch = {memory<float>(keys),   memory<float>(panels), memory<float>(panels),
                             memory<float>(scores), memory<float>(scores), memory<float>(keys),
                             memory<float>(keys),   memory<float>(rows),   memory<float>(rows)};
#pragma omp for schedule(dynamic)
    for (int64_t kv_head = 0; kv_head < B * K; ++kv_head) {
      const int64_t b = kv_head / K, kv = kv_head % K;
      copy_rows(v->from(b, 0, kv, H), S, H, scratch.keys.get());
      pack(scratch.keys.get(), S, H, scratch.value_panels.get());
      copy_rows(k->from(b, 0, kv, H), S, H, scratch.keys.get());
      pack(scratch.keys.get(), S, H, scratch.key_panels.get());
      std::fill_n(scratch.k_grad.get(), S * H, 0.0f);
      std::fill_n(scratch.v_grad.get(), S * H, 0.0f);
      for (int64_t n = kv * groups; n < (kv + 1) * groups; ++n)
        for_each_block(*size, b, n, starts, ends, QUERIES, PANEL, [&](const Block& block, int64_t row) {
          const auto of_block = [&](const Tensor* x) { return x->from(b, block.first_query, n, H); };
          attend_block_backward(block, H, size->accumulate, of_block(grad), of_block(q), of_block(out), logs + row, scale,
                                scratch, of_block(q_grad));
        });
      for (int64_t s = 0; s < S; ++s) {
        std::copy_n(scratch.k_grad.get() + s * H, H, k_grad->from(b, s, kv, H).data);
        std::copy_n(scratch.v_grad.get() + s * H, H, v_grad->from(b, s, kv, H).data);
      }
    }
  }
  return true;
}
