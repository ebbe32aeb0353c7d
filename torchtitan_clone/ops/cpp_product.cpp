// Products of matrices in fp32 on a CPU; cpp_library.py compiles this file, and linear.py calls it.
//
// The loops of GotoBLAS (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008): a block of b
// and one of a are packed, and a tile of c is summed in registers. Bits of a result depend on neither threads nor on
// other rows and columns.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

namespace {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16, ROWS = 14;
#elif defined(__AVX2__)
constexpr int64_t LANES = 8, ROWS = 6;
#else
constexpr int64_t LANES = 4, ROWS = 6;
#endif
constexpr int64_t COLUMNS = 2 * LANES;  // of a tile of c, whose ROWS x COLUMNS sums fit into registers
constexpr int64_t DEPTH = 512, HEIGHT = 96, WIDTH = 1024;  // of blocks, which stay in the caches
constexpr int64_t SHARED = 1 << 21;                        // products of so many terms are worth several threads

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(alignof(float)), may_alias));

struct Sizes {
  int64_t rows, columns, depth, a_row, a_column, b_row, b_column;  // strides of a [rows, depth] and b [depth, columns]
};

int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// Writes x [depth, width] as [depth, LIMIT], with zeros after the last column.
template <int64_t LIMIT>
void pack_panel(const float* x, int64_t x_row, int64_t x_column, int64_t depth, int64_t width, float* panel) {
  if (width == LIMIT && x_column == 1) {
    for (int64_t d = 0; d < depth; ++d) std::memcpy(panel + d * LIMIT, x + d * x_row, LIMIT * sizeof(float));
  } else if (width == LIMIT) {
    for (int64_t d = 0; d < depth; ++d)
      for (int64_t i = 0; i < LIMIT; ++i) panel[d * LIMIT + i] = x[d * x_row + i * x_column];
  } else {
    for (int64_t d = 0; d < depth; ++d)
      for (int64_t i = 0; i < LIMIT; ++i) panel[d * LIMIT + i] = i < width ? x[d * x_row + i * x_column] : 0.0f;
  }
}

// Adds the product of two panels to a tile of c, or writes it there. It is summed first: a sum of blocks has few roundings.
void multiply_panels(int64_t depth, const float* a, const float* b, float* c, int64_t c_row, int64_t rows,
                     int64_t columns, bool adds) {
  for (int64_t r = 0; r < rows; ++r) __builtin_prefetch(c + r * c_row, 1);
  Vector sums[ROWS][2] = {};
  for (int64_t d = 0; d < depth; ++d) {
    const Vector left = *reinterpret_cast<const Vector*>(b + d * COLUMNS);
    const Vector right = *reinterpret_cast<const Vector*>(b + d * COLUMNS + LANES);
#pragma GCC unroll 16
    for (int64_t r = 0; r < ROWS; ++r) {
      sums[r][0] += a[d * ROWS + r] * left;
      sums[r][1] += a[d * ROWS + r] * right;
    }
  }
  if (rows == ROWS && columns == COLUMNS) {
#pragma GCC unroll 16
    for (int64_t r = 0; r < ROWS; ++r)
      for (int64_t v = 0; v < 2; ++v) {
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

// c = a b, where c [rows, columns] is contiguous and depth is not 0.
extern "C" void multiply_matrices(const float* a, const float* b, float* c, const Sizes* sizes) {
  const auto [rows, columns, depth, a_row, a_column, b_row, b_column] = *sizes;
  const int64_t deepest = blocks_of(depth, blocks_of(depth, DEPTH));
  const int64_t widest = std::min(WIDTH, blocks_of(columns, COLUMNS) * COLUMNS);
  const std::unique_ptr<float[]> b_panels(new float[deepest * widest]);
#pragma omp parallel if (rows * columns * depth >= SHARED)
  {
    const int64_t threads = omp_get_num_threads();
    const int64_t count = blocks_of(blocks_of(rows, HEIGHT), threads) * threads;  // as many blocks for each thread
    const int64_t height = blocks_of(blocks_of(rows, count), ROWS) * ROWS;
    const std::unique_ptr<float[]> a_panels(new float[deepest * height]);
    for (int64_t i0 = 0; i0 < columns; i0 += WIDTH)
      for (int64_t d0 = 0; d0 < depth; d0 += deepest) {
        const int64_t width = std::min(WIDTH, columns - i0), deep = std::min(deepest, depth - d0);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < width; i += COLUMNS)
          pack_panel<COLUMNS>(b + d0 * b_row + (i0 + i) * b_column, b_row, b_column, deep,
                              std::min(COLUMNS, width - i), b_panels.get() + i * deep);
#pragma omp for schedule(dynamic)
        for (int64_t r0 = 0; r0 < rows; r0 += height) {
          const int64_t block = std::min(height, rows - r0);
          for (int64_t r = 0; r < block; r += ROWS)
            pack_panel<ROWS>(a + (r0 + r) * a_row + d0 * a_column, a_column, a_row, deep, std::min(ROWS, block - r),
                             a_panels.get() + r * deep);
          for (int64_t i = 0; i < width; i += COLUMNS)
            for (int64_t r = 0; r < block; r += ROWS)
              multiply_panels(deep, a_panels.get() + r * deep, b_panels.get() + i * deep,
                              c + (r0 + r) * columns + i0 + i, columns, std::min(ROWS, block - r),
                              std::min(COLUMNS, width - i), d0 > 0);
        }
      }
  }
}
