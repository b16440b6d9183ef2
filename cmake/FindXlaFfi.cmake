# The headers of XLA's foreign function interface, which every jaxlib carries: XlaFfi::headers.
# Looks into XlaFfi_ROOT, the tests' environment in the build folder, then the active virtual
# environment.
file(GLOB _xla_ffi_places ${PROJECT_BINARY_DIR}/venv/lib/python3*/site-packages/jaxlib
  $ENV{VIRTUAL_ENV}/lib/python3*/site-packages/jaxlib)
find_path(XlaFfi_INCLUDE_DIR xla/ffi/api/ffi.h HINTS ${_xla_ffi_places} PATH_SUFFIXES include)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(XlaFfi
  REQUIRED_VARS XlaFfi_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "install jax in the active virtual environment")
mark_as_advanced(XlaFfi_INCLUDE_DIR)

if(XlaFfi_FOUND AND NOT TARGET XlaFfi::headers)
  add_library(XlaFfi::headers INTERFACE IMPORTED)
  set_target_properties(XlaFfi::headers PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES ${XlaFfi_INCLUDE_DIR})
endif()
