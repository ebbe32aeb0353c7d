// Products of matrices of bfloat16 by the tiles of AMX; library.py compiles this file, and products.py calls it.
//
// As in product.cpp factors are packed, here into tiles, and 32 x 32 results are summed in registers in fp32: b at
// once for all threads, as many columns as fit into the last cache, and a few rows of a by each thread. Bits of a result
// depend on neither threads nor on other rows and columns.

#include <omp.h>

#include "tiles.h"

namespace {

constexpr int64_t DEEP = 2048;              // terms of a sum in registers: factors of more leave the caches
constexpr int64_t HEIGHT = 8;               // of the rows of a that a thread packs, in blocks of results
constexpr int64_t PACKED = 1 << 22;         // values of b that are packed at a time
constexpr int64_t STEP = SIDE * DEPTH;      // values of 32 rows of a, or columns of b, of 32 terms
constexpr int64_t RESULTS = SIDE * SIDE;    // of a block
constexpr int64_t WORTH_THREADS = 1 << 21;  // terms of a product

struct Sizes {
  int64_t rows, columns, depth, a_row, a_column, b_row, b_column;  // strides of a [rows, depth] and b [depth, columns]
};

int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// Writes a [rows, depth] as [32, 32], with zeros where it has no values.
void pack_left(const Low* a, int64_t a_row, int64_t a_column, int64_t rows, int64_t depth, Low* out) {
  const bool is_whole = rows >= SIDE && depth >= DEPTH;
  if (is_whole && a_column == 1) {
    for (int64_t r = 0; r < SIDE; ++r) std::memcpy(out + r * DEPTH, a + r * a_row, DEPTH * sizeof(Low));
  } else if (is_whole && a_row == 1) {
    alignas(LINE_BYTES) Low tile[SIZE];
    for (int64_t r = 0; r < SIDE; r += TILE) {
      pack_tile(a + r, a_column, tile);
      transpose_pairs(tile, DEPTH, out + r * DEPTH, DEPTH);
    }
  } else {
    for (int64_t r = 0; r < SIDE; ++r)
      for (int64_t d = 0; d < DEPTH; ++d) out[r * DEPTH + d] = r < rows && d < depth ? a[r * a_row + d * a_column] : 0;
  }
}

// Writes b [depth, columns] as two tiles of [32, 16], with zeros where it has no values.
void pack_right(const Low* b, int64_t b_row, int64_t b_column, int64_t depth, int64_t columns, Low* tiles) {
  const bool is_whole = columns >= SIDE && depth >= DEPTH;
  for (int64_t j = 0; j < SIDE; j += TILE, b += TILE * b_column, tiles += SIZE) {
    if (is_whole && b_column == 1) {
      pack_tile(b, b_row, tiles);
    } else if (is_whole && b_row == 1) {
      transpose_pairs(b, b_column, tiles, DEPTH);
    } else {
      for (int64_t d = 0; d < DEPTH; ++d)
        for (int64_t i = 0; i < TILE; ++i)
          tiles[d / 2 * DEPTH + i * 2 + d % 2] = d < depth && j + i < columns ? b[d * b_row + i * b_column] : 0;
    }
  }
}

// Writes a block of results rounded to bfloat16.
void write(const float* block, Low* out, int64_t out_row, int64_t rows, int64_t columns, bool) {
  if (columns < SIDE) {
    alignas(LINE_BYTES) Low low[RESULTS];
    write(block, low, SIDE, rows, SIDE, false);
    for (int64_t r = 0; r < rows; ++r) std::copy_n(low + r * SIDE, columns, out + r * out_row);
    return;
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < SIDE; i += LANES) store_rounded(out + r * out_row + i, load(block + r * SIDE + i));
}

// Writes a block of results, or adds it.
void write(const float* block, float* out, int64_t out_row, int64_t rows, int64_t columns, bool adds) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < columns; ++i) {
      float& place = out[r * out_row + i];
      place = adds ? place + block[r * SIDE + i] : block[r * SIDE + i];
    }
}

template <class Out>
void multiply_matrices(const Low* a, const Low* b, Out* c, const Sizes& size, bool adds) {
  const int64_t rows = size.rows, columns = size.columns, depth = size.depth, steps = blocks_of(depth, DEPTH);
  const int64_t deepest = blocks_of(steps, blocks_of(depth, DEEP));  // of a sum in registers, in steps
  const int64_t widest = std::max<int64_t>(1, std::min(blocks_of(columns, SIDE), PACKED / (steps * STEP)));  // in panels
  const Memory<Low> b_tiles = memory<Low>(widest * steps * STEP);
  [[maybe_unused]] const bool is_large = rows * columns * depth >= WORTH_THREADS;
#pragma omp parallel if (is_large)
  {
    [[maybe_unused]] const Tiles tiles;
    // As many blocks of rows for each thread, whose heights differ by 32 rows at most.
    const int64_t threads = omp_get_num_threads(), all = blocks_of(rows, SIDE);
    const int64_t count = blocks_of(blocks_of(all, HEIGHT), threads) * threads, height = blocks_of(all, count);
    const Memory<Low> a_tiles = memory<Low>(height * deepest * STEP);
    const Memory<float> sums = memory<float>((deepest < steps ? height * widest : 1) * RESULTS);
    for (int64_t i0 = 0; i0 < columns; i0 += widest * SIDE) {
      const int64_t panels = std::min(widest, blocks_of(columns - i0, SIDE));
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < panels; ++i)
        for (int64_t d = 0; d < steps; ++d)
          pack_right(b + d * DEPTH * size.b_row + (i0 + i * SIDE) * size.b_column, size.b_row, size.b_column,
                     depth - d * DEPTH, columns - i0 - i * SIDE, b_tiles.get() + (i * steps + d) * STEP);
#pragma omp for schedule(dynamic)
      for (int64_t k = 0; k < count; ++k) {
        const int64_t first = k * all / count, blocks = (k + 1) * all / count - first;
        for (int64_t d0 = 0; d0 < steps; d0 += deepest) {
          const int64_t deep = std::min(deepest, steps - d0);
          for (int64_t r = 0; r < blocks; ++r)
            for (int64_t d = 0; d < deep; ++d)
              pack_left(a + (first + r) * SIDE * size.a_row + (d0 + d) * DEPTH * size.a_column, size.a_row, size.a_column,
                        rows - (first + r) * SIDE, depth - (d0 + d) * DEPTH, a_tiles.get() + (r * deep + d) * STEP);
          for (int64_t i = 0; i < panels; ++i)
            for (int64_t r = 0; r < blocks; ++r) {
              float* block = sums.get() + (deepest < steps ? r * panels + i : 0) * RESULTS;
              (d0 > 0 ? multiply<true> : multiply<false>)(deep, a_tiles.get() + r * deep * STEP, DEPTH, STEP,
                                                         b_tiles.get() + (i * steps + d0) * STEP, SIZE, STEP, block, SIDE);
              if (d0 + deep < steps) continue;
              const int64_t row = (first + r) * SIDE, column = i0 + i * SIDE;
              write(block, c + row * columns + column, columns, std::min(SIDE, rows - row),
                    std::min(SIDE, columns - column), adds);
            }
        }
      }
    }
  }
}

}  // namespace

// c = a b, where c [rows, columns] is contiguous and depth is not 0; or c += a b in fp32.
extern "C" void multiply_to_bfloat16(const Low* a, const Low* b, Low* c, const Sizes* sizes) {
  multiply_matrices(a, b, c, *sizes, false);
}

extern "C" void multiply_to_float(const Low* a, const Low* b, float* c, const Sizes* sizes, bool adds) {
  multiply_matrices(a, b, c, *sizes, adds);
}
