// A job from start to end, in which one rank stops or dies on the way, or aborts the job: for
// lifecycle_test.py. The ranks are mpirun's, or on a store without MPI
// (tests/support/store_ranks.py).

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/mpi_bootstrap.hpp>
#include <annulus/mesh/node_order.hpp>

#include "tests/support/file_store.hpp"

using namespace annulus;

namespace {

void say(const std::string& text) {
  std::fputs(("lifecycle: " + text + "\n").c_str(), stderr);
}

std::function<void()> in_split;

}  // namespace

// In front of MPI's own, as a tool for profiling would be.
extern "C" int MPI_Comm_split(MPI_Comm communicator, int color, int key, MPI_Comm* result) {
  if (in_split) in_split();
  return PMPI_Comm_split(communicator, color, key, result);
}

// lifecycle SECONDS STAGE RANK SIGNAL: the rank sends itself the signal when it reaches the stage;
// the others wait for it no longer than the seconds. At "abort" it ends the job with code 5. At the
// stage "split", MPI allows calls of the main thread only.
int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const Watchdog::Seconds timeout(std::atof(argv[1]));
  const char* const folder = std::getenv("ANNULUS_TEST_STORE");
  const char* const rank =
      std::getenv(folder != nullptr ? "ANNULUS_TEST_RANK" : "OMPI_COMM_WORLD_RANK");
  const auto reach = [&, stage = std::string(argv[2]),
                      hit = rank != nullptr && std::string(rank) == argv[3],
                      number = std::atoi(argv[4])](const char* name) {
    if (hit && stage == name) (void)std::raise(number);
  };
  try {
    reach("start");
    const bool splits = std::string(argv[2]) == "split";
    if (splits) {
      int level = MPI_THREAD_SINGLE;
      check_mpi(MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
    }
    MpiSession session(&argc, &argv, timeout, say);
    if (splits) {
      in_split = [&] { reach("split"); };
      // Every other rank on another node, so that the order is not the one that is there.
      ::setenv("ANNULUS_NODE", session.rank() % 2 == 0 ? "even" : "odd", 1);
      const Communicator ordered = in_node_order(session.world(), Watchdog(timeout), say);
      return 0;
    }
    {
      reach("mesh");
      auto ranks =
          folder != nullptr
              ? make_store_bootstrap(std::make_shared<test::FileStore>(folder), std::atoi(rank),
                                     std::atoi(std::getenv("ANNULUS_TEST_SIZE")))
              : make_mpi_bootstrap(session.world());
      Mesh mesh("sp=-1", std::move(ranks), Watchdog(timeout));
      if (std::string(argv[2]) == "abort" && std::string(rank) == argv[3]) mesh.world().abort(5);
      reach("group");
      (void)mesh.group();
      reach("barrier");
      mesh.world().barrier();
      reach("end");
    }
    if (std::string(argv[2]) == "destructor") {
      reach("destructor");
      return 0;
    }
    session.finish(Watchdog(timeout));
    return 0;
  } catch (const std::exception& error) {
    say(error.what());
    abort_job(3);
  }
}
