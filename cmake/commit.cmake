# cmake -D SOURCE_DIR=... -D OUTPUT=... -P commit.cmake
#
# Writes a source file with the commit that SOURCE_DIR is at ("1a2b3c4d5e", with "-dirty" appended
# if files differ from it), if the file has another one. "unknown" without Git, or outside of a
# checkout of its own.
cmake_minimum_required(VERSION 3.25)

set(commit unknown)
find_program(git NAMES git)
if(git)
  execute_process(COMMAND ${git} -C ${SOURCE_DIR} rev-parse --show-toplevel
                  OUTPUT_VARIABLE top OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  file(REAL_PATH "${SOURCE_DIR}" source)
  if("${top}" STREQUAL "${source}")
    execute_process(COMMAND ${git} -C ${SOURCE_DIR} describe --always --dirty --abbrev=10 --exclude=*
                    OUTPUT_VARIABLE described RESULT_VARIABLE failed
                    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(NOT failed AND described)
      set(commit ${described})
    endif()
  endif()
endif()
file(CONFIGURE OUTPUT "${OUTPUT}" @ONLY CONTENT
[[// Written by cmake/commit.cmake.
#include "launcher/commit.hpp"

namespace annulus::launcher {

std::string_view commit() noexcept {
  return "@commit@";
}

}  // namespace annulus::launcher
]])
