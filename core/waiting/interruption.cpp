#include <atomic>

#include <annulus/core/error.hpp>

namespace annulus {
namespace {

std::atomic<int (*)()> asked{nullptr};

}  // namespace

void set_interruption(int (*interrupted)()) noexcept {
  asked = interrupted;
}

bool interrupted() {
  int (*const ask)() = asked;
  return ask != nullptr && ask() != 0;
}

}  // namespace annulus
