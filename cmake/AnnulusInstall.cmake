# Installs the libraries, their headers and the program, and what find_package(annulus) needs.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(annulus_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/annulus)
set(annulus_installed_rooms "")  # for the configuration file
foreach(room IN ITEMS core mesh partition attention ring)
  if(TARGET annulus_${room})
    install(TARGETS annulus_${room} EXPORT annulusTargets
      ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
    list(APPEND annulus_installed_rooms ${room})
  endif()
  if(EXISTS ${PROJECT_SOURCE_DIR}/${room}/include)
    install(DIRECTORY ${PROJECT_SOURCE_DIR}/${room}/include/ TYPE INCLUDE
      FILES_MATCHING PATTERN *.hpp)
  endif()
endforeach()
if(TARGET annulus)
  install(TARGETS annulus RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

install(EXPORT annulusTargets NAMESPACE annulus:: DESTINATION ${annulus_package_dir})
list(JOIN annulus_installed_rooms " " annulus_installed_rooms)
# In lower case it is found under any spelling of the name.
set(config ${PROJECT_BINARY_DIR}/annulus-config.cmake)
set(version ${PROJECT_BINARY_DIR}/annulus-config-version.cmake)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/annulus-config.cmake.in ${config}
  INSTALL_DESTINATION ${annulus_package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${version} COMPATIBILITY SameMinorVersion)
install(FILES ${config} ${version}
  ${PROJECT_SOURCE_DIR}/cmake/FindCUDNN.cmake ${PROJECT_SOURCE_DIR}/cmake/FindNCCL.cmake
  DESTINATION ${annulus_package_dir})
