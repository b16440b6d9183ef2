# Language level, warnings and sanitizers, for every target of the project.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})

if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
endif()

# One cache for all build folders, whatever their names.
find_program(ANNULUS_CCACHE ccache)
if(ANNULUS_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_NOHASHDIR=1 ${ANNULUS_CCACHE})
endif()

add_library(annulus_options INTERFACE)
target_compile_options(annulus_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor>)
if(ANNULUS_WERROR)
  target_compile_options(annulus_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(ANNULUS_SANITIZE)
  add_compile_options(-fsanitize=${ANNULUS_SANITIZE} -fno-omit-frame-pointer
                      -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${ANNULUS_SANITIZE})
endif()
if(ANNULUS_SANITIZE MATCHES address)
  target_sources(annulus_options INTERFACE
    $<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:${CMAKE_CURRENT_LIST_DIR}/keep_plugins.cpp>)
endif()
if(ANNULUS_FUZZ)
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_FLAGS -fsanitize=fuzzer)
  check_cxx_source_compiles("#include <cstddef>
    extern \"C\" int LLVMFuzzerTestOneInput(const unsigned char*, std::size_t) { return 0; }"
    ANNULUS_COMPILER_HAS_LIBFUZZER)
  unset(CMAKE_REQUIRED_FLAGS)
  if(NOT ANNULUS_COMPILER_HAS_LIBFUZZER)
    message(FATAL_ERROR
      "ANNULUS_FUZZ needs Clang with libFuzzer, and ${CMAKE_CXX_COMPILER} (${CMAKE_CXX_COMPILER_ID} "
      "${CMAKE_CXX_COMPILER_VERSION}) does not link -fsanitize=fuzzer. Use the preset fuzz, or "
      "-DCMAKE_CXX_COMPILER=clang++ in a new build folder.")
  endif()
  # Which branches an input takes, for the fuzzer to see; tests/fuzz links the fuzzer itself.
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
