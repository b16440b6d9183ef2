#include <string>
#include <utility>
#include <vector>

#include <mpi.h>

#include <annulus/core/error.hpp>
#include <annulus/core/one_at_a_time.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
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
  return guarded(
      [&] { checked(options, "options").options.place = annulus::c::place_of_c(place); });
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
    MPI_Comm ranks = MPI_COMM_NULL;
    if (communicator != nullptr) ranks = *static_cast<const MPI_Comm*>(communicator);
    checked(context, "context") = new annulus_context{
        annulus::Context(ranks, options != nullptr ? options->options : annulus::ContextOptions())};
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
    annulus::collectively(ranks.mesh().world(), "arguments of the caller", [&] {
      if (error != nullptr) throw annulus::UserError(error);
    });
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
