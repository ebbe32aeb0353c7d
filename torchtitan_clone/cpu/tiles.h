// Products of matrices of bfloat16 by the tiles of AMX, with sums in fp32.
//
// A tile has 16 rows of 64 bytes: 16 x 16 floats, 16 x 32 bfloat16, or 16 pairs of rows of a factor on the right [32, 16],
// of which each pair of values of a column is together. Without AMX loops compute the same, for tests.

#pragma once

#include "vectors.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t TILE = 16;              // rows, and floats or pairs of a row
constexpr int64_t DEPTH = 2 * TILE;       // bfloat16 of a row
constexpr int64_t SIZE = TILE * DEPTH;    // bfloat16 of a tile
constexpr int64_t SIDE = 2 * TILE;        // of a block of results

typedef uint16_t Low;    // bfloat16
typedef uint32_t Bits __attribute__((vector_size(LANES * sizeof(uint32_t)), aligned(alignof(uint32_t)), may_alias));
typedef uint16_t Lows __attribute__((vector_size(LANES * sizeof(Low)), aligned(alignof(Low)), may_alias));

// Registers of a thread for eight tiles of 16 rows.
struct Tiles {
#ifdef __AMX_BF16__
  Tiles() {
    struct alignas(LINE_BYTES) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } setting;
    for (int i = 0; i < 8; ++i) setting.row_bytes[i] = LINE_BYTES, setting.rows[i] = TILE;
    asm volatile("" ::"r"(&setting) : "memory");  // GCC knows of the first 8 bytes only that they are read
    _tile_loadconfig(&setting);
  }
  ~Tiles() { _tile_release(); }
#endif
};

// c = a b, or c += a b: c [32, 32], a [32, 32 depth], of which the next row and the next 32 columns are a_row and a_depth
// bfloat16 away, and b in tiles, of which the next column and the next 32 rows are b_column and b_depth away.
template <bool ADD>
void multiply(int64_t depth, const Low* a, int64_t a_row, int64_t a_depth, const Low* b, int64_t b_column,
              int64_t b_depth, float* c, int64_t c_row) {
#ifdef __AMX_BF16__
  asm volatile("" ::: "memory");  // GCC does not know that tiles are read from memory
  const int64_t a_bytes = a_row * sizeof(Low), c_bytes = c_row * sizeof(float);
  float* lower = c + TILE * c_row;
  if (ADD) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + TILE, c_bytes);
    _tile_loadd(2, lower, c_bytes);
    _tile_loadd(3, lower + TILE, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t d = 0; d < depth; ++d, a += a_depth, b += b_depth) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(6, b, LINE_BYTES);
    _tile_loadd(7, b + b_column, LINE_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + TILE * a_row, a_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + TILE, c_bytes);
  _tile_stored(2, lower, c_bytes);
  _tile_stored(3, lower + TILE, c_bytes);
#else
  const auto wide = [](Low x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  };
  for (int64_t i = 0; i < SIDE; ++i)
    for (int64_t j = 0; j < SIDE; ++j) {
      float sum = ADD ? c[i * c_row + j] : 0.0f;
      for (int64_t k = 0; k < depth * DEPTH; ++k) {
        const Low* tile = b + k / DEPTH * b_depth + j / TILE * b_column;
        sum += wide(a[i * a_row + k / DEPTH * a_depth + k % DEPTH]) * wide(tile[k % DEPTH / 2 * DEPTH + j % TILE * 2 + k % 2]);
      }
      c[i * c_row + j] = sum;
    }
#endif
}

// Rounds to bfloat16, which are the upper halves of the results; the lower ones are of no use.
Bits rounded(Vector x) {
  const Bits bits = reinterpret_cast<const Bits&>(x);
  return bits + 0x7fff + (bits >> 16 & 1);
}

Bits load_bits(const Low* x) { return __builtin_convertvector(*reinterpret_cast<const Lows*>(x), Bits); }
Vector widened(const Low* x) {
  const Bits bits = load_bits(x) << 16;
  return reinterpret_cast<const Vector&>(bits);
}
void store_low(Low* x, Bits upper) { *reinterpret_cast<Lows*>(x) = __builtin_convertvector(upper >> 16, Lows); }

// Writes pairs of bfloat16 of which the first are the lower halves, and the second the upper halves.
void store_pairs(Low* x, Bits first, Bits second) { *reinterpret_cast<Bits*>(x) = first | second; }

// Writes the tile of x [32, 16] as factor on the right.
void pack_tile(const Low* x, int64_t x_row, Low* tile) {
  for (int64_t i = 0; i < TILE; ++i, x += 2 * x_row)
    for (int64_t j = 0; j < TILE; j += LANES)
      store_pairs(tile + i * DEPTH + 2 * j, load_bits(x + j), load_bits(x + x_row + j) << 16);
}

// Writes pairs of values x [16, 16] as x^T; rows are x_row and out_row bfloat16 apart.
void transpose_pairs(const Low* x, int64_t x_row, Low* out, int64_t out_row) {
  for (int64_t i = 0; i < TILE; i += 4)
    for (int64_t j = 0; j < TILE; j += 4) {
      const Low* from = x + i * x_row + 2 * j;
      Low* to = out + j * out_row + 2 * i;
#if defined(__SSE__)
      __m128 rows[4];
      for (int64_t r = 0; r < 4; ++r) rows[r] = _mm_loadu_ps(reinterpret_cast<const float*>(from + r * x_row));
      _MM_TRANSPOSE4_PS(rows[0], rows[1], rows[2], rows[3]);
      for (int64_t r = 0; r < 4; ++r) _mm_storeu_ps(reinterpret_cast<float*>(to + r * out_row), rows[r]);
#else
      for (int64_t r = 0; r < 4; ++r)
        for (int64_t s = 0; s < 4; ++s) std::memcpy(to + s * out_row + 2 * r, from + r * x_row + 2 * s, 2 * sizeof(Low));
#endif
    }
}

}  // namespace
