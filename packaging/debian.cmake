# `cpack` in a build folder makes a Debian package out of what is installed; packaging/debian makes the folder.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME annulus)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "exact attention over sequences sharded across MPI ranks")
set(CPACK_PACKAGE_DESCRIPTION
  "MPI ranks form a mesh with named axes; batch, heads and sequence are sharded
along them, and key/value blocks move around a ring while each rank computes.
This package has the program for mpirun, and the C++ libraries and headers.")
set(CPACK_PACKAGE_CONTACT "$ENV{DEBFULLNAME} <$ENV{DEBEMAIL}>")
set(CPACK_STRIP_FILES TRUE)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS TRUE)
# The libraries are static, so that programs link what these need.
set(annulus_mpi_dev libopenmpi-dev)
if(MPI_CXX_LIBRARIES MATCHES mpich)
  set(annulus_mpi_dev libmpich-dev)
endif()
set(CPACK_DEBIAN_PACKAGE_DEPENDS
  "${annulus_mpi_dev}, libfmt-dev, libspdlog-dev, libopenblas-dev, libhwy-dev, pkgconf | pkg-config, python3:any")
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "mpi-default-bin, python3-numpy")
# What Debian wants of /usr/share/doc, in the staged tree.
set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/packaging/debian_documents.cmake)
include(CPack)
