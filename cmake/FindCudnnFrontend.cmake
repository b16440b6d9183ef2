# The headers of cudnn-frontend: CudnnFrontend::headers, CudnnFrontend_VERSION. Looks into
# CudnnFrontend_ROOT, then where scripts/get_cudnn_frontend puts them.
file(GLOB _cudnn_frontend_fetched ${PROJECT_SOURCE_DIR}/third_party/cudnn-frontend-*)
list(SORT _cudnn_frontend_fetched COMPARE NATURAL ORDER DESCENDING)
find_path(CudnnFrontend_INCLUDE_DIR cudnn_frontend.h
  HINTS ${_cudnn_frontend_fetched}
  PATH_SUFFIXES include)
if(CudnnFrontend_INCLUDE_DIR)
  file(STRINGS ${CudnnFrontend_INCLUDE_DIR}/cudnn_frontend_version.h _cudnn_frontend_lines
    REGEX "#define CUDNN_FRONTEND_(MAJOR|MINOR|PATCH)_VERSION ")
  string(REGEX REPLACE
    ".*MAJOR_VERSION ([0-9]+).*MINOR_VERSION ([0-9]+).*PATCH_VERSION ([0-9]+).*" "\\1.\\2.\\3"
    CudnnFrontend_VERSION "${_cudnn_frontend_lines}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CudnnFrontend
  REQUIRED_VARS CudnnFrontend_INCLUDE_DIR
  VERSION_VAR CudnnFrontend_VERSION
  REASON_FAILURE_MESSAGE "scripts/get_cudnn_frontend fetches it")
mark_as_advanced(CudnnFrontend_INCLUDE_DIR)

if(CudnnFrontend_FOUND AND NOT TARGET CudnnFrontend::headers)
  add_library(CudnnFrontend::headers INTERFACE IMPORTED)
  # Imported, so its own warnings stay out of ours.
  set_target_properties(CudnnFrontend::headers PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES ${CudnnFrontend_INCLUDE_DIR})
endif()
