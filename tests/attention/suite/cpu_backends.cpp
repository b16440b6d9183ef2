#include "tests/attention/suite/backend.hpp"

namespace annulus::test {
namespace {

const std::vector<DType> kAll{DType::float32, DType::bfloat16, DType::float16};

// Every remainder of registers and tiles, by dimensions, rows, columns and heads of a group.
std::vector<AttentionShape> shapes_of_native() {
  std::vector<AttentionShape> shapes{{0, 4, 4, 2, 2, 5, 3},
                                     {1, 19, 70, 7, 1, 32, 16},
                                     {1, 19, 70, 40, 1, 32, 16},
                                     {1, 19, 70, 300, 1, 32, 16},
                                     {1, 8, 30000, 1, 1, 128, 128}};
  for (const std::int64_t dim : {1, 3, 31, 32, 33, 64, 80, 128, 200}) {
    for (const std::int64_t value_dim : {dim, std::int64_t{1}, std::int64_t{48}}) {
      shapes.push_back({1, 33, 65, 2, 1, dim, value_dim});
    }
  }
  for (const std::int64_t rows : {0, 1, 15, 16, 17, 33, 257}) {
    for (const std::int64_t columns : {0, 1, 16, 31, 32, 33, 511, 513}) {
      shapes.push_back({1, rows, columns, 3, 3, 32, 32});
    }
  }
  return shapes;
}

}  // namespace

std::vector<Backend> backends() {
  return {{.name = "native",
           .dtypes = kAll,
           .dims = {{16, 8}},
           .rows = 171,
           .columns = 1093,
           .shapes = shapes_of_native(),
           .confines = kAll,
           .gradient_rows = 277,
           .gradient_columns = 531},
          {.name = "vanilla",
           .dtypes = kAll,
           .dims = {{4, 4}, {8, 5}},
           .rows = 17,
           .columns = 23,
           .shapes = {{1, 1, 1, 1, 1, 1, 1}, {3, 5, 70, 6, 3, 33, 2}},
           .confines = kAll,
           .skips_masks = false,
           .gradient_rows = 17,
           .gradient_columns = 23}};
}

}  // namespace annulus::test
