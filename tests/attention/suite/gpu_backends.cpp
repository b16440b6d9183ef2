#include "tests/attention/suite/backend.hpp"

namespace annulus::test {
namespace {

constexpr DType kFloat32 = DType::float32;
const std::vector<DType> kAll{DType::bfloat16, DType::float16, kFloat32};
const std::vector<HeadDims> kTiles{{64, 64}, {128, 128}, {192, 128}, {256, 256}};

// Head dimensions that differ from the tiles', tiles that are cut short, and more work items than
// multiprocessors.
std::vector<AttentionShape> shapes_of_flash() {
  std::vector<AttentionShape> shapes{{3, 700, 700, 8, 2, 64, 64},
                                     {3, 700, 700, 9, 3, 64, 64},
                                     {2, 300, 300, 4, 4, 64, 64},
                                     {2, 300, 300, 8, 1, 64, 64}};
  for (const auto& [dim, value_dim] : std::vector<HeadDims>{
           {80, 80}, {96, 64}, {200, 136}, {64, 256}, {8, 40}, {160, 104}, {192, 128}}) {
    shapes.push_back({1, 200, 300, 2, 1, dim, value_dim});
  }
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const auto& [rows, columns] : {std::pair{1, 1},
                                        {1, 300},
                                        {300, 1},
                                        {64, 80},
                                        {63, 65},
                                        {127, 129},
                                        {128, 128},
                                        {193, 257},
                                        {384, 384}}) {
      shapes.push_back({2, rows, columns, 2, 2, dim, dim});
    }
  }
  return shapes;
}

}  // namespace

std::vector<Backend> backends() {
  return {{.name = "native",
           .on_gpu = true,
           .dtypes = kAll,
           .dims = {{16, 40}},
           .rows = 131,
           .columns = 293,
           .shapes = {{1, 1, 1, 1, 1, 1, 1},
                      {1, 5, 33, 8, 1, 3, 70},
                      {2, 64, 64, 3, 3, 128, 128},
                      {1, 7, 0, 2, 2, 8, 8},
                      {1, 2, 40, 2, 1, 2000, 1600}},
           .confines = kAll,
           .gradient_rows = 43,
           .gradient_columns = 120},
          {.name = "flash_attn2",
           .on_gpu = true,
           .dtypes = kAll,
           .dims = kTiles,
           .rows = 203,
           .columns = 331,
           .shapes = shapes_of_flash(),
           .blocks = Blocks::never,
           .confines = {kFloat32},
           .largest_logit = 1e6},
          {.name = "blocksparse",
           .on_gpu = true,
           .dtypes = kAll,
           .dims = kTiles,
           .rows = 203,
           .columns = 331,
           .shapes = {{1, 1280, 1280, 8, 2, 128, 128}, {2, 390, 520, 4, 2, 96, 64}},
           .blocks = Blocks::always,
           .confines = {kFloat32},
           .largest_logit = 1e6}};
}

}  // namespace annulus::test
