#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include <annulus/mesh/launched.hpp>

namespace annulus {
namespace {

// Variables of launchers that MPI understands: PMIx, PMI, and mpirun_rsh of MVAPICH, which sets
// neither.
constexpr std::array kRankVariables{"PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"};

// The number at the beginning of a text; 1 if there is none.
int count_of(const char* text) {
  const std::string_view digits(text);
  int count = 1;
  std::from_chars(digits.data(), digits.data() + digits.size(), count);
  return count;
}

// The number in a variable; nothing if it is not set or not a number.
std::optional<ProcessNumber> number_in(const char* variable, bool of_mpi,
                                       const EnvironmentLookup& lookup) {
  const char* const text = lookup(variable);
  if (text == nullptr) return {};
  const std::string_view digits(text);
  int number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || end != digits.data() + digits.size()) return {};
  return ProcessNumber{number, variable, of_mpi};
}

// The number of tasks of this process's Slurm step; 1 outside a step.
int slurm_tasks(const EnvironmentLookup& lookup) {
  if (lookup("SLURM_PROCID") == nullptr) return 1;
  const char* tasks = lookup("SLURM_STEP_NUM_TASKS");
  if (tasks == nullptr) {
    // A batch script has a SLURM_PROCID too, but srun did not start its direct children.
    const char* kind = lookup("ENVIRONMENT");
    if (kind != nullptr && std::string_view(kind) == "BATCH") return 1;
    tasks = lookup("SLURM_NTASKS");
  }
  return tasks == nullptr ? 1 : count_of(tasks);
}

int world_size(const EnvironmentLookup& lookup) {
  const char* const processes = lookup("WORLD_SIZE");
  return processes == nullptr ? 1 : count_of(processes);
}

// The number of processes that torchrun started; 1 if it did not start this one.
int torchrun_processes(const EnvironmentLookup& lookup) {
  const bool torchrun = lookup("TORCHELASTIC_RUN_ID") != nullptr || lookup("GROUP_RANK") != nullptr;
  return torchrun ? world_size(lookup) : 1;
}

// The number of processes according to PyTorch's variables; 1 without them.
int pytorch_processes(const EnvironmentLookup& lookup) {
  const bool pytorch = lookup("MASTER_ADDR") != nullptr && lookup("RANK") != nullptr;
  return pytorch ? world_size(lookup) : 1;
}

}  // namespace

bool started_by_launcher(const EnvironmentLookup& lookup) {
  if (lookup("OMPI_COMM_WORLD_SIZE") != nullptr) return true;
  // Checked before srun's variables, which the processes of a torchrun under srun inherit.
  if (const int processes = torchrun_processes(lookup); processes > 1) {
    throw LibraryError(fmt::format(
        "torchrun started {} processes but gave MPI no way to connect them, so each would run "
        "alone; start them with `mpirun -n {} ...`",
        processes, processes));
  }
  for (const char* variable : kRankVariables) {
    if (lookup(variable) != nullptr) return true;
  }
  if (const int tasks = slurm_tasks(lookup); tasks > 1) {
    throw LibraryError(fmt::format(
        "Slurm started {} tasks but gave MPI no way to connect them, so each would "
        "run alone; start them with `srun --mpi=pmix ...` (`srun --mpi=list` shows what "
        "this cluster has) or with `mpirun -n {} ...` inside the allocation",
        tasks, tasks));
  }
  // Checked last, as jobs of srun set them for PyTorch.
  if (const int processes = pytorch_processes(lookup); processes > 1) {
    throw LibraryError(fmt::format(
        "MASTER_ADDR, RANK and WORLD_SIZE announce {} processes, which MPI has no way to connect, "
        "so each would run alone; start them with `mpirun -n {} ...`",
        processes, processes));
  }
  return false;
}

void check_connected(int ranks, const EnvironmentLookup& lookup) {
  // mpirun connects its ranks itself; Slurm's variables describe only the step of its daemons.
  if (ranks > 1 || lookup("OMPI_COMM_WORLD_SIZE") != nullptr) return;
  int tasks = slurm_tasks(lookup);
  for (const char* variable : {"PMI_SIZE", "MV2_COMM_WORLD_SIZE"}) {
    if (const char* const size = lookup(variable)) tasks = std::max(tasks, count_of(size));
  }
  if (tasks == 1) return;
  throw LibraryError(fmt::format(
      "the launcher started {} tasks, but MPI connects none of them, so each would run alone; "
      "start them with `srun --mpi=pmix ...` (`srun --mpi=list` shows what this cluster has) or "
      "with the mpirun of the MPI library that this program was built with",
      tasks));
}

// Asks in the order of started_by_launcher().
std::optional<ProcessNumber> process_number(const EnvironmentLookup& lookup) {
  if (lookup("OMPI_COMM_WORLD_SIZE") != nullptr) {
    return number_in("OMPI_COMM_WORLD_RANK", true, lookup);
  }
  if (torchrun_processes(lookup) > 1) return number_in("RANK", false, lookup);
  for (const char* variable : kRankVariables) {
    if (const auto number = number_in(variable, true, lookup)) return number;
  }
  if (slurm_tasks(lookup) > 1) return number_in("SLURM_PROCID", false, lookup);
  if (pytorch_processes(lookup) > 1) return number_in("RANK", false, lookup);
  return {};
}

}  // namespace annulus
