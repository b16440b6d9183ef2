# Installs the libraries, their public headers and the program, and what find_package(annulus) and
# pkg-config need. The launcher's libraries belong to the program and stay here.
include(CMakePackageConfigHelpers)

set(annulus_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/annulus)
set(annulus_installed core mesh partition attention ring)
list(TRANSFORM annulus_installed PREPEND annulus_ OUTPUT_VARIABLE annulus_targets)
install(TARGETS ${annulus_targets} EXPORT annulusTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS annulus_all EXPORT annulusTargets)
if(TARGET annulus)
  install(TARGETS annulus RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(PROGRAMS ${PROJECT_SOURCE_DIR}/scripts/annulus_picture
          DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(FILES ${PROJECT_SOURCE_DIR}/scripts/annulus_completion.bash
    DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME annulus)
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/README.md
  ${PROJECT_SOURCE_DIR}/CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs ${PROJECT_SOURCE_DIR}/examples
  DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(PROGRAMS ${PROJECT_SOURCE_DIR}/scripts/check_attention.py
  DESTINATION ${CMAKE_INSTALL_DATADIR}/annulus)
install(FILES ${PROJECT_SOURCE_DIR}/scripts/attention_gradients.py  # imported by the program above
  ${PROJECT_SOURCE_DIR}/scripts/mpi_environment
  DESTINATION ${CMAKE_INSTALL_DATADIR}/annulus)
# `cmake --install --strip` leaves static libraries as they are, although most of what they hold is
# for debuggers.
install(CODE "
  if(CMAKE_INSTALL_DO_STRIP)
    file(GLOB libraries
      \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/libannulus_*.a\")
    execute_process(COMMAND ${CMAKE_STRIP} --strip-debug \${libraries} COMMAND_ERROR_IS_FATAL ANY)
  endif()")

install(EXPORT annulusTargets NAMESPACE annulus:: DESTINATION ${annulus_package_dir})
list(JOIN annulus_installed " " annulus_installed_rooms)  # for the configuration file
# In lower case it is found under any spelling of the name.
set(config ${PROJECT_BINARY_DIR}/annulus-config.cmake)
set(version ${PROJECT_BINARY_DIR}/annulus-config-version.cmake)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/annulus-config.cmake.in ${config}
  INSTALL_DESTINATION ${annulus_package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${version} COMPATIBILITY SameMinorVersion)
install(FILES ${config} ${version}
  ${PROJECT_SOURCE_DIR}/cmake/FindCUDNN.cmake ${PROJECT_SOURCE_DIR}/cmake/FindNCCL.cmake
  DESTINATION ${annulus_package_dir})

# pkg-config. The libraries are static, so programs must link all that they use, each library before
# the libraries that it uses.
list(REVERSE annulus_targets)
list(TRANSFORM annulus_targets PREPEND -l)
set(annulus_pc_libraries ${annulus_targets} ${MPI_CXX_LIBRARIES})
if(ANNULUS_HAS_CUDNN)
  list(APPEND annulus_pc_libraries ${CUDNN_LIBRARY} ${CUDA_nvrtc_LIBRARY})
endif()
if(ANNULUS_HAS_NCCL)
  list(APPEND annulus_pc_libraries ${NCCL_LIBRARY})
endif()
if(ANNULUS_HAS_CUDA)
  list(APPEND annulus_pc_libraries ${CUDA_cudart_static_LIBRARY} -lrt -ldl)
endif()
list(APPEND annulus_pc_libraries -pthread)
list(JOIN annulus_pc_libraries " " annulus_pc_libraries)
list(TRANSFORM MPI_CXX_INCLUDE_DIRS PREPEND -I OUTPUT_VARIABLE annulus_pc_includes)
list(JOIN annulus_pc_includes " " annulus_pc_includes)
# The path from the installed file to the prefix, so that the tree can be moved.
file(RELATIVE_PATH annulus_pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${PROJECT_SOURCE_DIR}/cmake/annulus.pc.in ${PROJECT_BINARY_DIR}/annulus.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/annulus.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(PROJECT_IS_TOP_LEVEL)
  include(${PROJECT_SOURCE_DIR}/packaging/debian.cmake)
endif()
