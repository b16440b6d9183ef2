# annulus_library(<folder> SOURCES <...> USES <folders...> LINKS <public targets...>
#                 PRIVATE_LINKS <targets...>)
#
# One static library for one folder of the house. Public headers live in
# <folder>/include/annulus/<folder>/, sources and private headers beside them in <folder>/.
# USES names the floors below; a folder not named there neither compiles nor links.
function(annulus_library folder)
  cmake_parse_arguments(ARG "" "" "SOURCES;USES;LINKS;PRIVATE_LINKS" ${ARGN})
  set(target annulus_${folder})
  add_library(${target} STATIC ${ARG_SOURCES})
  add_library(annulus::${folder} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${folder} POSITION_INDEPENDENT_CODE ON)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target}
    PUBLIC $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include>
           $<INSTALL_INTERFACE:include>
    PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  foreach(used IN LISTS ARG_USES)
    target_link_libraries(${target} PUBLIC annulus::${used})
  endforeach()
  target_link_libraries(${target}
    PUBLIC ${ARG_LINKS}
    PRIVATE ${ARG_PRIVATE_LINKS} $<BUILD_INTERFACE:annulus_options>)
endfunction()
