#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <openblas_config.h>
#include <ostream>
#include <string>
#include <string_view>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <boost/version.hpp>
#include <cblas.h>
#include <fmt/format.h>
#include <hwy/targets.h>
#include <nlohmann/json.hpp>
#include <spdlog/version.h>

#include <annulus/attention/cuda_versions.hpp>
#include <annulus/attention/registry.hpp>
#include <annulus/core/cuda.hpp>
#include <annulus/core/environment.hpp>
#include <annulus/files/text_file.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/nccl_group.hpp>
#include <annulus/ring/machine.hpp>
#include <annulus/ring/planner.hpp>

#include "launcher/commands/commands.hpp"
#include "launcher/options/as_option.hpp"
#include "launcher/options/version.hpp"
#include "launcher/report/report.hpp"

namespace annulus::launcher {
namespace {

/// Lines under a heading, printed as a table and written as a JSON object.
struct Section {
  std::string title;
  std::vector<std::pair<std::string, std::string>> lines;

  void add(std::string key, std::string value) {
    lines.emplace_back(std::move(key), std::move(value));
  }
};

Section program_section(std::string_view commit) {
  Section section{"program", {}};
  section.add("version", std::string(kVersion));
  section.add("commit", std::string(commit));
  section.add("build type", std::string(kBuildType));
#if defined(__clang__)
  section.add("compiler", fmt::format("Clang {}", __clang_version__));
#else
  section.add("compiler", fmt::format("GCC {}", __VERSION__));
#endif
  section.add("C++ standard", std::to_string(__cplusplus));
  return section;
}

std::string best_simd_target() {
  // Better targets have lower bits.
  const std::int64_t targets = hwy::SupportedTargets();
  return hwy::TargetName(targets & -targets);
}

std::string built_and_loaded(const std::string& built, const std::string& loaded) {
  if (built == "not built") return built;
  return fmt::format("built against {}; loaded {}{}", built, loaded,
                     built == loaded ? "" : " (they differ)");
}

Section libraries_section() {
  Section section{"libraries", {}};
  section.add("MPI", fmt::format("built against MPI {}.{}; loaded {}", MPI_VERSION, MPI_SUBVERSION,
                                 mpi_library()));
  section.add("OpenBLAS", fmt::format("built against{}; loaded {}, kernels for {}",
                                      std::string(OPENBLAS_VERSION), openblas_get_config(),
                                      openblas_get_corename()));
  section.add("Highway",
              fmt::format("{}; best target of this CPU {}", kHighwayVersion, best_simd_target()));
  section.add("fmt", fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100,
                                 FMT_VERSION % 100));
  section.add("spdlog",
              fmt::format("{}.{}.{}", SPDLOG_VER_MAJOR, SPDLOG_VER_MINOR, SPDLOG_VER_PATCH));
  section.add("Boost", fmt::format("{}.{}.{}", BOOST_VERSION / 100000, BOOST_VERSION / 100 % 1000,
                                   BOOST_VERSION % 100));
  section.add("nlohmann-json",
              fmt::format("{}.{}.{}", NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                          NLOHMANN_JSON_VERSION_PATCH));
  const CudaVersions cuda = cuda_versions();
  section.add("CUDA", built_and_loaded(cuda.built, cuda.loaded) + ", driver " + cuda.driver);
  const NcclVersions nccl = nccl_versions();
  section.add("NCCL", built_and_loaded(nccl.built, nccl.loaded));
  const CudnnVersions cudnn = cudnn_versions();
  section.add("cuDNN",
              built_and_loaded(cudnn.built, cudnn.loaded) + ", frontend " + cudnn.frontend);
  return section;
}

// "2 ranks: 0, 1 (mpirun's 0, 2)"; the first ones if there are many.
std::string ranks_of_node(const Topology& topology, int node,
                          const std::vector<int>& mpirun_ranks) {
  constexpr std::size_t kMaximum = 8;
  std::vector<int> own;
  std::vector<int> mpiruns;
  for (std::size_t rank = 0; rank < mpirun_ranks.size() && own.size() < kMaximum; ++rank) {
    if (topology.node_of_rank[rank] != node) continue;
    own.push_back(static_cast<int>(rank));
    mpiruns.push_back(mpirun_ranks[rank]);
  }
  const int count = topology.ranks_on_node(node);
  const char* const more = static_cast<std::size_t>(count) > own.size() ? ", …" : "";
  std::string text = fmt::format("{}: {}{}", counted(count, "rank"), fmt::join(own, ", "), more);
  if (own != mpiruns) text += fmt::format(" (mpirun's {}{})", fmt::join(mpiruns, ", "), more);
  return text;
}

Section machine_section(const Mesh& everyone, const std::string& transport,
                        const std::vector<int>& mpirun_ranks) {
  const Topology& topology = everyone.topology();
  Section section{"machine", {}};
  section.add("ranks", fmt::format("{} on {}, transport {}", everyone.size(),
                                   counted(topology.nodes(), "node"), transport));
  for (int node = 0; node < topology.nodes(); ++node) {
    section.add(fmt::format("node {}", node),
                fmt::format("{}, {}", topology.node_names[static_cast<std::size_t>(node)],
                            ranks_of_node(topology, node, mpirun_ranks)));
  }
  section.add("CPU", cpu_name());
  section.add("cores", std::to_string(std::thread::hardware_concurrency()));
  const double memory =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  section.add("memory", fmt::format("{:.1f} GiB", memory / (1 << 30)));
  const std::vector<CudaDeviceInfo> gpus = cuda_devices();
  for (std::size_t i = 0; i < gpus.size(); ++i) {
    section.add(fmt::format("GPU {}", i),
                fmt::format("{}, compute capability {}.{}, {} multiprocessors, {:.1f} GiB",
                            gpus[i].name, gpus[i].compute_capability / 10,
                            gpus[i].compute_capability % 10, gpus[i].multiprocessors,
                            static_cast<double>(gpus[i].memory_bytes) / (1 << 30)));
  }
  if (gpus.empty()) section.add("GPUs", cuda_unavailable_reason());
  return section;
}

Section implementations_section(Place place) {
  // The shape and mask of a typical training call.
  AttentionProblem typical;
  typical.shape = {1, 1024, 1024, 8, 2, 64, 64};
  typical.dtype = DType::bfloat16;
  typical.mask.set_causal(true);
  Section section{fmt::format("implementations for {}, {}, causal, on {}", to_string(typical.shape),
                              annulus::name_of(typical.dtype), to_string(place)),
                  {}};
  const Registry registry = Registry::standard();
  for (const auto& implementation : registry.implementations()) {
    const std::vector<std::string>& names = implementation->names();
    const Capability capability = implementation->capability(typical, place);
    std::string text = capability ? "yes" : "no: " + capability.reason();
    if (names.size() > 1) {
      text += fmt::format(" (aliases {})", fmt::join(names.begin() + 1, names.end(), ", "));
    }
    section.add(names.front(), std::move(text));
  }
  for (const Strategy& strategy : registry.strategies()) {
    const Capability capability = strategy.accepts(typical);
    section.add(strategy.name,
                capability ? "yes, with any of the above" : "no: " + capability.reason());
  }
  return section;
}

Section schedules_section() {
  Section section{"schedules", {}};
  for (const char* name :
       {"local", "ring", "double_ring", "allgather", "ulysses", "hybrid", "pass_q"}) {
    section.add(name, "yes");
  }
  return section;
}

Section environment_section() {
  Section section{"environment", {}};
  for (const EnvironmentVariable& variable : environment_variables()) {
    const bool given = std::getenv(std::string(variable.name).c_str()) != nullptr;
    section.add(
        std::string(variable.name),
        fmt::format("{} ({}; default {}): {}", environment(variable.name),
                    given ? "set" : "not set", variable.default_value, variable.description));
  }
  section.add("ANNULUS_METADATA_<KEY>",
              "a field of --metadata, such as ANNULUS_METADATA_SOFTMAX_SCALE for softmax_scale");
  section.add("ANNULUS_<OPTION>", "any option: --causal-offset is ANNULUS_CAUSAL_OFFSET");
  return section;
}

void print(const std::vector<Section>& sections, std::ostream& out) {
  for (const Section& section : sections) {
    out << "# " << section.title << '\n';
    std::size_t width = 0;
    for (const auto& [key, value] : section.lines) width = std::max(width, key.size());
    for (const auto& [key, value] : section.lines) {
      out << fmt::format("  {:<{}}  {}\n", key, width, value);
    }
  }
}

nlohmann::json to_json(const std::vector<Section>& sections) {
  nlohmann::json json{{"schema", "annulus.info"}, {"version", 1}};
  for (const Section& section : sections) {
    // The key is the title's first word.
    nlohmann::json& lines = json[section.title.substr(0, section.title.find(' '))];
    for (const auto& [key, value] : section.lines) lines[key] = value;
  }
  return json;
}

}  // namespace

ExitCode info_command(const CommandContext& context) {
  const Options& options = context.options;
  Mesh everyone(MeshShape({{"ranks", context.session.size()}}), context.session.world(),
                Watchdog(Watchdog::Seconds(options.timeout)));
  const std::string transport = everyone.group().transport();
  const std::vector<int> mpirun_ranks = context.session.mpirun_ranks();
  collectively(everyone.world(), [&] {
    if (everyone.rank() != 0) return;
    std::vector<Section> sections{program_section(context.commit), libraries_section(),
                                  machine_section(everyone, transport, mpirun_ranks),
                                  implementations_section(Place::host())};
    if (cuda_unavailable_reason().empty()) {
      sections.push_back(implementations_section(Place::cuda(0)));
    }
    sections.push_back(schedules_section());
    sections.push_back(environment_section());
    if (!options.json.empty() && options.json != "-") {
      as_option("--json " + options.json,
                [&] { files::TextFile(options.json).commit(to_json(sections).dump(2) + "\n"); });
    }
    if (options.json == "-") {
      context.out << to_json(sections).dump(2) << '\n';
    } else {
      print(sections, context.out);
    }
  });
  return ExitCode::success;
}

}  // namespace annulus::launcher
