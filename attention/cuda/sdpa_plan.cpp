// The one source that sees cudnn-frontend, which takes long to compile.
#include "cuda/sdpa_plan.hpp"

#include <array>
#include <cudnn_frontend.h>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/cuda_versions.hpp>
#include <annulus/core/cuda_stream.hpp>

#include "cuda/cudnn_handle.hpp"
#include "cuda/plan_cache.hpp"

namespace annulus {
namespace {

namespace fe = cudnn_frontend;

using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// Names of the tensors for cuDNN, in the order in which run() lists them.
constexpr std::int64_t kQueryUid = 1;
constexpr std::int64_t kKeyUid = 2;
constexpr std::int64_t kValueUid = 3;
constexpr std::int64_t kOutputUid = 4;
constexpr std::int64_t kLseUid = 5;
constexpr std::int64_t kQueryLengthsUid = 6;
constexpr std::int64_t kKvLengthsUid = 7;

fe::DataType_t data_type(DType dtype) {
  return dtype == DType::float16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16;
}

// cuDNN's dimensions are [b, heads, positions, D].
std::vector<std::int64_t> head_major(const SdpaDescriptor::Strides& strides) {
  return {strides[0], strides[2], strides[1], 1};
}

std::string version_text(std::size_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace

struct SdpaPlan::Graph {
  fe::graph::Graph graph;
  std::size_t workspace = 0;
  int tensors = 0;
  // cuDNN does not promise that all its engines may run one plan from several threads at once.
  std::mutex mutex;
};

SdpaPlan::SdpaPlan(const SdpaDescriptor& d, cudnnHandle_t handle)
    : graph_(std::make_unique<Graph>()) {
  fe::graph::Graph& graph = graph_->graph;
  graph.set_io_data_type(data_type(d.dtype))
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const auto input = [&](const char* name, std::int64_t uid, const std::vector<std::int64_t>& dims,
                         const SdpaDescriptor::Strides& strides) {
    return graph.tensor(
        fe::graph::Tensor_attributes().set_name(name).set_uid(uid).set_dim(dims).set_stride(
            head_major(strides)));
  };
  const Tensor query = input("query", kQueryUid, {d.batch, d.heads, d.rows, d.head_dim}, d.query);
  const Tensor key = input("key", kKeyUid, {d.batch, d.kv_heads, d.columns, d.head_dim}, d.key);
  const Tensor value =
      input("value", kValueUid, {d.batch, d.kv_heads, d.columns, d.value_dim}, d.value);

  auto attributes =
      fe::graph::SDPA_attributes()
          .set_name("sdpa")
          .set_generate_stats(true)
          .set_attn_scale(d.scale)
          .set_implementation(fe::AttentionImplementation_t::COMPOSITE)
          .set_diagonal_alignment(d.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                 : fe::DiagonalAlignment_t::TOP_LEFT);
  if (d.left) attributes.set_diagonal_band_left_bound(static_cast<int>(*d.left));
  if (d.right) attributes.set_diagonal_band_right_bound(static_cast<int>(*d.right));
  if (d.padded) {
    const auto lengths = [&](const char* name, std::int64_t uid) {
      return graph.tensor(fe::graph::Tensor_attributes()
                              .set_name(name)
                              .set_uid(uid)
                              .set_dim({d.batch, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(fe::DataType_t::INT32));
    };
    attributes.set_padding_mask(true)
        .set_seq_len_q(lengths("query lengths", kQueryLengthsUid))
        .set_seq_len_kv(lengths("kv lengths", kKvLengthsUid));
  }
  const auto [output, stats] = graph.sdpa(query, key, value, attributes);
  output->set_output(true)
      .set_uid(kOutputUid)
      .set_dim({d.batch, d.heads, d.rows, d.value_dim})
      .set_stride(head_major(d.output));
  stats->set_output(true)
      .set_uid(kLseUid)
      .set_data_type(fe::DataType_t::FLOAT)
      .set_dim({d.batch, d.heads, d.rows, 1})
      .set_stride({d.lse[0], d.lse[1], d.lse[2], 1});

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
  graph_->tensors = static_cast<int>(d.padded ? kKvLengthsUid : kLseUid);
}

SdpaPlan::~SdpaPlan() = default;

std::size_t SdpaPlan::workspace_bytes() const noexcept {
  return graph_->workspace;
}

void SdpaPlan::run(cudnnHandle_t handle, const Arguments& a) const {
  // cuDNN takes its inputs through the same list as its outputs.
  const auto input = [](const void* pointer) { return const_cast<void*>(pointer); };
  std::array<void*, kKvLengthsUid> pointers{
      input(a.query), input(a.key),           input(a.value),     a.output,
      a.lse,          input(a.query_lengths), input(a.kv_lengths)};
  const std::lock_guard lock(graph_->mutex);
  fe::error_t status = graph_->graph.execute(handle, pointers.data(), graph_->tensors, a.workspace);
  if (status.is_bad()) throw CudnnError("cuDNN attention: " + status.get_message());
}

std::size_t hash_of(const SdpaDescriptor& d) noexcept {
  std::size_t hash = 0;
  const auto add = [&hash](std::int64_t value) {
    hash ^= std::hash<std::int64_t>()(value) + 0x9e3779b97f4a7c15U + (hash << 6) + (hash >> 2);
  };
  for (const std::int64_t value :
       {static_cast<std::int64_t>(d.dtype), d.batch, d.rows, d.columns, d.heads, d.kv_heads,
        d.head_dim, d.value_dim, d.left.value_or(-1), d.right.value_or(-1),
        static_cast<std::int64_t>(d.bottom_right), static_cast<std::int64_t>(d.padded)}) {
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
  // Documents of every length have plans of their own. The cache is never destroyed: CUDA may be
  // gone when the process ends.
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
