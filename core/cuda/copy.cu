#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>

#include <annulus/core/cuda_stream.hpp>

#include "cuda/copy.hpp"

namespace annulus::cuda {
namespace {

constexpr int kDims = 4;
constexpr unsigned kThreads = 256;
constexpr unsigned kMaximumBlocks = 132 * 16;  // for one copy: enough to fill a GPU
constexpr std::int64_t kMaximumUnits = std::int64_t{1} << 31;

// One copy, in units of 1, 2, 4, 8 or 16 bytes.
struct Job {
  const void* from;
  void* to;
  std::int64_t from_strides[kDims], to_strides[kDims];
  unsigned sizes[kDims];
  unsigned units;
  unsigned first_block, blocks;
  int width;
};

constexpr int kMaximumJobs = 32;  // as many as fit into a launch's parameters

struct Jobs {
  Job at[kMaximumJobs];
  int count;
};
static_assert(sizeof(Jobs) <= 4096);

template <int bytes>
struct alignas(bytes) Unit {
  unsigned char at[bytes];
};

template <int bytes>
__device__ void copy_units(const Job& job, unsigned first, unsigned step) {
  const auto* const from = static_cast<const Unit<bytes>*>(job.from);
  auto* const to = static_cast<Unit<bytes>*>(job.to);
  for (std::uint64_t unit = first; unit < job.units; unit += step) {
    unsigned rest = static_cast<unsigned>(unit);
    const unsigned l = rest % job.sizes[3];
    rest /= job.sizes[3];
    const unsigned k = rest % job.sizes[2];
    rest /= job.sizes[2];
    const unsigned j = rest % job.sizes[1];
    const unsigned i = rest / job.sizes[1];
    to[i * job.to_strides[0] + j * job.to_strides[1] + k * job.to_strides[2] +
       l * job.to_strides[3]] = from[i * job.from_strides[0] + j * job.from_strides[1] +
                                     k * job.from_strides[2] + l * job.from_strides[3]];
  }
}

__global__ void copy_kernel(const __grid_constant__ Jobs jobs) {
  int index = 0;
  while (index + 1 < jobs.count && blockIdx.x >= jobs.at[index + 1].first_block) ++index;
  const Job& job = jobs.at[index];
  const unsigned first = (blockIdx.x - job.first_block) * kThreads + threadIdx.x;
  const unsigned step = job.blocks * kThreads;
  switch (job.width) {
    case 1:
      return copy_units<1>(job, first, step);
    case 2:
      return copy_units<2>(job, first, step);
    case 4:
      return copy_units<4>(job, first, step);
    case 8:
      return copy_units<8>(job, first, step);
    default:
      return copy_units<16>(job, first, step);
  }
}

// Copies in the order in which they were added, as many in one launch as fit.
class Launches {
 public:
  explicit Launches(cudaStream_t stream) : stream_(stream) {}

  void add(const ConstTensorView& from, const TensorView& to) {
    if (to.elements() == 0) return;
    if (to.rank() > kDims) return by_entries(from, to, 0);
    Job job = job_of(from, to);
    const std::int64_t units =
        std::int64_t{job.sizes[0]} * job.sizes[1] * job.sizes[2] * job.sizes[3];
    if (units > kMaximumUnits) return in_halves(from, to);
    job.units = static_cast<unsigned>(units);
    job.first_block = blocks_;
    job.blocks = std::min(kMaximumBlocks, (job.units + kThreads - 1) / kThreads);
    blocks_ += job.blocks;
    jobs_.at[jobs_.count++] = job;
    if (jobs_.count == kMaximumJobs) launch();
  }

  void launch() {
    if (jobs_.count == 0) return;
    copy_kernel<<<blocks_, kThreads, 0, stream_>>>(jobs_);
    check_cuda(cudaGetLastError(), "copy on the device");
    jobs_.count = 0;
    blocks_ = 0;
  }

 private:
  // Copies entry by entry along a dimension.
  void by_entries(const ConstTensorView& from, const TensorView& to, int dim) {
    for (std::int64_t i = 0; i < to.size(dim); ++i) add(entry(from, i), entry(to, i));
  }

  void in_halves(const ConstTensorView& from, const TensorView& to) {
    int longest = 0;
    for (int dim = 1; dim < to.rank(); ++dim) {
      if (to.size(dim) > to.size(longest)) longest = dim;
    }
    const std::int64_t half = to.size(longest) / 2;
    for (const auto& [begin, count] :
         {std::pair(std::int64_t{0}, half), std::pair(half, to.size(longest) - half)}) {
      add(from.slice(longest, begin, count), to.slice(longest, begin, count));
    }
  }

  // Entry `index` of the first dimension.
  template <class View>
  static View entry(const View& view, std::int64_t index) {
    const View one = view.slice(0, index, 1);
    const auto rest = [&](const Extents& all) {
      return Extents(std::span(all.begin() + 1, all.end()));
    };
    return View(one.data(), view.dtype(), rest(view.shape()), rest(view.strides()), view.place());
  }

  // Units of several elements need neighbours at aligned addresses, in every vector of both views.
  template <class View>
  static bool has_packs(const View& view, int elements) {
    const auto bytes = static_cast<std::int64_t>(size_of(view.dtype())) * elements;
    const int last = view.rank() - 1;
    if (last < 0 || view.size(last) % elements != 0 || view.stride(last) != 1) return false;
    if (reinterpret_cast<std::uintptr_t>(view.data()) % static_cast<std::uintptr_t>(bytes) != 0) {
      return false;
    }
    for (int dim = 0; dim < last; ++dim) {
      if (view.size(dim) > 1 && view.stride(dim) % elements != 0) return false;
    }
    return true;
  }

  static Job job_of(const ConstTensorView& from, const TensorView& to) {
    constexpr int kWidest = 16;
    const int element = static_cast<int>(size_of(to.dtype()));
    int elements = kWidest / element;
    while (elements > 1 && !(has_packs(from, elements) && has_packs(to, elements))) elements /= 2;
    Job job{from.data(), to.data(), {}, {}, {1, 1, 1, 1}, 0, 0, 0, element * elements};
    const int rank = to.rank();
    for (int dim = 0; dim < rank; ++dim) {
      const int at = kDims - rank + dim;
      const bool last = dim == rank - 1;
      job.sizes[at] = static_cast<unsigned>(to.size(dim) / (last ? elements : 1));
      job.from_strides[at] = last && elements > 1 ? 1 : from.stride(dim) / elements;
      job.to_strides[at] = last && elements > 1 ? 1 : to.stride(dim) / elements;
    }
    return job;
  }

  cudaStream_t stream_;
  Jobs jobs_{};
  unsigned blocks_ = 0;
};

}  // namespace

void copy(std::span<const TensorCopy> copies, Stream& stream) {
  Launches launches(CudaStream::of(stream).raw());
  for (const TensorCopy& one : copies) launches.add(one.source, one.destination);
  launches.launch();
}

}  // namespace annulus::cuda
