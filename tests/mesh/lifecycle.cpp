// A job from start to end, in which one rank stops or dies on the way: for lifecycle_test.py.

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include <annulus/mesh/mesh.hpp>

using namespace annulus;

namespace {

void say(const std::string& text) {
  std::fputs(("lifecycle: " + text + "\n").c_str(), stderr);
}

}  // namespace

// lifecycle SECONDS STAGE RANK SIGNAL: the rank sends itself the signal when it reaches the stage;
// the others wait for it no longer than the seconds.
int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const Watchdog::Seconds timeout(std::atof(argv[1]));
  const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");
  const auto reach = [&, stage = std::string(argv[2]),
                      hit = rank != nullptr && std::string(rank) == argv[3],
                      number = std::atoi(argv[4])](const char* name) {
    if (hit && stage == name) (void)std::raise(number);
  };
  try {
    reach("start");
    MpiSession session(&argc, &argv, timeout, say);
    {
      reach("mesh");
      Mesh mesh(MeshShape({{"sp", session.size()}}), session.world(), Watchdog(timeout));
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
