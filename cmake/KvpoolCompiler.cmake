# Compiler, flags shared by every target (interface library kvpool_options), and the source glob.
find_package(Threads REQUIRED)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  message(FATAL_ERROR "kvpool needs GCC 11 or newer, found ${CMAKE_CXX_COMPILER_VERSION}; "
                      "KVPOOL_NATIVE=OFF installs the python backend without a compiler")
endif()
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

find_program(KVPOOL_CCACHE ccache)
if(KVPOOL_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${KVPOOL_CCACHE}")
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")

add_library(kvpool_options INTERFACE)
target_compile_options(kvpool_options INTERFACE -Wall -Wextra -Wshadow -Wconversion -Wnon-virtual-dtor -Wold-style-cast
                                                -Woverloaded-virtual -Wimplicit-fallthrough)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12
   AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(kvpool_options INTERFACE -Wno-restrict) # a false positive of GCC 12: "x" + std::string at -O3
endif()
target_compile_definitions(kvpool_options INTERFACE KVPOOL_VERSION="${KVPOOL_FULL_VERSION}")
if(KVPOOL_WERROR)
  target_compile_options(kvpool_options INTERFACE -Werror)
endif()

# Sanitizers hold for every translation unit, googletest aside, so they are directory options.
if(KVPOOL_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(KVPOOL_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer)
  add_link_options(-fsanitize=thread)
elseif(NOT KVPOOL_SANITIZE STREQUAL "")
  message(FATAL_ERROR "KVPOOL_SANITIZE is '${KVPOOL_SANITIZE}'; legal: address, thread, or empty")
endif()

if(KVPOOL_TIDY)
  find_program(KVPOOL_CLANG_TIDY clang-tidy REQUIRED)
  set(CMAKE_CXX_CLANG_TIDY "${KVPOOL_CLANG_TIDY}")
endif()

# New files are picked up by the next build: no list of sources to keep.
function(kvpool_glob_sources target)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${ARGN})
  target_sources(${target} PRIVATE ${sources})
  if(NOT sources)
    file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/empty_${target}.cpp" "")
    target_sources(${target} PRIVATE "${CMAKE_CURRENT_BINARY_DIR}/empty_${target}.cpp")
  endif()
endfunction()
