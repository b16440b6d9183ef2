# All dependencies, found once. docs/library.md says what each is for.

# Inside another project, its targets must see the dependencies of ours.
if(NOT PROJECT_IS_TOP_LEVEL)
  set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL TRUE)
endif()
find_package(MPI 3.1 REQUIRED COMPONENTS CXX)
find_package(Threads REQUIRED)
find_package(fmt 9 REQUIRED)
find_package(spdlog 1.10 REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(openblas REQUIRED IMPORTED_TARGET GLOBAL openblas)
pkg_check_modules(hwy REQUIRED IMPORTED_TARGET GLOBAL libhwy)

# The C++ bindings of MPI are gone from the standard; keep their headers out.
target_compile_definitions(MPI::MPI_CXX INTERFACE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)

if(ANNULUS_BUILD_PROGRAM OR ANNULUS_BUILD_TESTS)
  find_package(Boost 1.74 REQUIRED COMPONENTS program_options)
endif()
if(ANNULUS_BUILD_TESTS)
  find_package(GTest REQUIRED)
endif()
if(ANNULUS_BUILD_BENCHMARKS)
  find_package(benchmark QUIET)
  if(NOT benchmark_FOUND)
    message(STATUS "Google Benchmark not found: micro-benchmarks are not built")
    set(ANNULUS_BUILD_BENCHMARKS OFF)
  endif()
endif()
