// Ctrl-C in Python interrupts a wait of the library: its signal handlers run there, and what they
// raise goes to the caller. The functions of Python come as addresses, so that one build serves
// every version of it.
#include <array>

#include <annulus/annulus.h>

extern "C" {

// PyGILState_Ensure, PyGILState_Release, PyErr_CheckSignals, PyErr_Fetch, PyErr_Restore and
// Py_AddPendingCall.
struct AnnulusPythonCalls {
  int (*ensure)();
  void (*release)(int state);
  int (*check_signals)();
  void (*fetch)(void** type, void** value, void** traceback);
  void (*restore)(void* type, void* value, void* traceback);
  int (*add_pending_call)(int (*call)(void*), void* argument);
};

void annulus_python_watch_signals(const AnnulusPythonCalls* calls);
void annulus_python_raise();
void annulus_python_raise_later();
}

namespace {

AnnulusPythonCalls python;
std::array<void*, 3> raised{};  // by a handler: type, value and traceback

// Handlers run on Python's main thread only; elsewhere there is nothing to check.
int signals_raise() {
  const int state = python.ensure();
  const bool raises = python.check_signals() != 0;
  if (raises) python.fetch(&raised[0], &raised[1], &raised[2]);
  python.release(state);
  return raises ? 1 : 0;
}

}  // namespace

void annulus_python_watch_signals(const AnnulusPythonCalls* calls) {
  python = *calls;
  annulus_set_interruption(signals_raise);
}

// To be called with Python's lock held.
void annulus_python_raise() {
  python.restore(raised[0], raised[1], raised[2]);
  raised = {};
}

// For calls that return no status to the package: Python's main thread raises it as soon as it
// runs.
void annulus_python_raise_later() {
  python.add_pending_call(
      [](void*) {
        if (raised[0] == nullptr) return 0;
        annulus_python_raise();
        return -1;
      },
      nullptr);
}
