# GPU parts: kernels are compiled by nvcc to fatbin + PTX, embedded, and loaded through the driver at run time; nothing links
# to libcuda or libcudart. There are no kernels yet, so this only settles the choice and says which way it went.
set(KVPOOL_WITH_CUDA OFF)
if(KVPOOL_CUDA STREQUAL "OFF")
  message(STATUS "kvpool: GPU kernels off (KVPOOL_CUDA=OFF)")
else()
  find_program(KVPOOL_NVCC nvcc HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin)
  if(KVPOOL_NVCC AND NOT EXISTS "${KVPOOL_NVCC}") # a name given by hand
    message(STATUS "kvpool: KVPOOL_NVCC=${KVPOOL_NVCC} does not exist")
    set(KVPOOL_NVCC "")
  endif()
  if(KVPOOL_NVCC)
    set(KVPOOL_WITH_CUDA ON)
    message(STATUS "kvpool: nvcc found (${KVPOOL_NVCC}); this version has no GPU kernels to build")
  elseif(KVPOOL_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVPOOL_CUDA=ON needs nvcc (CUDA toolkit 12 or newer) and none was found on PATH, in CUDA_HOME or in "
                        "/usr/local/cuda. Install the toolkit, name it with -DKVPOOL_NVCC=/path/to/nvcc, or use KVPOOL_CUDA=AUTO")
  else()
    message(STATUS "kvpool: no nvcc found, building without GPU kernels (KVPOOL_CUDA=AUTO)")
  endif()
endif()
