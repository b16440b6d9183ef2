#pragma once

// Programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch"): a kernel
// that is launched with the attribute may start while the one before it runs, and then waits for
// its end. This hides the time that a launch takes.
namespace annulus::hopper {

/// The next kernel of the stream may start as soon as all thread blocks have called this.
__device__ __forceinline__ void allow_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// Waits until the kernel before has ended, and all that it has written is visible.
__device__ __forceinline__ void await_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace annulus::hopper
