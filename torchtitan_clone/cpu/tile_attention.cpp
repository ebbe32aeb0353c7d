// Attention to a range of keys in bfloat16 by the tiles of AMX; library.py compiles this file, and attention.py
// calls it.
//
// FlashAttention (arXiv 2205.14135, 2307.08691) as in attention.cpp, with products of 32 x 32 results. Scores, sums
// and gradients are in fp32; probabilities and gradients of scores are rounded to bfloat16 for the next product. H is a
// multiple of 32.

#include "attention.h"

#include "tiles.h"

namespace {

typedef Heads<Low> Tensor;

constexpr int64_t QUERIES = 64, KEYS = 512;
constexpr int64_t WIDTH = KEYS + DEPTH;   // between two rows of scores, which are then not at equal cache lines

// Copies rows of a head [rows, H] to consecutive ones, and zeros after them.
void copy_padded(const Tensor& x, int64_t rows, int64_t all_rows, int64_t H, Low* copies) {
  copy_rows(x, rows, H, copies);
  std::fill(copies + rows * H, copies + all_rows * H, 0);
}

// Writes the tiles of x^T as factor on the right, x [rows, H]: [rows / 16, H / 32] tiles.
void pack_transposed(const Low* x, int64_t rows, int64_t H, Low* tiles) {
  for (int64_t first = 0; first < rows; first += TILE)
    for (int64_t h = 0; h < H; h += DEPTH, tiles += SIZE)
      transpose_pairs(x + first * H + h, H, tiles, DEPTH);
}

// Writes the tiles of x as factor on the right, x [rows, H]: [rows / 32, H / 16] tiles.
void pack(const Low* x, int64_t rows, int64_t H, Low* tiles) {
  for (int64_t first = 0; first < rows; first += DEPTH)
    for (int64_t h = 0; h < H; h += TILE, tiles += SIZE) pack_tile(x + first * H + h, H, tiles);
}

// Writes x^T [H, out_row], x [rows, H].
void transpose(const Low* x, int64_t rows, int64_t H, Low* out, int64_t out_row) {
  alignas(LINE_BYTES) Low tile[SIZE];
  for (int64_t first = 0; first < rows; first += DEPTH)
    for (int64_t h = 0; h < H; h += TILE) {
      pack_tile(x + first * H + h, H, tile);
      transpose_pairs(tile, DEPTH, out + h * out_row + first, out_row);
    }
}

// Memory of a thread. Forward: keys and values in tiles, of a block queries, scores, probabilities and results.
struct Forward {
  Memory<Low> rows, keys, values, queries, probs;
  Memory<float> scores, out;

  Forward(int64_t S, int64_t H)
      : rows(memory<Low>(S * H)), keys(memory<Low>(S * H)), values(memory<Low>(S * H)), queries(memory<Low>(QUERIES * H)),
        probs(memory<Low>(QUERIES * WIDTH)), scores(memory<float>(QUERIES * WIDTH)), out(memory<float>(QUERIES * H)) {}
};

void attend_block(const Block& block, int64_t H, const Forward& m, float scale, const Tensor& out, float* logs) {
  const int64_t rows = padded(block.rows, SIDE);
  Softmax softmax[QUERIES];
  for (int64_t first = block.first_key; first < block.end; first += KEYS) {
    const int64_t width = std::min(KEYS, block.end - first), all = padded(width, SIDE);
    for (int64_t i = 0; i < rows; i += SIDE)
      for (int64_t j = 0; j < all; j += SIDE)
        multiply<false>(H / DEPTH, m.queries.get() + i * H, H, DEPTH, m.keys.get() + (first + j) * H, TILE * H, SIZE,
                        m.scores.get() + i * WIDTH + j, WIDTH);
    for (int64_t i = 0; i < block.rows; ++i) {
      float* row = m.scores.get() + i * WIDTH;
      Low* probs = m.probs.get() + i * WIDTH;
      float* sums = m.out.get() + i * H;
      block.mask(i, first, width, row);
      const auto write = [probs](int64_t j, Vector probability) { store_low(probs + j, rounded(probability)); };
      softmax[i].add(row, all, scale, write, [sums, H](float factor) {
        for (int64_t h = 0; h < H; h += LANES) store(sums + h, load(sums + h) * factor);
      });
    }
    for (int64_t i = 0; i < rows; i += SIDE)
      for (int64_t h = 0; h < H; h += SIDE)
        (first > block.first_key ? multiply<true> : multiply<false>)(
            all / DEPTH, m.probs.get() + i * WIDTH, WIDTH, DEPTH, m.values.get() + first * H + h * DEPTH, SIZE, DEPTH * H,
            m.out.get() + i * H + h, H);
  }
  for (int64_t i = 0; i < block.rows; ++i) {
    const float* sums = m.out.get() + i * H;
    const bool sees = softmax[i].sees_keys();
    for (int64_t h = 0; h < H; h += LANES)
      store_low(out[i] + h, rounded(sees ? load(sums + h) / softmax[i].total : Vector{}));
    logs[i] = softmax[i].log(scale);
  }
}

// Memory of a thread. Backward computes with scores^T [keys, queries]: of a head keys and values, K^T, and gradients; of
// a block of queries rows of these and of gradients, both as tiles of x^T and of x, scores^T and their gradients, in fp32
// and as factors, and the gradient by the queries [H, QUERIES].
struct Backward {
  int64_t S, S_row;
  Memory<Low> keys, values, keys_T;
  Memory<float> k_grad, v_grad;
  Memory<Low> queries, queries_T, query_tiles, out_grads, out_grads_T, out_grad_tiles;
  Memory<float> scores, grads;
  Memory<Low> probs, score_grads, score_grad_tiles;
  Memory<float> q_grad;

  Backward(int64_t S, int64_t H)
      : S(S), S_row(S + DEPTH), keys(memory<Low>(S * H)), values(memory<Low>(S * H)), keys_T(memory<Low>(H * S_row)),
        k_grad(memory<float>(S * H)), v_grad(memory<float>(S * H)), queries(memory<Low>(QUERIES * H)),
        queries_T(memory<Low>(QUERIES * H)), query_tiles(memory<Low>(QUERIES * H)), out_grads(memory<Low>(QUERIES * H)),
        out_grads_T(memory<Low>(QUERIES * H)), out_grad_tiles(memory<Low>(QUERIES * H)),
        scores(memory<float>(KEYS * QUERIES)), grads(memory<float>(KEYS * QUERIES)), probs(memory<Low>(KEYS * QUERIES)),
        score_grads(memory<Low>(KEYS * QUERIES)), score_grad_tiles(memory<Low>(KEYS * QUERIES)),
        q_grad(memory<float>(H * QUERIES)) {}
};

// The queries of a block, a value of each: those after the last one see no key.
struct Columns {
  int32_t starts[QUERIES] = {}, ends[QUERIES] = {};
  float logs[QUERIES] = {}, products[QUERIES] = {};  // of each result and its gradient
  int32_t all_from = 0, all_until = INT32_MAX;       // keys that all of QUERIES see

  Columns(const Block& block, const float* block_logs, const Tensor& out, const Low* out_grads, int64_t H) {
    for (int64_t i = 0; i < block.rows; ++i) {
      starts[i] = block.start_of(i);
      ends[i] = block.end_of(i);
      logs[i] = block_logs[i];
      Vector product = {};
      for (int64_t h = 0; h < H; h += LANES) product += widened(out_grads + i * H + h) * widened(out[i] + h);
      products[i] = sum(product);
    }
    for (int64_t i = 0; i < QUERIES; ++i) {
      all_from = std::max(all_from, starts[i]);
      all_until = std::min(all_until, ends[i]);
    }
  }
};

// Writes the probabilities and their gradients of two keys, as rows and as pairs.
void differentiate(const Columns& columns, int64_t key, const float* scores, const float* grads, float scale, Low* probs,
                   Low* score_grads, Low* score_grad_tiles) {
  const bool all_see = columns.all_from <= key && key + 1 < columns.all_until;
  for (int64_t i = 0; i < QUERIES; i += LANES) {
    Bits results[2];
    for (int64_t j = 0; j < 2; ++j) {
      const int64_t place = j * QUERIES + i;
      Vector probability = exponential(load(scores + place) * scale - load(columns.logs + i));
      Vector grad = probability * (load(grads + place) - load(columns.products + i)) * scale;
      if (!all_see) {
        const Integers& starts = reinterpret_cast<const Integers&>(columns.starts[i]);
        const Integers& ends = reinterpret_cast<const Integers&>(columns.ends[i]);
        const Integers sees = (starts <= int32_t(key + j)) & (ends > int32_t(key + j));
        probability = sees ? probability : Vector{};
        grad = sees ? grad : Vector{};
      }
      results[j] = rounded(grad);
      store_low(probs + place, rounded(probability));
      store_low(score_grads + place, results[j]);
    }
    store_pairs(score_grad_tiles + i / TILE * SIZE + i % TILE * 2, results[0] >> 16, results[1] & 0xffff0000);
  }
}

// Writes the gradients by the queries of a block, and adds to those by keys and values.
void attend_block_backward(const Block& block, int64_t H, const Tensor& grad, const Tensor& queries, const Tensor& out,
                           const float* logs, float scale, const Backward& m, const Tensor& q_grad) {
  copy_padded(queries, block.rows, QUERIES, H, m.queries.get());
  copy_padded(grad, block.rows, QUERIES, H, m.out_grads.get());
  for (const Tensor& x : {queries, grad, out}) prefetch(x, QUERIES, block.next_rows, H);
  pack_transposed(m.queries.get(), QUERIES, H, m.queries_T.get());
  pack_transposed(m.out_grads.get(), QUERIES, H, m.out_grads_T.get());
  pack(m.queries.get(), QUERIES, H, m.query_tiles.get());
  pack(m.out_grads.get(), QUERIES, H, m.out_grad_tiles.get());
  const Columns columns(block, logs, out, m.out_grads.get(), H);
  for (int64_t first = block.first_key; first < block.end; first += KEYS) {
    const int64_t all = padded(std::min(KEYS, block.end - first), SIDE);
    for (int64_t s = 0; s < all; s += SIDE)
      for (int64_t i = 0; i < QUERIES; i += SIDE) {
        const int64_t keys = (first + s) * H, place = s * QUERIES + i;
        multiply<false>(H / DEPTH, m.keys.get() + keys, H, DEPTH, m.queries_T.get() + i * H, TILE * H, SIZE,
                        m.scores.get() + place, QUERIES);
        multiply<false>(H / DEPTH, m.values.get() + keys, H, DEPTH, m.out_grads_T.get() + i * H, TILE * H, SIZE,
                        m.grads.get() + place, QUERIES);
      }
    for (int64_t s = 0; s < all; s += 2) {
      const int64_t place = s * QUERIES, tile = s / DEPTH * DEPTH * QUERIES + s % DEPTH / 2 * DEPTH;
      differentiate(columns, first + s, m.scores.get() + place, m.grads.get() + place, scale, m.probs.get() + place,
                    m.score_grads.get() + place, m.score_grad_tiles.get() + tile);
    }
    for (int64_t h = 0; h < H; h += SIDE)
      for (int64_t i = 0; i < QUERIES; i += SIDE)
        (first > block.first_key ? multiply<true> : multiply<false>)(
            all / DEPTH, m.keys_T.get() + h * m.S_row + first, m.S_row, DEPTH, m.score_grad_tiles.get() + i * DEPTH, SIZE,
            DEPTH * QUERIES, m.q_grad.get() + h * QUERIES + i, QUERIES);
    for (int64_t s = 0; s < all; s += SIDE)
      for (int64_t h = 0; h < H; h += SIDE) {
        const int64_t place = (first + s) * H + h;
        multiply<true>(QUERIES / DEPTH, m.score_grads.get() + s * QUERIES, QUERIES, DEPTH, m.query_tiles.get() + h * DEPTH, SIZE,
                       DEPTH * H, m.k_grad.get() + place, H);
        multiply<true>(QUERIES / DEPTH, m.probs.get() + s * QUERIES, QUERIES, DEPTH, m.out_grad_tiles.get() + h * DEPTH, SIZE,
                       DEPTH * H, m.v_grad.get() + place, H);
      }
  }
  if (block.end <= block.first_key) std::fill_n(m.q_grad.get(), H * QUERIES, 0.0f);
  float grads[LANES];
  for (int64_t i = 0; i < block.rows; ++i)
    for (int64_t h = 0; h < H; h += LANES) {
      for (int64_t j = 0; j < LANES; ++j) grads[j] = m.q_grad[(h + j) * QUERIES + i];
      store_low(q_grad[i] + h, rounded(load(grads)));
    }
}

}  // namespace

// Whether this process may use the registers of tiles, which Linux permits when it is asked.
extern "C" bool permit_tiles() {
#ifdef __AMX_BF16__
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return false;
#endif
}

extern "C" int32_t attend(const Tensor* q, const Tensor* k, const Tensor* v, const int32_t* starts, const int32_t* ends,
                          const Tensor* out, float* logs, const Sizes* size, float scale) {
  if (!are_bounds(starts, *size) || !are_bounds(ends, *size)) return false;
  const int64_t B = size->B, S = size->S, N = size->N, K = size->K, H = size->H, all = padded(S, DEPTH);
#pragma omp parallel
  {
    [[maybe_unused]] const Tiles tiles;
    const Forward m(all, H);
#pragma omp for schedule(dynamic)
    for (int64_t head = 0; head < B * N; ++head) {
      const int64_t b = head / N, n = head % N, kv = n / (N / K);
      copy_padded(k->from(b, 0, kv, H), S, all, H, m.rows.get());
      pack_transposed(m.rows.get(), all, H, m.keys.get());
      copy_padded(v->from(b, 0, kv, H), S, all, H, m.rows.get());
      pack(m.rows.get(), all, H, m.values.get());
      for_each_block(*size, b, n, starts, ends, QUERIES, SIDE, [&](const Block& block, int64_t row) {
        const Tensor queries = q->from(b, block.first_query, n, H);
        copy_padded(queries, block.rows, QUERIES, H, m.queries.get());
        prefetch(queries, QUERIES, block.next_rows, H);
        attend_block(block, H, m, scale, out->from(b, block.first_query, n, H), logs + row);
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
  const int64_t all = padded(S, DEPTH);
#pragma omp parallel
  {
    [[maybe_unused]] const Tiles tiles;
    const Backward m(all, H);
#pragma omp for schedule(dynamic)
    for (int64_t kv_head = 0; kv_head < B * K; ++kv_head) {
      const int64_t b = kv_head / K, kv = kv_head % K;
      copy_padded(v->from(b, 0, kv, H), S, all, H, m.values.get());
      copy_padded(k->from(b, 0, kv, H), S, all, H, m.keys.get());
      transpose(m.keys.get(), all, H, m.keys_T.get(), m.S_row);
      std::fill_n(m.k_grad.get(), all * H, 0.0f);
      std::fill_n(m.v_grad.get(), all * H, 0.0f);
      for (int64_t n = kv * groups; n < (kv + 1) * groups; ++n)
        for_each_block(*size, b, n, starts, ends, QUERIES, SIDE, [&](const Block& block, int64_t row) {
          const auto of_block = [&](const Tensor* x) { return x->from(b, block.first_query, n, H); };
          attend_block_backward(block, H, of_block(grad), of_block(q), of_block(out), logs + row, scale, m,
                                of_block(q_grad));
        });
      for (int64_t s = 0; s < S; ++s)
        for (int64_t h = 0; h < H; h += LANES) {
          store_low(k_grad->from(b, s, kv, H).data + h, rounded(load(m.k_grad.get() + s * H + h)));
          store_low(v_grad->from(b, s, kv, H).data + h, rounded(load(m.v_grad.get() + s * H + h)));
        }
    }
  }
  return true;
}
