// Vectors and memory of the C++ of this package.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace {

constexpr int64_t LANES = FLOATS_OF_VECTOR;
constexpr int64_t LINE_BYTES = 64;  // of a cache

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(alignof(float)), may_alias));

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

template <class T>
using Memory = std::unique_ptr<T[], Free>;

int64_t padded(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// Allocates memory that starts at a cache line.
template <class T>
Memory<T> memory(int64_t count) {
  void* found = std::aligned_alloc(LINE_BYTES, padded(count * sizeof(T), LINE_BYTES));
  if (found == nullptr) throw std::bad_alloc();
  return Memory<T>(static_cast<T*>(found));
}

Vector load(const float* x) { return *reinterpret_cast<const Vector*>(x); }
void store(float* x, Vector value) { *reinterpret_cast<Vector*>(x) = value; }

// Writes the transposed of x [COUNT, 4], whose rows are `stride` apart, as [4, COUNT].
template <int64_t COUNT>
void transpose_rows(const float* x, int64_t stride, float* out) {
  for (int64_t i = 0; i < COUNT; i += 4) {
#if defined(__SSE__)
    __m128 rows[4];
    for (int64_t r = 0; r < 4; ++r) rows[r] = _mm_loadu_ps(x + (i + r) * stride);
    _MM_TRANSPOSE4_PS(rows[0], rows[1], rows[2], rows[3]);
    for (int64_t r = 0; r < 4; ++r) _mm_storeu_ps(out + r * COUNT + i, rows[r]);
#else
    for (int64_t r = 0; r < 4; ++r)
      for (int64_t d = 0; d < 4; ++d) out[d * COUNT + i + r] = x[(i + r) * stride + d];
#endif
  }
}

}  // namespace
