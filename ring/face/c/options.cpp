#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <annulus/core/error.hpp>
#include <annulus/ring/sharded_operands.hpp>

#include "face/c/handles.hpp"

namespace annulus::c {
namespace {

using Options = AttentionOptions&;
using Text = const std::string&;

template <class Value>
struct Named {
  std::string_view name;
  void (*set)(Options options, Value value);
};

Reproducible reproducible_of(const std::string& name) {
  for (const Reproducible one : {Reproducible::no, Reproducible::run, Reproducible::world}) {
    if (name_of(one) == name) return one;
  }
  throw ArgumentError("reproducible", name, "no, run or world");
}

// Sinks of each head, which the calls bring.
Sinks sinks_to_come(const AttentionShape& shape, std::int64_t per_head) {
  const std::int64_t count = std::max<std::int64_t>(0, shape.heads * per_head);
  return {{shape.heads, per_head}, std::vector<float>(static_cast<std::size_t>(count))};
}

const Named<Text> kTexts[] = {
    {"query_spec", [](Options o, Text v) { o.query_spec = PartitionSpec::parse(v, "query spec"); }},
    {"kv_spec", [](Options o, Text v) { o.kv_spec = PartitionSpec::parse(v, "kv spec"); }},
    {"offset",
     [](Options o, Text v) {
       if (v != "bottom-right") throw ArgumentError("offset", v, "a number or bottom-right");
       o.mask.set_offset(o.shape.kv_length - o.shape.query_length);
     }},
    {"mode", [](Options o, Text v) { o.mode = parse_attention_mode(v); }},
    {"layout", [](Options o, Text v) { o.layout = parse_layout(v); }},
    {"kv_layout", [](Options o, Text v) { o.kv_layout = parse_layout(v, "kv layout"); }},
    {"schedule", [](Options o, Text v) { o.schedule = v; }},
    {"implementation", [](Options o, Text v) { o.implementation = v; }},
    {"transport", [](Options o, Text v) { o.transport = parse_transport(v); }},
    {"tuning", [](Options o, Text v) { o.tuning.policy = ring::parse_tuning_policy(v); }},
    {"reproducible", [](Options o, Text v) { o.reproducible = reproducible_of(v); }},
    {"bias_policy", [](Options o, Text v) { o.bias_policy = parse_bias_policy(v); }},
    {"backward_schedule", [](Options o, Text v) { o.backward.schedule = v; }},
    {"backward_implementation", [](Options o, Text v) { o.backward.implementation = v; }},
};

const Named<std::int64_t> kIntegers[] = {
    {"offset", [](Options o, std::int64_t v) { o.mask.set_offset(v); }},
    {"prefix", [](Options o, std::int64_t v) { o.mask.set_prefix(v); }},
    {"sink_tokens", [](Options o, std::int64_t v) { o.mask.set_sink_tokens(v); }},
    {"chunk", [](Options o, std::int64_t v) { o.mask.set_chunk(v); }},
    {"granule", [](Options o, std::int64_t v) { o.granule = v; }},
    {"ulysses_degree", [](Options o, std::int64_t v) { o.ulysses_degree = static_cast<int>(v); }},
    {"inner_size", [](Options o, std::int64_t v) { o.inner_size = static_cast<int>(v); }},
    {"head_group_bytes", [](Options o, std::int64_t v) { o.head_group_bytes = v; }},
    {"causal", [](Options o, std::int64_t v) { o.mask.set_causal(v != 0); }},
    {"weights", [](Options o, std::int64_t v) { o.weights = v != 0; }},
    {"normalize_output", [](Options o, std::int64_t v) { o.normalize_output = v != 0; }},
    {"call_lengths", [](Options o, std::int64_t v) { o.call_arguments.lengths = v != 0; }},
    {"call_offsets", [](Options o, std::int64_t v) { o.call_arguments.offsets = v != 0; }},
    {"call_dropout_seed",
     [](Options o, std::int64_t v) { o.call_arguments.dropout_seed = v != 0; }},
    {"call_sinks", [](Options o, std::int64_t v) { o.sinks = sinks_to_come(o.shape, v); }},
};

const Named<double> kReals[] = {
    {"scale", [](Options o, double v) { o.scale = v; }},
    {"soft_cap", [](Options o, double v) { o.soft_cap = v; }},
};

template <class Value, std::size_t kCount>
void set_named(const Named<Value> (&table)[kCount], const std::string& name,
               const std::type_identity_t<Value>& value, Options options) {
  std::string known;
  for (const Named<Value>& entry : table) {
    if (entry.name == name) return entry.set(options, value);
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw ArgumentError("option", name, "one of " + known);
}

template <class T>
std::vector<T> copied(const char* name, const T* values, std::size_t count) {
  if (count == 0) return {};
  checked(values, name);
  return {values, values + count};
}

// The local shape, multiplied by the ranks that share each dimension.
AttentionShape global_shape(const annulus_attention_options& options,
                            const AttentionOptions& chosen, const MeshShape& mesh) {
  AttentionShape shape = options.shape;
  if (options.local) {
    AttentionProblem local;
    local.shape = shape;
    const ring::OperandLayout layout = ring::default_layout(local, mesh, chosen);
    shape.batch *= mesh.size(layout.query[0]);
    shape.query_length *= mesh.size(layout.query[1]);
    shape.heads *= mesh.size(layout.query[2]);
    shape.kv_length *= mesh.size(layout.kv[1]);
    shape.kv_heads *= mesh.size(layout.kv[2]);
  }
  shape.query_length = options.query_length.value_or(shape.query_length);
  shape.kv_length = options.kv_length.value_or(shape.kv_length);
  shape.kv_heads = options.kv_heads.value_or(shape.kv_heads);
  return shape;
}

// Adds a step. If `step` is a function that takes no arguments, adds the step that it returns, and
// turns its exceptions into errors.
template <class Step>
annulus_status add_step(annulus_attention_options* options, const Step& step) {
  return guarded([&] {
    auto& steps = checked(options, "options").parts;
    if constexpr (std::is_invocable_v<Step>) {
      steps.push_back(step());
    } else {
      steps.push_back(step);
    }
  });
}

annulus_status set_shape(annulus_attention_options* options, const int64_t* shape, bool local) {
  return guarded([&] {
    const std::int64_t* sizes = &checked(shape, "shape");
    auto& target = checked(options, "options");
    target.shape = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
    target.local = local;
  });
}

Extents scores_shape(const AttentionShape& shape, const std::vector<int>& has) {
  return {has[0] != 0 ? shape.batch : 1, has[1] != 0 ? shape.heads : 1,
          has[2] != 0 ? shape.query_length : 1, has[3] != 0 ? shape.kv_length : 1};
}

using SetNumbers = void (Mask::*)(std::vector<std::int32_t>);

annulus_status set_numbers(annulus_attention_options* options, const char* name,
                           const int32_t* values, size_t count, SetNumbers set) {
  return add_step(options, [&] {
    return [set, numbers = copied(name, values, count)](AttentionOptions& o) {
      (o.mask.*set)(numbers);
    };
  });
}

}  // namespace
}  // namespace annulus::c

using namespace annulus;     // NOLINT(google-build-using-namespace)
using namespace annulus::c;  // NOLINT(google-build-using-namespace)

AttentionOptions annulus_attention_options::resolve(const MeshShape& mesh) const {
  AttentionOptions options;
  for (const Step& step : choices) step(options);
  options.shape = global_shape(*this, options, mesh);
  options.shape.validate();
  for (const Step& step : parts) step(options);
  return options;
}

annulus_status annulus_attention_options_create(annulus_attention_options** options) {
  return guarded([&] { checked(options, "options") = new annulus_attention_options(); });
}
void annulus_attention_options_destroy(annulus_attention_options* options) {
  delete options;
}

annulus_status annulus_attention_options_set_text(annulus_attention_options* options,
                                                  const char* name, const char* value) {
  return guarded([&] {
    auto& target = checked(options, "options");
    const std::string key = &checked(name, "name");
    const bool needs_shape = key == "offset";
    (needs_shape ? target.parts : target.choices)
        .push_back([key, text = std::string(&checked(value, "value"))](AttentionOptions& o) {
          set_named(kTexts, key, text, o);
        });
  });
}

annulus_status annulus_attention_options_set_integer(annulus_attention_options* options,
                                                     const char* name, int64_t value) {
  return guarded([&] {
    auto& target = checked(options, "options");
    const std::string key = &checked(name, "name");
    if (key == "query_length") {
      target.query_length = value;
    } else if (key == "kv_length") {
      target.kv_length = value;
    } else if (key == "kv_heads") {
      target.kv_heads = value;
    } else {
      target.parts.push_back(
          [key, value](AttentionOptions& o) { set_named(kIntegers, key, value, o); });
    }
  });
}

annulus_status annulus_attention_options_set_real(annulus_attention_options* options,
                                                  const char* name, double value) {
  return add_step(options, [&] {
    return [name = std::string(&checked(name, "name")), value](AttentionOptions& o) {
      set_named(kReals, name, value, o);
    };
  });
}

annulus_status annulus_attention_options_set_shape(annulus_attention_options* options,
                                                   const int64_t shape[7]) {
  return set_shape(options, shape, false);
}
annulus_status annulus_attention_options_set_local_shape(annulus_attention_options* options,
                                                         const int64_t shape[7]) {
  return set_shape(options, shape, true);
}
annulus_status annulus_attention_options_set_dtype(annulus_attention_options* options,
                                                   annulus_dtype dtype) {
  return add_step(options, [dtype](AttentionOptions& o) { o.dtype = dtype_of_c(dtype); });
}
annulus_status annulus_attention_options_set_softmax_dtype(annulus_attention_options* options,
                                                           annulus_dtype dtype) {
  return add_step(options, [dtype](AttentionOptions& o) { o.softmax_dtype = dtype_of_c(dtype); });
}
annulus_status annulus_attention_options_set_window(annulus_attention_options* options,
                                                    int64_t left, int64_t right) {
  return add_step(options, [left, right](AttentionOptions& o) { o.mask.set_window(left, right); });
}

annulus_status annulus_attention_options_set_offsets(annulus_attention_options* options,
                                                     const int32_t* offsets, size_t count) {
  return set_numbers(options, "offsets", offsets, count, &Mask::set_offsets);
}
annulus_status annulus_attention_options_set_prefixes(annulus_attention_options* options,
                                                      const int32_t* prefixes, size_t count) {
  return set_numbers(options, "prefixes", prefixes, count, &Mask::set_prefixes);
}
annulus_status annulus_attention_options_set_query_lengths(annulus_attention_options* options,
                                                           const int32_t* lengths, size_t count) {
  return set_numbers(options, "query lengths", lengths, count, &Mask::set_query_lengths);
}
annulus_status annulus_attention_options_set_kv_lengths(annulus_attention_options* options,
                                                        const int32_t* lengths, size_t count) {
  return set_numbers(options, "kv lengths", lengths, count, &Mask::set_kv_lengths);
}

annulus_status annulus_attention_options_set_segments(annulus_attention_options* options,
                                                      const int32_t* query_ids, size_t query_count,
                                                      const int32_t* kv_ids, size_t kv_count) {
  return add_step(options, [&] {
    return [query = copied("segment ids", query_ids, query_count),
            kv = copied("segment ids", kv_ids, kv_count)](AttentionOptions& o) {
      o.mask.set_segments(o.shape.batch, query, kv);
    };
  });
}

annulus_status annulus_attention_options_set_cu_seqlens(annulus_attention_options* options,
                                                        const int32_t* cu_seqlens, size_t count) {
  return add_step(options, [&] {
    return [sums = copied("cu_seqlens", cu_seqlens, count)](AttentionOptions& o) {
      const auto repeated = [&](std::int64_t length) {
        const auto one = segments_from_cu_seqlens(sums, length);
        std::vector<std::int32_t> all;
        for (std::int64_t b = 0; b < o.shape.batch; ++b) {
          all.insert(all.end(), one.begin(), one.end());
        }
        return all;
      };
      o.mask.set_segments(o.shape.batch, repeated(o.shape.query_length),
                          repeated(o.shape.kv_length));
    };
  });
}

annulus_status annulus_attention_options_set_packings(annulus_attention_options* options,
                                                      const int32_t* query_cu_seqlens,
                                                      size_t query_count,
                                                      const int32_t* kv_cu_seqlens, size_t kv_count,
                                                      const char* alignment) {
  return add_step(options, [&] {
    return [query = copied("cu_seqlens_q", query_cu_seqlens, query_count),
            kv = copied("cu_seqlens_kv", kv_cu_seqlens, kv_count),
            name = std::string(alignment != nullptr ? alignment : "")](AttentionOptions& o) {
      std::optional<DocumentAlignment> where;
      if (name == "top-left") {
        where = DocumentAlignment::top_left;
      } else if (name == "bottom-right") {
        where = DocumentAlignment::bottom_right;
      } else if (!name.empty()) {
        throw ArgumentError("alignment", name, "top-left or bottom-right");
      }
      o.mask.set_packings(o.shape.batch, query, kv, where);
    };
  });
}

annulus_status annulus_attention_options_set_block_mask(annulus_attention_options* options,
                                                        int dimensions, const int64_t* shape,
                                                        const uint8_t* entries, int64_t query_size,
                                                        int64_t kv_size) {
  return add_step(options, [&] {
    const Extents sizes = extents_of_c("block mask", dimensions, shape);
    const auto count = static_cast<std::size_t>(std::max<std::int64_t>(0, sizes.product()));
    return [sizes, query_size, kv_size,
            values = copied("block mask", entries, count)](AttentionOptions& o) {
      o.mask.set_block_mask(BlockMask(sizes, {query_size, kv_size}, values));
    };
  });
}

annulus_status annulus_attention_options_set_dropout(annulus_attention_options* options,
                                                     double probability, uint64_t seed) {
  return add_step(
      options, [probability, seed](AttentionOptions& o) { o.dropout.emplace(probability, seed); });
}

annulus_status annulus_attention_options_set_sinks(annulus_attention_options* options,
                                                   int dimensions, const int64_t* shape,
                                                   const float* logits) {
  return add_step(options, [&] {
    const Extents sizes = extents_of_c("sinks", dimensions, shape);
    const auto count = static_cast<std::size_t>(std::max<std::int64_t>(0, sizes.product()));
    return [sizes, values = copied("sinks", logits, count)](AttentionOptions& o) {
      o.sinks.emplace(sizes, values);
    };
  });
}

annulus_status annulus_attention_options_set_bias(annulus_attention_options* options,
                                                  const int has[4]) {
  return add_step(options, [&] {
    return [which = copied("bias", has, 4)](AttentionOptions& o) {
      o.bias = scores_shape(o.shape, which);
    };
  });
}
annulus_status annulus_attention_options_set_dense_mask(annulus_attention_options* options,
                                                        const int has[4]) {
  return add_step(options, [&] {
    return [which = copied("mask", has, 4)](AttentionOptions& o) {
      o.dense_mask = scores_shape(o.shape, which);
    };
  });
}
