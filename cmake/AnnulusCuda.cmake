# The optional GPU side. Sets ANNULUS_HAS_CUDA, ANNULUS_HAS_CUDNN and ANNULUS_HAS_NCCL; folders choose
# their sources by these (x.cpp or no_x.cpp), no source asks for them.
#
# ANNULUS_CUDA: AUTO takes what there is; ON insists on CUDA (cuDNN and NCCL stay optional); OFF.
set(ANNULUS_CUDA AUTO CACHE STRING "Build for CUDA devices: AUTO, ON or OFF")
set_property(CACHE ANNULUS_CUDA PROPERTY STRINGS AUTO ON OFF)
set(ANNULUS_HAS_CUDA FALSE)
set(ANNULUS_HAS_CUDNN FALSE)
set(ANNULUS_HAS_NCCL FALSE)

if(ANNULUS_CUDA STREQUAL "AUTO" AND ANNULUS_SANITIZE)
  message(STATUS "CUDA: off, because of ANNULUS_SANITIZE")
elseif(ANNULUS_CUDA)
  # Hopper's own instructions, and plain code from Ampere on for whatever else can run it.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES "80;90a-real")
  endif()
  # Where the toolkit usually is, if PATH does not say.
  find_program(ANNULUS_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_PATH ENV CUDA_HOME /usr/local/cuda
    PATH_SUFFIXES bin)
  if(ANNULUS_NVCC AND NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    set(CMAKE_CUDA_COMPILER ${ANNULUS_NVCC})
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    if(ANNULUS_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${ANNULUS_CCACHE})
    endif()
    enable_language(CUDA)
    # CMake takes CMAKE_CXX_STANDARD for CUDA too, but 3.25 does not know that nvcc has C++20.
    if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    find_package(CUDAToolkit 12.5 REQUIRED)
    set(ANNULUS_HAS_CUDA TRUE)

    find_package(CUDNN 9.12)
    find_package(CudnnFrontend 1.32)
    if(CUDNN_FOUND AND CudnnFrontend_FOUND)
      set(ANNULUS_HAS_CUDNN TRUE)
    endif()
    find_package(NCCL 2.18)
    if(NCCL_FOUND)
      set(ANNULUS_HAS_NCCL TRUE)
    endif()
  elseif(NOT ANNULUS_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "ANNULUS_CUDA=${ANNULUS_CUDA}, but there is no CUDA compiler: put nvcc on "
                        "PATH or set CMAKE_CUDA_COMPILER")
  endif()
endif()
message(STATUS "CUDA: ${ANNULUS_HAS_CUDA}, cuDNN: ${ANNULUS_HAS_CUDNN}, NCCL: ${ANNULUS_HAS_NCCL}")
