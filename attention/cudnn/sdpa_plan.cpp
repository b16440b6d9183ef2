// Only this source includes cudnn-frontend, which takes long to compile.
#include "cudnn/sdpa_plan.hpp"

#include <array>
#include <cudnn_frontend.h>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/cuda_versions.hpp>
#include <annulus/core/cuda_stream.hpp>

#include "cudnn/cudnn_handle.hpp"
#include "cudnn/plan_cache.hpp"

namespace annulus {
namespace {

namespace fe = cudnn_frontend;

using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// Names of the tensors for cuDNN, in the order of run().
enum Uid : std::int64_t {
  kQueryUid = 1,
  kKeyUid,
  kValueUid,
  kOutputUid,
  kLseUid,
  kGradOutputUid,
  kGradQueryUid,
  kGradKeyUid,
  kGradValueUid,
  kQueryLengthsUid,
  kKvLengthsUid
};

fe::DataType_t data_type(DType dtype) {
  return dtype == DType::float16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16;
}

// cuDNN's dimensions are [b, heads, positions, D].
std::vector<std::int64_t> head_major(const SdpaDescriptor::Strides& strides) {
  return {strides[0], strides[2], strides[1], 1};
}

// Strides of a contiguous array [b, positions, heads, D].
SdpaDescriptor::Strides contiguous(std::int64_t positions, std::int64_t heads, std::int64_t dim) {
  return {positions * heads * dim, heads * dim, dim};
}

std::string version_text(std::size_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace

struct SdpaPlan::Graph {
  fe::graph::Graph graph;
  std::size_t workspace = 0;
  bool backward = false;
  bool padded = false;
  // cuDNN does not promise that all its engines may run one plan from several threads at once.
  std::mutex mutex;

  explicit Graph(const SdpaDescriptor& d) : backward(d.backward), padded(d.padded) {
    graph.set_io_data_type(data_type(d.dtype))
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (d.backward) {
      add_backward(d);
    } else {
      add_forward(d);
    }
  }

  struct Operands {
    Tensor query, key, value;
  };
  Operands operands(const SdpaDescriptor& d) {
    return {input(kQueryUid, {d.batch, d.heads, d.rows, d.head_dim}, d.query),
            input(kKeyUid, {d.batch, d.kv_heads, d.columns, d.head_dim}, d.key),
            input(kValueUid, {d.batch, d.kv_heads, d.columns, d.value_dim}, d.value)};
  }

  Tensor input(Uid uid, const std::vector<std::int64_t>& dims,
               const SdpaDescriptor::Strides& strides) {
    return graph.tensor(
        fe::graph::Tensor_attributes().set_uid(uid).set_dim(dims).set_stride(head_major(strides)));
  }

  Tensor lengths(const SdpaDescriptor& d, Uid uid) {
    return graph.tensor(fe::graph::Tensor_attributes()
                            .set_uid(uid)
                            .set_dim({d.batch, 1, 1, 1})
                            .set_stride({1, 1, 1, 1})
                            .set_data_type(fe::DataType_t::INT32));
  }

  // Sets scale and mask, which are the same in both passes.
  template <class Attributes>
  Attributes attributes_of(const SdpaDescriptor& d) {
    Attributes attributes;
    attributes.set_name("sdpa").set_attn_scale(d.scale).set_diagonal_alignment(
        d.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT : fe::DiagonalAlignment_t::TOP_LEFT);
    if (d.left) attributes.set_diagonal_band_left_bound(static_cast<int>(*d.left));
    if (d.right) attributes.set_diagonal_band_right_bound(static_cast<int>(*d.right));
    if (d.padded) {
      attributes.set_padding_mask(true)
          .set_seq_len_q(lengths(d, kQueryLengthsUid))
          .set_seq_len_kv(lengths(d, kKvLengthsUid));
    }
    return attributes;
  }

  static void set_result(const Tensor& result, Uid uid, const std::vector<std::int64_t>& dims,
                         const SdpaDescriptor::Strides& strides) {
    result->set_output(true).set_uid(uid).set_dim(dims).set_stride(head_major(strides));
  }

  void add_forward(const SdpaDescriptor& d) {
    const auto [query, key, value] = operands(d);
    auto attributes = attributes_of<fe::graph::SDPA_attributes>(d);
    attributes.set_generate_stats(true).set_implementation(
        fe::AttentionImplementation_t::COMPOSITE);
    const auto [output, stats] = graph.sdpa(query, key, value, attributes);
    set_result(output, kOutputUid, {d.batch, d.heads, d.rows, d.value_dim}, d.output);
    stats->set_output(true)
        .set_uid(kLseUid)
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({d.batch, d.heads, d.rows, 1})
        .set_stride({d.lse[0], d.lse[1], d.lse[2], 1});
  }

  void add_backward(const SdpaDescriptor& d) {
    const auto [query, key, value] = operands(d);
    const std::vector<std::int64_t> outputs{d.batch, d.heads, d.rows, d.value_dim};
    const SdpaDescriptor::Strides strides = contiguous(d.rows, d.heads, d.value_dim);
    const Tensor output = input(kOutputUid, outputs, strides);
    const Tensor grad_output = input(kGradOutputUid, outputs, strides);
    const Tensor stats = graph.tensor(fe::graph::Tensor_attributes()
                                          .set_uid(kLseUid)
                                          .set_dim({d.batch, d.heads, d.rows, 1})
                                          .set_stride({d.heads * d.rows, d.rows, 1, 1})
                                          .set_data_type(fe::DataType_t::FLOAT));
    const auto [grad_query, grad_key, grad_value] =
        graph.sdpa_backward(query, key, value, output, grad_output, stats,
                            attributes_of<fe::graph::SDPA_backward_attributes>(d));
    set_result(grad_query, kGradQueryUid, {d.batch, d.heads, d.rows, d.head_dim},
               contiguous(d.rows, d.heads, d.head_dim));
    set_result(grad_key, kGradKeyUid, {d.batch, d.kv_heads, d.columns, d.head_dim},
               contiguous(d.columns, d.kv_heads, d.head_dim));
    set_result(grad_value, kGradValueUid, {d.batch, d.kv_heads, d.columns, d.value_dim},
               contiguous(d.columns, d.kv_heads, d.value_dim));
  }
};

SdpaPlan::SdpaPlan(const SdpaDescriptor& d, cudnnHandle_t handle)
    : graph_(std::make_unique<Graph>(d)) {
  fe::graph::Graph& graph = graph_->graph;
  const auto check = [](fe::error_t status, const char* step) {
    if (status.is_good()) return;
    throw UnsupportedError(fmt::format("cuDNN attention: {}: {}", step, status.get_message()));
  };
  check(graph.validate(), "checking the graph");
  check(graph.build_operation_graph(handle), "building the graph");
  check(graph.create_execution_plans({fe::HeurMode_t::A}), "looking for an engine");
  check(graph.check_support(), "looking for an engine");
  check(graph.build_plans(), "building the plan");
  std::int64_t bytes = 0;
  check(graph.get_workspace_size(bytes), "asking for the workspace");
  graph_->workspace = static_cast<std::size_t>(bytes);
}

SdpaPlan::~SdpaPlan() = default;

std::size_t SdpaPlan::workspace_bytes() const noexcept {
  return graph_->workspace;
}

void SdpaPlan::run(cudnnHandle_t handle, const Arguments& a) const {
  // cuDNN takes its inputs through the same list as its outputs.
  const auto input = [](const void* pointer) { return const_cast<void*>(pointer); };
  std::array<void*, kKvLengthsUid> pointers{};
  int count = 0;
  for (void* pointer : {input(a.query), input(a.key), input(a.value), a.output, a.lse}) {
    pointers[static_cast<std::size_t>(count++)] = pointer;
  }
  if (graph_->backward) {
    for (void* pointer : {input(a.grad_output), a.grad_query, a.grad_key, a.grad_value}) {
      pointers[static_cast<std::size_t>(count++)] = pointer;
    }
  }
  if (graph_->padded) {
    for (const void* pointer : {a.query_lengths, a.kv_lengths}) {
      pointers[static_cast<std::size_t>(count++)] = input(pointer);
    }
  }
  const std::lock_guard lock(graph_->mutex);
  fe::error_t status = graph_->graph.execute(handle, pointers.data(), count, a.workspace);
  if (status.is_bad()) throw CudnnError("cuDNN attention: " + status.get_message());
}

std::size_t hash_of(const SdpaDescriptor& d) noexcept {
  std::size_t hash = 0;
  const auto add = [&hash](std::int64_t value) {
    hash ^= std::hash<std::int64_t>()(value) + 0x9e3779b97f4a7c15U + (hash << 6) + (hash >> 2);
  };
  for (const std::int64_t value :
       {static_cast<std::int64_t>(d.backward), static_cast<std::int64_t>(d.dtype), d.batch, d.rows,
        d.columns, d.heads, d.kv_heads, d.head_dim, d.value_dim, d.left.value_or(-1),
        d.right.value_or(-1), static_cast<std::int64_t>(d.bottom_right),
        static_cast<std::int64_t>(d.padded)}) {
    add(value);
  }
  for (const SdpaDescriptor::Strides* strides : {&d.query, &d.key, &d.value, &d.output, &d.lse}) {
    for (const std::int64_t stride : *strides) add(stride);
  }
  add(static_cast<std::int64_t>(std::hash<float>()(d.scale)));
  return hash;
}

namespace {

struct PlanKey {
  int device;
  SdpaDescriptor descriptor;
  bool operator==(const PlanKey&) const = default;
};

struct PlanKeyHash {
  std::size_t operator()(const PlanKey& key) const noexcept {
    return hash_of(key.descriptor) + static_cast<std::size_t>(key.device);
  }
};

}  // namespace

std::shared_ptr<const SdpaPlan> shared_sdpa_plan(const SdpaDescriptor& descriptor) {
  // Documents of different lengths have different plans. The cache is never destroyed, since CUDA
  // may be gone when the process ends.
  constexpr std::size_t kMaximumPlans = 1024;
  static auto* const cache = new PlanCache<PlanKey, SdpaPlan, PlanKeyHash>(kMaximumPlans);
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return cache->get({device, descriptor}, [&] {
    return std::make_shared<const SdpaPlan>(descriptor, cudnn_handle(nullptr));
  });
}

CudnnVersions cudnn_versions() {
  return {version_text(CUDNN_VERSION), version_text(cudnnGetVersion()),
          fmt::format("{}.{}.{}", CUDNN_FRONTEND_MAJOR_VERSION, CUDNN_FRONTEND_MINOR_VERSION,
                      CUDNN_FRONTEND_PATCH_VERSION)};
}

}  // namespace annulus
