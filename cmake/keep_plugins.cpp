// Linked into every program of a build with the address sanitizer. Open MPI unloads its plugins
// before the sanitizer looks for leaks, and what they leave behind would have no name by which
// tests/support/leaks.supp could tell it from leaks of ours: so they stay.
extern "C" int dlclose(void* /*handle*/) noexcept {
  return 0;
}
