// Products of matrices in fp32 on a CPU; library.py compiles this file, and products.py calls it.
//
// The loops of GotoBLAS (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008): a block of b
// is packed, and a tile of c is summed in registers. Its few rows of a are read where they are, or packed if they are not
// contiguous. Bits of a result depend on neither threads nor on other rows and columns.

#include <omp.h>

#include "vectors.h"

namespace {

constexpr int64_t VECTORS = LANES == 16 ? 4 : 2;
constexpr int64_t ROWS = 6, COLUMNS = VECTORS * LANES;  // of a tile of c, whose sums fit into registers
constexpr int64_t DEPTH = 768, WIDTH = 768;       // of blocks, which stay in the caches
constexpr int64_t HEIGHT = LANES == 16 ? 12 : 6;  // of blocks, in tiles
constexpr int64_t FEW = 4;                        // columns of a that are packed at a time
constexpr int64_t AHEAD = 8;                      // rows of b and columns of a that are prefetched before they are packed
constexpr int64_t LINE = 16;                      // floats of a cache line
constexpr int64_t SHARED = 1 << 21;               // products of so many terms are worth several threads

struct Sizes {
  int64_t rows, columns, depth, a_row, a_column, b_row, b_column;  // strides of a [rows, depth] and b [depth, columns]
};

int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// Writes x [depth, width] as [depth, LIMIT], with zeros after the last column.
template <int64_t LIMIT>
void pack_panel(const float* x, int64_t x_row, int64_t x_column, int64_t depth, int64_t width, float* panel) {
  int64_t d = 0;
  if (width == LIMIT && x_column == 1) {
    for (; d < depth; ++d) {
      if (LIMIT == COLUMNS)
        for (int64_t i = 0; i < LIMIT; i += LINE) __builtin_prefetch(x + (d + AHEAD) * x_row + i);
      std::memcpy(panel + d * LIMIT, x + d * x_row, LIMIT * sizeof(float));
    }
  } else if (width == LIMIT && x_row == 1 && LIMIT == COLUMNS) {
    for (; d + 4 <= depth; d += 4) transpose_rows<COLUMNS>(x + d, x_column, panel + d * LIMIT);
  }
  for (; d < depth; ++d)
    for (int64_t i = 0; i < LIMIT; ++i) panel[d * LIMIT + i] = i < width ? x[d * x_row + i * x_column] : 0.0f;
}

// Adds the product of rows of a and a panel of b to a tile of c, or writes it there. It is summed first: a sum of blocks
// has few roundings.
void multiply_tile(int64_t depth, const float* a, int64_t a_row, int64_t a_column, const float* b, float* c,
                   int64_t c_row, int64_t rows, int64_t columns, bool adds) {
  for (int64_t r = 0; r < rows; ++r) __builtin_prefetch(c + r * c_row, 1);
  const float* places[ROWS];  // after the last row, sums of that row are not used
  for (int64_t r = 0; r < ROWS; ++r) places[r] = a + std::min(r, rows - 1) * a_row;
  Vector sums[ROWS][VECTORS] = {};
  for (int64_t d = 0; d < depth; ++d) {
    Vector terms[VECTORS];
    for (int64_t v = 0; v < VECTORS; ++v) terms[v] = *reinterpret_cast<const Vector*>(b + d * COLUMNS + v * LANES);
#pragma GCC unroll 8
    for (int64_t r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int64_t v = 0; v < VECTORS; ++v) sums[r][v] += places[r][d * a_column] * terms[v];
  }
  if (rows == ROWS && columns == COLUMNS) {
#pragma GCC unroll 8
    for (int64_t r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int64_t v = 0; v < VECTORS; ++v) {
        Vector& place = *reinterpret_cast<Vector*>(c + r * c_row + v * LANES);
        place = adds ? place + sums[r][v] : sums[r][v];
      }
    return;
  }
  float tile[ROWS][COLUMNS];
  std::memcpy(tile, sums, sizeof tile);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < columns; ++i) {
      float& place = c[r * c_row + i];
      place = adds ? place + tile[r][i] : tile[r][i];
    }
}

}  // namespace

// c = a b or c += a b, where c [rows, columns] is contiguous and depth is not 0. Clang takes no structured bindings in
// parallel regions.
extern "C" void multiply_matrices(const float* a, const float* b, float* c, const Sizes* sizes, bool adds) {
  const int64_t rows = sizes->rows, columns = sizes->columns, depth = sizes->depth;
  const int64_t a_row = sizes->a_row, a_column = sizes->a_column, b_row = sizes->b_row, b_column = sizes->b_column;
  const int64_t deepest = blocks_of(depth, blocks_of(depth, DEPTH));
  const int64_t widest = std::min(WIDTH, blocks_of(columns, COLUMNS) * COLUMNS);
  const std::unique_ptr<float[]> b_panels(new float[2 * deepest * widest]);  // a block, and the next one
#pragma omp parallel if (rows * columns * depth >= SHARED)
  {
    // As many blocks for each thread, whose heights differ by a tile at most.
    const int64_t threads = omp_get_num_threads(), tiles = blocks_of(rows, ROWS);
    const int64_t count = blocks_of(blocks_of(tiles, HEIGHT), threads) * threads;
    const std::unique_ptr<float[]> a_panels(a_column == 1 ? nullptr : new float[deepest * blocks_of(tiles, count) * ROWS]);
    float* panels = b_panels.get();
    for (int64_t i0 = 0; i0 < columns; i0 += WIDTH)
      for (int64_t d0 = 0; d0 < depth; d0 += deepest) {
        const int64_t width = std::min(WIDTH, columns - i0), deep = std::min(deepest, depth - d0);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < width; i += COLUMNS)
          pack_panel<COLUMNS>(b + d0 * b_row + (i0 + i) * b_column, b_row, b_column, deep,
                              std::min(COLUMNS, width - i), panels + i * deep);
#pragma omp for schedule(dynamic) nowait
        for (int64_t k = 0; k < count; ++k) {
          const int64_t start = k * tiles / count * ROWS, end = std::min(rows, (k + 1) * tiles / count * ROWS);
          const float* block = a + start * a_row + d0 * a_column;
          int64_t tile_step = ROWS * a_row, row_step = a_row, depth_step = a_column;
          if (a_column != 1) {  // a few of its columns for all tiles at a time, which lie in few cache lines
            for (int64_t d = 0; d < deep; d += FEW) {
              for (int64_t f = 0; f < FEW; ++f)
                for (int64_t r = start; r < end; r += LINE)
                  __builtin_prefetch(a + r * a_row + (d0 + d + f + AHEAD) * a_column);
              for (int64_t r = start; r < end; r += ROWS)
                pack_panel<ROWS>(a + r * a_row + (d0 + d) * a_column, a_column, a_row, std::min(FEW, deep - d),
                                 std::min(ROWS, end - r), a_panels.get() + (r - start) * deep + d * ROWS);
            }
            block = a_panels.get(), tile_step = ROWS * deep, row_step = 1, depth_step = ROWS;
          }
          for (int64_t i = 0; i < width; i += COLUMNS)
            for (int64_t r = start; r < end; r += ROWS)
              multiply_tile(deep, block + (r - start) / ROWS * tile_step, row_step, depth_step, panels + i * deep,
                            c + r * columns + i0 + i, columns, std::min(ROWS, end - r), std::min(COLUMNS, width - i),
                            adds || d0 > 0);
        }  // a thread that is done packs the next block, and waits there for the others
        panels = panels == b_panels.get() ? panels + deepest * widest : b_panels.get();
      }
  }
}
