// Vectors and memory of the C++ of this package.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

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

}  // namespace
