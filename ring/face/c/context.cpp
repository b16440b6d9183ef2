#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <annulus/core/error.hpp>
#include <annulus/core/one_at_a_time.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/bootstrap.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/mpi_runtime.hpp>
#include <annulus/partition/named_sharding.hpp>

#include "face/c/handles.hpp"

using annulus::c::checked;
using annulus::c::guarded;

annulus_status annulus_context_options_create(annulus_context_options** options) {
  return guarded([&] { checked(options, "options") = new annulus_context_options(); });
}
void annulus_context_options_destroy(annulus_context_options* options) {
  delete options;
}
annulus_status annulus_context_options_set_mesh(annulus_context_options* options,
                                                const char* mesh) {
  return guarded([&] { checked(options, "options").options.mesh = &checked(mesh, "mesh"); });
}
annulus_status annulus_context_options_set_place(annulus_context_options* options,
                                                 annulus_place place) {
  return guarded([&] {
    checked(options, "options").options.place = place == ANNULUS_CURRENT_CUDA_DEVICE
                                                    ? annulus::kCurrentCudaDevice
                                                    : annulus::c::place_of_c(place);
  });
}
annulus_status annulus_context_options_set_threads(annulus_context_options* options, int threads) {
  return guarded([&] { checked(options, "options").options.threads = threads; });
}
annulus_status annulus_context_options_set_timeout(annulus_context_options* options,
                                                   double seconds) {
  return guarded([&] { checked(options, "options").options.timeout = seconds; });
}
annulus_status annulus_context_options_set_share_gpus(annulus_context_options* options, int share) {
  return guarded([&] { checked(options, "options").options.share_gpus = share != 0; });
}
annulus_status annulus_context_options_set_transport(annulus_context_options* options,
                                                     const char* transport) {
  return guarded([&] {
    checked(options, "options").options.transport =
        annulus::parse_transport(&checked(transport, "transport"));
  });
}

annulus_status annulus_context_create(const void* communicator,
                                      const annulus_context_options* options,
                                      annulus_context** context) {
  return guarded([&] {
    std::unique_ptr<annulus::Bootstrap> ranks;
    if (communicator != nullptr) ranks = annulus::mpi_runtime().bootstrap(communicator);
    checked(context, "context") = new annulus_context{annulus::Context(
        std::move(ranks), options != nullptr ? options->options : annulus::ContextOptions())};
  });
}
annulus_status annulus_context_create_on_store(annulus_store* store,
                                               const annulus_context_options* options,
                                               annulus_context** context) {
  return guarded([&] {
    const annulus_store& ranks = checked(store, "store");
    const auto chosen = options != nullptr ? options->options : annulus::ContextOptions();
    // An invalid timeout is reported by the context, when the ranks can communicate.
    if (chosen.timeout > 0) *ranks.timeout = chosen.timeout;
    checked(context, "context") =
        new annulus_context{annulus::Context(ranks.store, ranks.rank, ranks.size, chosen)};
  });
}
void annulus_context_destroy(annulus_context* context) {
  delete context;
}
int annulus_context_rank(const annulus_context* context) {
  return context->context.rank();
}
int annulus_context_size(const annulus_context* context) {
  return context->context.size();
}
annulus_place annulus_context_place(const annulus_context* context) {
  const annulus::Place place = context->context.place();
  return place.is_host() ? ANNULUS_HOST : place.device;
}

annulus_status annulus_context_axis_size(const annulus_context* context, const char* axis,
                                         int* size) {
  return guarded([&] {
    auto& mesh = const_cast<annulus_context&>(checked(context, "context")).context.mesh();
    checked(size, "size") = mesh.shape().axis_size(&checked(axis, "axis"));
  });
}

annulus_status annulus_context_agree(annulus_context* context, const char* error) {
  return guarded([&] {
    annulus::Context& ranks = checked(context, "context").context;
    const auto call = ranks.calls().begin("annulus_context_agree");
    annulus::collectively(ranks.mesh().world(), "arguments of a call by all ranks", [&] {
      if (error != nullptr) throw annulus::UserError(error);
    });
  });
}

annulus_status annulus_context_gather(annulus_context* context, const void* data, size_t bytes,
                                      void* all) {
  return guarded([&] {
    annulus::Context& ranks = checked(context, "context").context;
    const auto call = ranks.calls().begin("annulus_context_gather");
    std::string mine;
    if (bytes > 0) {
      mine.assign(&checked(static_cast<const char*>(data), "data"), bytes);
      (void)checked(static_cast<const char*>(all), "all");
    }
    const std::vector<std::string> texts = ranks.mesh().world().gather_text(mine, "data of ranks");
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      if (texts[rank].size() != bytes) {
        throw annulus::ArgumentError(
            "bytes", std::to_string(bytes),
            std::to_string(texts[rank].size()) + ", as on rank " + std::to_string(rank));
      }
      texts[rank].copy(static_cast<char*>(all) + rank * bytes, bytes);
    }
  });
}

annulus_status annulus_context_sum(annulus_context* context, double* values, size_t count) {
  return guarded([&] {
    annulus::Context& ranks = checked(context, "context").context;
    const auto call = ranks.calls().begin("annulus_context_sum");
    if (count > 0) (void)checked(values, "values");
    std::ranges::copy(ranks.mesh().world().sum(std::span(values, count)), values);
  });
}

annulus_status annulus_context_positions(const annulus_context* context, const char* spec,
                                         int dimensions, const int64_t* shape, int sequence,
                                         const char* layout, int64_t granule, int rank,
                                         int dimension, int64_t* positions, int64_t capacity,
                                         int64_t* count) {
  return guarded([&] {
    auto& mesh = const_cast<annulus_context&>(checked(context, "context")).context.mesh();
    const annulus::Extents sizes = annulus::c::extents_of_c("shape", dimensions, shape);
    std::vector<annulus::Distribution> distributions;
    if (sequence >= 0) {
      if (sequence >= dimensions) {
        throw annulus::ArgumentError("sequence", std::to_string(sequence),
                                     "a dimension of the array, or -1");
      }
      distributions.resize(static_cast<std::size_t>(sequence));
      distributions.push_back(annulus::Distribution::sequence(
          annulus::parse_layout(&checked(layout, "layout")), granule));
    }
    const annulus::NamedSharding sharding(mesh.shape(),
                                          annulus::PartitionSpec::parse(&checked(spec, "spec")),
                                          sizes, std::move(distributions));
    annulus::c::write_positions(sharding, rank, dimension, positions, capacity, count);
  });
}
