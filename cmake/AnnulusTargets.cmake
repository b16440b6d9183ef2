# annulus_library(<folder> SOURCES <...> [APART <...>] PUBLIC_HEADERS <...> USES <folders...>
#                 LINKS <public targets...> PRIVATE_LINKS <targets...>)
#
# One static library for one folder of the source tree. Sources and the headers that only they
# include lie in <folder>/; headers that other folders include lie in
# <folder>/include/annulus/<folder>/. Headers that a user of the library may include are
# PUBLIC_HEADERS, and only they are installed; docs/library.md says which they are. Sources that are
# compiled APART are never in one object with others, even in a unity build. USES names the
# libraries below; one that is not named there can be neither included nor linked.
function(annulus_library folder)
  cmake_parse_arguments(ARG "" "" "SOURCES;APART;PUBLIC_HEADERS;USES;LINKS;PRIVATE_LINKS" ${ARGN})
  set(target annulus_${folder})
  add_library(${target} STATIC ${ARG_SOURCES})
  add_library(annulus::${folder} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${folder} POSITION_INDEPENDENT_CODE ON)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target}
    PUBLIC $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include>
    PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  if(ARG_PUBLIC_HEADERS)
    list(TRANSFORM ARG_PUBLIC_HEADERS PREPEND include/annulus/)
    target_sources(${target}
      PUBLIC FILE_SET HEADERS BASE_DIRS include FILES ${ARG_PUBLIC_HEADERS})
  endif()
  foreach(used IN LISTS ARG_USES)
    target_link_libraries(${target} PUBLIC annulus::${used})
  endforeach()
  target_link_libraries(${target}
    PUBLIC ${ARG_LINKS}
    PRIVATE ${ARG_PRIVATE_LINKS} $<BUILD_INTERFACE:annulus_options>)
  if(ARG_APART)
    add_library(${target}_apart OBJECT ${ARG_APART})
    set_target_properties(${target}_apart PROPERTIES POSITION_INDEPENDENT_CODE ON)
    target_include_directories(${target}_apart PRIVATE include ${CMAKE_CURRENT_SOURCE_DIR})
    list(TRANSFORM ARG_USES PREPEND annulus::)
    target_link_libraries(${target}_apart PRIVATE ${ARG_USES} ${ARG_LINKS} annulus_options)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_apart>)
  endif()
endfunction()
