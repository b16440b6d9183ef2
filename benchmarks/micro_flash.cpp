// The flash kernel beside cuDNN on one GPU, bfloat16: rounds alternate between the two and rest in
// between, so that the ratios hold for one board at one temperature. Also measures the cost of
// features at equal visible work, a few rows against long caches, block masks beside cuDNN without
// a mask, float32 and its gradients beside the plain kernel, the hops of a ring in one launch, the
// time to make tile lists, and other gradients by themselves. Prints tables, and writes JSON to
// FILE.json:
//
//     annulus_micro_flash [warm]
//     [dense|plain|backward|masks|wide|modifiers|wide_modifiers|features|positions|
//                          decode|blocks|float32|float32_backward|hops|lists ...] [FILE.json]
//
// With `warm`, each case is measured once, after 0.4 s of the same calls.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/registry.hpp>
#include <annulus/attention/visible_tiles.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>
#include <annulus/partition/sequence_layout.hpp>

#include "flash/lists/device_lists.hpp"
#include "micro_flash_bench.hpp"

namespace annulus {
namespace {

void beside_cudnn(Bench& bench) {
  for (const auto& [heads, kv_heads] : {std::pair{32, 8}, std::pair{32, 32}}) {
    for (const std::int64_t length : {4096, 16384, 32768}) {
      for (const bool causal : {false, true}) {
        bench.measure({make_case(fmt::format("D=128 {}/{} {} {}", heads, kv_heads, length,
                                             causal ? "causal" : "full"),
                                 {1, length, length, heads, kv_heads, 128, 128}, causal)},
                      "sdpa");
      }
    }
  }
  for (const auto& [heads, dim, value_dim] :
       {std::tuple{32, 64, 64}, std::tuple{16, 256, 256}, std::tuple{16, 192, 128}}) {
    for (const bool causal : {false, true}) {
      bench.measure({make_case(fmt::format("D={} Dv={} {}/{} 16384 {}", dim, value_dim, heads,
                                           heads, causal ? "causal" : "full"),
                               {1, 16384, 16384, heads, heads, dim, value_dim}, causal)},
                    "sdpa");
    }
  }
}

struct BackwardShape {
  std::int64_t heads, kv_heads, dim, value_dim, length;
};
AttentionShape shape_of(const BackwardShape& s) {
  return {1, s.length, s.length, s.heads, s.kv_heads, s.dim, s.value_dim};
}

// Gradients under masks that are not one band, beside gradients under a causal mask.
void backward_masks(Bench& bench, const BackwardShape& s) {
  const std::int64_t length = s.length;
  Cases cases{fmt::format("backward masks D={}: ", s.dim), shape_of(s)};
  const auto add = [&](const char* name) -> Mask& { return cases.add_mask(name); };
  add("causal");
  Case& fewer = cases.add("causal 4096, as many pairs as 16 documents of 1024");
  fewer.problem.shape.query_length = fewer.problem.shape.kv_length = 4096;
  fewer.rows = fewer.columns = PositionRanges::all(4096);
  const std::vector<std::int32_t> even = documents(length, 16, true);
  add("16 documents of 1024").set_segments(1, even, even);
  const std::vector<std::int32_t> few = documents(length, 16, false);
  add("16 documents").set_segments(1, few, few);
  if (s.dim <= 128) {
    cases.all.push_back(cases.all.back());
    cases.all.back().name += ", same bits";
    cases.all.back().repeats_bits = true;
  }
  add("window 4096").set_window(4096, -1);
  Mask& sinks = add("sink tokens 64, window 4096");
  sinks.set_window(4096, -1);
  sinks.set_sink_tokens(64);
  add("prefix 4096").set_prefix(4096);
  add("chunks of 4096").set_chunk(4096);
  cases.causal = false;
  add("full");
  for (const double density : {0.11, 0.26}) {
    add(density < 0.2 ? "blocks, density 0.11" : "blocks, density 0.26")
        .set_block_mask(BlockMask::random(length, length, s.heads, density, 3));
  }
  bench.measure_backward(cases.all);
}

// Gradients with modifiers of the weights, beside plain ones.
void backward_modifiers(Bench& bench, std::int64_t dim, std::int64_t value_dim) {
  const std::int64_t keys = 4096;
  for (const bool causal : {false, true}) {
    Cases cases{fmt::format("backward modifiers: D={} {}, ", dim, causal ? "causal" : "full"),
                {1, keys, keys, 32, 8, dim, value_dim},
                causal};
    cases.add("plain");
    cases.add("dropout").problem.dropout.emplace(0.1, 1);
    Case& shifted = cases.add("dropout, keys from 8 on");
    shifted.problem.dropout.emplace(0.1, 1);
    shifted.problem.shape.kv_length += 8;
    shifted.columns = PositionRanges({PositionRange{GlobalPosition(8), keys}});
    for (const std::int64_t heads : {32, 1}) {
      const std::string name = heads == 1 ? "bias of all heads" : "bias of a head";
      cases.add(name).problem.bias = Extents{1, heads, keys, keys};
      cases.add(name + ", and its gradient").problem.bias = Extents{1, heads, keys, keys};
      cases.all.back().wants_bias = true;
    }
    cases.add("dense mask").problem.dense_mask = Extents{1, 1, keys, keys};
    bench.measure_backward(cases.all);
  }
}

void modifiers(Bench& bench) {
  for (const std::int64_t dim : {128, 64}) backward_modifiers(bench, dim, dim);
}

void modifiers_of_wide_heads(Bench& bench) {
  backward_modifiers(bench, 256, 256);
  backward_modifiers(bench, 192, 128);
}

Case plain_case(const BackwardShape& s, bool causal, std::int64_t window = -1) {
  const std::string mask = window >= 0 ? fmt::format("window {}", window)
                           : causal    ? "causal"
                                       : "full";
  Case one = make_case(fmt::format("backward D={} Dv={} {}/{} {} {}", s.dim, s.value_dim, s.heads,
                                   s.kv_heads, s.length, mask),
                       shape_of(s), causal);
  if (window >= 0) one.problem.mask.set_window(window, -1);
  return one;
}

// Times a plain pass, one with a soft cap, and one that repeats its bits, as wide heads always do.
void measure_plain(Bench& bench, const BackwardShape& s, bool causal, std::int64_t window = -1) {
  std::vector<Case> cases(3, plain_case(s, causal, window));
  cases[1].name += ", soft cap 50";
  cases[1].problem.soft_cap = 50;
  cases[2].name += ", same bits";
  cases[2].repeats_bits = true;
  if (s.dim > 128) cases.pop_back();
  bench.measure_backward(cases);
}

constexpr BackwardShape kBackwardShapes[] = {{32, 8, 128, 128, 4096},   {32, 32, 128, 128, 4096},
                                             {32, 32, 128, 128, 16384}, {32, 32, 128, 128, 32768},
                                             {32, 32, 64, 64, 4096},    {32, 32, 64, 64, 16384},
                                             {32, 32, 64, 64, 32768},   {32, 32, 96, 96, 16384}};

// Plain gradients alone.
void backward_plain(Bench& bench) {
  for (const BackwardShape& s : kBackwardShapes) {
    for (const bool causal : {false, true}) bench.measure_backward({plain_case(s, causal)});
  }
}

void backward(Bench& bench) {
  for (const BackwardShape& s : kBackwardShapes) {
    for (const bool causal : {false, true}) measure_plain(bench, s, causal);
  }
  measure_plain(bench, {32, 8, 128, 128, 32768}, true, 4096);
}

void backward_under_masks(Bench& bench) {
  backward_masks(bench, {32, 8, 128, 128, 16384});
  backward_masks(bench, {32, 8, 64, 64, 16384});
}

void backward_of_wide_heads(Bench& bench) {
  for (const BackwardShape& s :
       {BackwardShape{16, 16, 256, 256, 16384}, BackwardShape{16, 16, 192, 128, 16384}}) {
    for (const bool causal : {false, true}) measure_plain(bench, s, causal);
    measure_plain(bench, s, true, 4096);
    backward_masks(bench, s);
  }
}

void features(Bench& bench) {
  const std::int64_t length = 16384;
  Cases cases{"features: ", {1, length, length, 32, 8, 128, 128}};
  const auto add = [&](const std::string& name) -> Case& { return cases.add(name); };
  add("causal");
  add("window 4096").problem.mask.set_window(4096, -1);
  add("window 1024").problem.mask.set_window(1024, -1);
  const std::vector<std::int32_t> even = documents(length, 16, true);
  add("16 documents of 1024").problem.mask.set_segments(1, even, even);
  const std::vector<std::int32_t> few = documents(length, 4, false);
  add("4 documents").problem.mask.set_segments(1, few, few);
  const std::vector<std::int32_t> many = documents(length, 32, false);
  add("32 documents").problem.mask.set_segments(1, many, many);
  Case& striped = add("striped positions");
  striped.problem.shape.query_length = striped.problem.shape.kv_length = 4 * length;
  striped.rows = PositionRanges({{GlobalPosition(1), length, 4}});
  striped.columns = PositionRanges({{GlobalPosition(0), length, 4}});
  add("shifted by 100").problem.mask.set_offset(100);
  for (const double cap : {30.0, 50.0, 200.0, 1e10}) {
    add(fmt::format("soft cap {}", cap)).problem.soft_cap = cap;
  }
  add("dropout").problem.dropout.emplace(0.1, 1);
  for (const std::int64_t left : {4096, 4095}) {  // tiles begin at even and at odd positions
    Case& dropout = add(fmt::format("dropout, window {}", left));
    dropout.problem.mask.set_window(left, -1);
    dropout.problem.dropout.emplace(0.1, 1);
  }
  add("float32 output").output = DType::float32;
  Case& state = add("state in and out");
  state.output = DType::float32;
  state.continues_state = true;
  bench.measure(cases.all, nullptr);
}

// Mask parts that one band does not describe, beside plain causal masks of as many pairs.
void positions(Bench& bench) {
  for (const std::int64_t length : {16384, 32768}) {
    Cases cases{"positions: ", {1, length, length, 32, 8, 128, 128}};
    const auto add = [&](const char* name) -> Mask& {
      return cases.add_mask(fmt::format("{} of {}", name, length));
    };
    add("causal");
    add("window 4096").set_window(4096, -1);
    Mask& chunk = add("chunk 4096");
    chunk.set_chunk(4096);
    add("prefix 8192").set_prefix(8192);
    Mask& sinks = add("sink tokens 64, window 4096");
    sinks.set_sink_tokens(64);
    sinks.set_window(4096, -1);
    add("offset per batch").set_offsets({100});
    std::vector<std::int32_t> packing;
    for (std::int64_t end = 0; end <= length; end += 2048) {
      packing.push_back(static_cast<std::int32_t>(end));
    }
    add("packings of 2048").set_packings(1, packing, packing, DocumentAlignment::bottom_right);
    const std::vector<Measured> results = bench.measure(cases.all, nullptr);
    for (const Measured& one : results) {
      fmt::print("{:36} {:.3f} of the rate of causal\n", one.name,
                 one.teraflops / results.front().teraflops);
    }
    std::vector<Case> chunks{make_case(fmt::format("positions: {} causal of 4096", length / 4096),
                                       {length / 4096, 4096, 4096, 32, 8, 128, 128}, true)};
    bench.measure(chunks, nullptr);
  }
}

// A few new rows of each sequence against its cache: sequences of equal and of unequal lengths,
// lengths that kernels find on the device, and rows that see each other's keys in part.
void decode(Bench& bench) {
  constexpr std::int64_t kBatch = 16;
  constexpr std::int64_t kLonger = 131072;
  constexpr std::int64_t kShorter = 5000;
  const AttentionShape batched{kBatch, 1, kLonger, 64, 8, 128, 128};
  Case unequal = make_case("decode: 16 of 5,000 to 131,072", batched, false);
  std::vector<std::int32_t> lengths;
  for (std::int64_t b = 0; b < kBatch; ++b) {
    lengths.push_back(
        static_cast<std::int32_t>(kShorter + (kLonger - kShorter) * b / (kBatch - 1)));
  }
  unequal.problem.mask.set_kv_lengths(lengths);
  Case called = unequal;
  called.name += ", of a call";
  called.problem.call_arguments.lengths = true;
  bench.measure({make_case("decode: 16 of 131,072", batched, false), unequal, called}, nullptr);

  std::vector<Case> rows;
  for (const std::int64_t count : {1, 4, 8}) {
    const std::int64_t keys = 1 << 20;
    rows.push_back(make_case(fmt::format("decode: {} rows, 1M keys", count),
                             {1, count, keys, 64, 8, 128, 128}, true));
    rows.back().problem.mask.set_offset(keys - count);
  }
  bench.measure(rows, nullptr);
}

// The part of all key tiles that is visited.
double tile_density(const Case& one) {
  const AttentionShape& s = one.problem.shape;
  const std::vector<std::int64_t> visited =
      visible_tiles(one.problem, 0, s.batch, s.query_length, kBlock);
  const auto tiles = [](std::int64_t tokens) { return (tokens + kBlock - 1) / kBlock; };
  const std::int64_t heads = one.problem.mask.depends_on_head() ? s.heads : 1;
  return static_cast<double>(visited.front()) /
         static_cast<double>(s.batch * heads * tiles(s.query_length) * tiles(s.kv_length));
}

void blocks(Bench& bench) {
  const std::int64_t length = 16384;
  const AttentionShape shape{1, length, length, 32, 8, 128, 128};
  Cases cases{"blocks: ", shape, false};
  const auto add = [&](const std::string& name) -> Mask& { return cases.add_mask(name); };
  add("dense");
  for (const double density : {0.06, 0.11, 0.26, 0.51}) {
    add(fmt::format("random {}", density))
        .set_block_mask(BlockMask::random(length, length, shape.heads, density, 1));
  }
  for (const std::int64_t width : {1024, 4096}) {
    Mask& mask = add(fmt::format("window {} causal", width));
    mask.set_causal(true);
    mask.set_window(width, -1);
    mask.set_block_mask(BlockMask::covering(mask, 1, length, length));
  }
  // Ends of documents at edges of tiles, and between them.
  for (const std::int64_t shift : {0, 50}) {
    std::vector<std::int32_t> cu_seqlens{0};
    for (std::int64_t end = 1024 - shift; end < length; end += 1024) {
      cu_seqlens.push_back(static_cast<std::int32_t>(end));
    }
    cu_seqlens.push_back(static_cast<std::int32_t>(length));
    const std::vector<std::int32_t> ids = segments_from_cu_seqlens(cu_seqlens, length);
    Mask& mask = add(shift == 0 ? "16 documents of 1024" : "documents that cut tiles");
    mask.set_segments(1, ids, ids);
    mask.set_block_mask(BlockMask::documents(cu_seqlens));
  }
  const std::vector<Measured> results = bench.measure(cases.all, "sdpa");
  const auto dense = std::find_if(results.begin(), results.end(),
                                  [](const Measured& one) { return one.kernel == "sdpa"; });
  if (dense == results.end()) return;
  fmt::print("\n{:36} {:>8} {:>9} {:>8} {:>7}\n", "time beside dense cuDNN", "of tiles", "of pairs",
             "time", "bound");
  for (const Measured& one : results) {
    if (one.kernel != "blocksparse") continue;
    const auto of = std::find_if(cases.all.begin(), cases.all.end(),
                                 [&](const Case& c) { return c.name == one.name; });
    const double tiles = tile_density(*of);
    const double ratio = one.milliseconds / dense->milliseconds;
    const double bound = 1.15 * tiles + 0.01;
    fmt::print("{:36} {:8.4f} {:9.4f} {:8.4f} {:7.4f} {}\n", one.name, tiles,
               visible_pairs(*of) / visible_pairs(cases.all.front()), ratio, bound,
               ratio <= bound ? "ok" : "over");
  }
}

// Two operations for each of the 128 float32 lanes of a multiprocessor, at the highest clock.
double float32_peak() {
  int multiprocessors = 0;
  int kilohertz = 0;
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0),
             "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, 0), "cudaDeviceGetAttribute");
  return 2.0 * 128 * multiprocessors * kilohertz * 1e-9;
}

Case float32_case(std::int64_t length, std::int64_t dim, bool causal) {
  Case one =
      make_case(fmt::format("float32 D={} 16/16 {} {}", dim, length, causal ? "causal" : "full"),
                {1, length, length, 16, 16, dim, dim}, causal);
  one.problem.dtype = one.output = DType::float32;
  return one;
}

void float32(Bench& bench) {
  const auto& make = float32_case;
  std::vector<Case> cases;
  for (const std::int64_t dim : {64, 128}) {
    for (const bool causal : {false, true}) cases.push_back(make(8192, dim, causal));
  }
  const double peak = float32_peak();
  for (const Measured& one : bench.measure(cases, nullptr)) {
    fmt::print("{:36} {:.0f} % of {:.1f} TFLOP/s\n", one.name, 100 * one.teraflops / peak, peak);
  }
  // The plain kernel takes too long for more.
  const std::vector<Measured> small =
      bench.measure({make(2048, 64, false), make(2048, 128, false)}, "native");
  for (std::size_t i = 0; i < small.size(); i += 2) {
    fmt::print("{:36} {:.0f} times the plain kernel\n", small[i].name,
               small[i].milliseconds / small[i + 1].milliseconds);
  }
}

// Float32 gradients beside the forward pass and the plain kernel's.
void float32_backward(Bench& bench) {
  std::vector<Case> forward, cases, small;
  for (const std::int64_t dim : {64, 128}) {
    for (const bool causal : {false, true}) {
      forward.push_back(float32_case(8192, dim, causal));
      cases.push_back(forward.back());
    }
    cases.push_back(float32_case(8192, dim, true));
    cases.back().name += ", soft cap 50";
    cases.back().problem.soft_cap = 50;
    cases.push_back(float32_case(8192, dim, true));
    cases.back().name += ", 8 documents";
    const std::vector<std::int32_t> ids = documents(8192, 8, true);
    cases.back().problem.mask.set_segments(1, ids, ids);
    small.push_back(float32_case(1024, dim, false));
    small.push_back(small.back());
    small.back().kernel = "native";
  }
  bench.measure(forward, nullptr);
  for (Case& one : cases) one.name = "backward " + one.name;
  bench.measure_backward(cases);
  const std::vector<Measured> times = bench.measure_backward(small);
  for (std::size_t i = 0; i < times.size(); i += 2) {
    fmt::print("backward {:36} {:.0f} times the plain kernel\n", times[i].name,
               times[i + 1].milliseconds / times[i].milliseconds);
  }
}

// Times how much a ring of two ranks (zigzag, causal) could gain by one launch for all hops, if all
// blocks had already arrived. One launch takes a rank's rows with all keys. It is compared with
// two: one for the rank's own block, and one for the other rank's with the rows that see it.
void hops(Bench& bench) {
  for (const auto& [length, heads, kv_heads] :
       {std::tuple{8192, 64, 8}, std::tuple{8192, 32, 32}, std::tuple{32768, 64, 8}}) {
    const SequenceLayout layout(LayoutKind::zigzag, length, 2);
    const PositionRanges own = layout.positions(0);
    Cases cases{fmt::format("hops: {}/{} {} ", heads, kv_heads, length),
                {1, length, length, heads, kv_heads, 128, 128}};
    cases.add("at once").rows = own;
    Case& first = cases.add("own block");
    first.rows = first.columns = own;
    first.output = DType::float32;
    Case& second = cases.add("other block");
    second.rows = PositionRanges({own.ranges().back()});
    second.columns = layout.positions(1);
    second.output = DType::float32;
    second.continues_state = true;
    const std::vector<Measured> times = bench.measure(cases.all, nullptr);
    fmt::print("{:36} {:.3f} of the time of separate launches\n", times[0].name,
               times[0].milliseconds / (times[1].milliseconds + times[2].milliseconds));
  }
}

// The median host time of some calls, in milliseconds.
double host_time(const std::function<void()>& call) {
  std::vector<double> times(9);
  call();
  for (double& time : times) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    time =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }
  return median(std::move(times));
}

// The lists for 16k tokens and 32 heads: the GPU's kernels alone; and plan, copies and kernels
// together, as when a call is prepared.
void lists(Bench& bench) {
  const std::int64_t length = 16384;
  const AttentionShape shape{1, length, length, 32, 8, 128, 128};
  Cases cases{"lists: ", shape};
  const auto add = [&](const std::string& name) -> Mask& { return cases.add_mask(name); };
  add("causal");
  add("window 1024").set_window(1024, -1);
  const std::vector<std::int32_t> ids = documents(length, 16, false);
  add("16 documents").set_segments(1, ids, ids);
  const std::vector<std::int32_t> many = documents(length, 2000, false);
  add("2000 documents").set_segments(1, many, many);
  cases.causal = false;
  for (const double density : {0.06, 0.51}) {
    add(fmt::format("random {}", density))
        .set_block_mask(BlockMask::random(length, length, shape.heads, density, 1));
  }
  MemoryPool& memory = bench.device().memory();
  for (const Case& one : cases.all) {
    const auto plan = [&] {
      return flash::ListPlan(one.problem.mask, {0, 1, 0, shape.heads}, one.rows, one.columns,
                             kBlock, kBlock);
    };
    const flash::DeviceLists made(plan(), memory);
    const auto make = [&] { made.make(bench.stream()); };
    (void)bench.time(make, 3);
    bench.add(one.name, "kernels", bench.time(make, 31));
    bench.add(one.name, "prepared", host_time([&] {
                const flash::DeviceLists lists(plan(), memory);
                lists.make(bench.stream());
                check_cuda(cudaStreamSynchronize(bench.stream()), "cudaStreamSynchronize");
              }));
  }
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  try {
    annulus::Bench bench;
    const annulus::Case probe = annulus::make_case("probe", {1, 128, 128, 1, 1, 128, 128}, false);
    if (const annulus::Capability can = bench.can("flash_attn2", probe); !can) {
      fmt::print(stderr, "annulus_micro_flash: {}\n", can.reason());
      return 2;
    }
    std::vector<std::string> words(argv + 1, argv + argc);
    if (std::erase(words, "warm") > 0) bench.set_warm();
    std::vector<void (*)(annulus::Bench&)> asked, all;
    for (const auto& [name, measure] :
         {std::pair{"dense", &annulus::beside_cudnn}, std::pair{"plain", &annulus::backward_plain},
          std::pair{"backward", &annulus::backward},
          std::pair{"masks", &annulus::backward_under_masks},
          std::pair{"wide", &annulus::backward_of_wide_heads},
          std::pair{"modifiers", &annulus::modifiers},
          std::pair{"wide_modifiers", &annulus::modifiers_of_wide_heads},
          std::pair{"features", &annulus::features}, std::pair{"positions", &annulus::positions},
          std::pair{"decode", &annulus::decode}, std::pair{"blocks", &annulus::blocks},
          std::pair{"float32", &annulus::float32},
          std::pair{"float32_backward", &annulus::float32_backward},
          std::pair{"hops", &annulus::hops}, std::pair{"lists", &annulus::lists}}) {
      all.push_back(measure);
      if (std::erase(words, name) > 0) asked.push_back(measure);
    }
    for (const auto measure : asked.empty() ? all : asked) measure(bench);
    if (!words.empty()) bench.write(words.front().c_str());
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "annulus_micro_flash: {}\n", error.what());
    return 3;
  }
}
