// What attention in fp32 and attention in tiles of bfloat16 share: vectors, softmax, and which keys a query sees.
//
// Queries [B, T, N, H], keys and values [B, S, K, H], results and gradients have strides; the rest is contiguous:
//   logarithms of sums of exponentials [B, N, T],
//   starts [B, T]: the first key that each query sees, or null if that is the first of the row,
//   ends [B, T]: the one after its last key, or null if that is the one after itself, where S is T.
// H is a multiple of LANES, N one of K. attend() and attend_backward() return whether starts and ends are such indices;
// if not, they write nothing.

#pragma once

#include <cmath>

#include "vectors.h"

namespace {

constexpr int64_t AHEAD = 8;        // rows that are loaded to the cache before they are copied
constexpr float MASKED = -INFINITY;
constexpr float NO_KEYS = -1e30f;  // logarithm of the sum of a query that sees no key; finite, so that it can be merged

typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(alignof(int32_t)), may_alias));

struct Sizes {
  int64_t B, T, S, N, K, H;
  int64_t accumulate;  // whether to add to results, and to the gradient by queries, over other keys; in fp32 only
};

// A tensor [B, T, heads, H] whose heads are consecutive, with the strides of the others, in elements.
template <class T>
struct Heads {
  T* data;
  int64_t batch_stride, token_stride;

  // The rows [T, H] of a head from a token on.
  Heads from(int64_t b, int64_t t, int64_t head, int64_t H) const {
    return {data + b * batch_stride + t * token_stride + head * H, batch_stride, token_stride};
  }
  T* operator[](int64_t token) const { return data + token * token_stride; }
};

template <class Combine>
float reduce(Vector x, Combine combine) {
  float parts[LANES];
  std::memcpy(parts, &x, sizeof parts);
  for (int64_t width = LANES / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i) parts[i] = combine(parts[i], parts[i + width]);
  return parts[0];
}

float sum(Vector x) {
  return reduce(x, [](float a, float b) { return a + b; });
}

// e^x for x <= 0 with a relative error of 2e-7, and 0 below the smallest normal number: e^x = 2^n e^r, |r| <= ln 2 / 2,
// and e^r by its Taylor series. ln 2 has two parts, of which n times the first is exact.
Vector exponential(Vector x) {
  constexpr float TO_INTEGER = 12582912.0f;  // 1.5 x 2^23
  const Vector n = (x * 1.44269504f + TO_INTEGER) - TO_INTEGER;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector series = r * (1.0f / 5040) + 1.0f / 720;
  for (float coefficient : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) series = series * r + coefficient;
  const Integers power = (__builtin_convertvector(n, Integers) + 127) << 23;
  return x < -87.0f ? Vector{} : series * reinterpret_cast<const Vector&>(power);
}

// Loads rows of a head to the cache. They are as far apart as tokens, which hardware does not foresee.
template <class T>
void prefetch(const Heads<T>& x, int64_t first, int64_t rows, int64_t H) {
  for (int64_t i = first; i < first + rows; ++i)
    for (int64_t h = 0; h < H; h += LINE_BYTES / sizeof(T)) __builtin_prefetch(x[i] + h);
}

// Copies rows of a head [rows, H] to consecutive ones: a cache has few places for rows that are equally far apart.
template <class T>
void copy_rows(const Heads<T>& x, int64_t rows, int64_t H, T* copies) {
  for (int64_t i = 0; i < rows; ++i) {
    if (i + AHEAD < rows) prefetch(x, i + AHEAD, 1, H);
    std::copy_n(x[i], H, copies + i * H);
  }
}

// Whether starts or ends [B, T], or null, are indices of keys or the one after them.
bool are_bounds(const int32_t* x, const Sizes& size) {
  bool are = true;
  for (int64_t i = 0; x != nullptr && i < size.B * size.T; ++i) are &= x[i] >= 0 && x[i] <= size.S;
  return are;
}

const int32_t* row_of(const int32_t* x, int64_t b, int64_t T) { return x == nullptr ? nullptr : x + b * T; }

// A block of queries of one head, and the keys that they see, from a multiple of `panel` on.
struct Block {
  int64_t first_query, rows, next_rows, panel, first_key, end;
  const int32_t *starts, *ends;  // of its queries

  Block(const int32_t* row_starts, const int32_t* row_ends, int64_t first, int64_t T, int64_t queries, int64_t panel)
      : first_query(first), rows(std::min(queries, T - first)), next_rows(std::min(queries, T - first - rows)),
        panel(panel), first_key(0), end(first + rows),
        starts(row_starts == nullptr ? nullptr : row_starts + first),
        ends(row_ends == nullptr ? nullptr : row_ends + first) {
    if (starts != nullptr) first_key = *std::min_element(starts, starts + rows) / panel * panel;
    if (ends != nullptr) end = *std::max_element(ends, ends + rows);
  }

  int64_t start_of(int64_t query) const { return starts == nullptr ? 0 : starts[query]; }
  int64_t end_of(int64_t query) const { return ends == nullptr ? first_query + query + 1 : ends[query]; }

  // Masks the keys from `first` on that the query does not see.
  void mask(int64_t query, int64_t first, int64_t width, float* scores) const {
    std::fill(scores, scores + std::clamp<int64_t>(start_of(query) - first, 0, width), MASKED);
    std::fill(scores + std::clamp<int64_t>(end_of(query) - first, 0, width), scores + padded(width, panel), MASKED);
  }
};

// Calls run() with the blocks of queries of a head, and where they start in logarithms.
template <class Run>
void for_each_block(const Sizes& size, int64_t b, int64_t n, const int32_t* starts, const int32_t* ends, int64_t queries,
                    int64_t panel, Run run) {
  const int64_t T = size.T;
  for (int64_t t = 0; t < T; t += queries) {
    const Block block(row_of(starts, b, T), row_of(ends, b, T), t, T, queries, panel);
    run(block, (b * size.N + n) * T + t);
  }
}

// The softmax of a row of scores that come in blocks.
struct Softmax {
  float maximum = MASKED, total = 0.0f;

  // Starts from the logarithm of a sum over other keys.
  void add(float log, float scale) {
    if (log <= NO_KEYS) return;
    maximum = log / scale;
    total = std::exp(log - maximum * scale);
  }

  // Passes e^(scale (score - maximum)) to write(), a vector after another, with the maximum of all scores until now, and
  // to rescale() the factor of what was computed with the maximum before. `count` is a multiple of LANES.
  template <class Write, class Rescale>
  void add(const float* scores, int64_t count, float scale, Write write, Rescale rescale) {
    Vector largest = load(scores);
    for (int64_t j = LANES; j < count; j += LANES) {
      const Vector x = load(scores + j);
      largest = x > largest ? x : largest;
    }
    const float before = maximum;
    maximum = std::max(before, reduce(largest, [](float a, float b) { return a > b ? a : b; }));
    const float shift = maximum == MASKED ? 0.0f : maximum * scale;
    Vector sums = {};
    for (int64_t j = 0; j < count; j += LANES) {
      const Vector probability = exponential(load(scores + j) * scale - shift);
      sums += probability;
      write(j, probability);
    }
    if (before != MASKED) {
      const float factor = std::exp(before * scale - shift);
      total *= factor;
      rescale(factor);
    }
    total += sum(sums);
  }

  bool sees_keys() const { return total != 0.0f; }  // true for NaN
  float log(float scale) const { return sees_keys() ? maximum * scale + std::log(total) : NO_KEYS; }
};

}  // namespace
