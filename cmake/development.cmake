# What our own tests, benchmarks and examples need, and no user of the library.

option(DIFFATTN_NATIVE "Compile tests, benchmarks and examples for the processor of this machine" ${PROJECT_IS_TOP_LEVEL})
option(DIFFATTN_WERROR "Warnings are errors in tests, benchmarks and examples" OFF)
set(DIFFATTN_SANITIZE "" CACHE STRING "Sanitizers of tests, benchmarks and examples, e.g. address;undefined, or thread")
option(DIFFATTN_GUARD "Tests with every block of memory between pages that trap" OFF)
set(DIFFATTN_FUZZ "" CACHE STRING "Seconds for each libFuzzer target; needs Clang and the sanitizer fuzzer-no-link")

add_library(diffattn_warnings INTERFACE)
if(MSVC)
  target_compile_options(diffattn_warnings INTERFACE /W4 $<$<BOOL:${DIFFATTN_WERROR}>:/WX>)
else()
  target_compile_options(diffattn_warnings INTERFACE -Wall -Wextra -Wconversion -Wshadow
                                                     $<$<BOOL:${DIFFATTN_WERROR}>:-Werror>)
  # GCC 12 takes its own AVX-512 intrinsics, as Eigen calls them, for uninitialised (GCC bug 105593).
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(diffattn_warnings INTERFACE -Wno-maybe-uninitialized -Wno-uninitialized)
  endif()
endif()

# Never linked to the library itself: objects made for this machine do not run on an older one.
add_library(diffattn_native INTERFACE)
if(DIFFATTN_NATIVE)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-march=native DIFFATTN_HAS_MARCH_NATIVE)
  if(DIFFATTN_HAS_MARCH_NATIVE)
    target_compile_options(diffattn_native INTERFACE -march=native)
  else()
    check_cxx_compiler_flag(-mcpu=native DIFFATTN_HAS_MCPU_NATIVE)
    if(DIFFATTN_HAS_MCPU_NATIVE)
      target_compile_options(diffattn_native INTERFACE -mcpu=native)
    endif()
  endif()
endif()

# For the directories below this one.
if(DIFFATTN_SANITIZE)
  list(JOIN DIFFATTN_SANITIZE "," diffattn_sanitizers)
  string(REPLACE " " "" diffattn_sanitizers "${diffattn_sanitizers}")
  add_compile_options(-fsanitize=${diffattn_sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${diffattn_sanitizers})
  if("unsigned-integer-overflow" IN_LIST DIFFATTN_SANITIZE)
    add_compile_options("-fsanitize-ignorelist=${PROJECT_SOURCE_DIR}/cmake/sanitize-ignore.txt")
  endif()
  # GCC warns of the fences in Eigen's thread pool, which the sanitizer ignores.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND "thread" IN_LIST DIFFATTN_SANITIZE)
    add_compile_options(-Wno-tsan)
  endif()
endif()

# Finds a package, or fetches it (`kind` is headers or build, the rest the arguments of diffattn_fetch_<kind>), or explains.
macro(diffattn_need package target kind)
  if(NOT TARGET ${target})
    find_package(${package} QUIET)
  endif()
  if(NOT TARGET ${target} AND DIFFATTN_FETCH_DEPS)
    include("${PROJECT_SOURCE_DIR}/cmake/fetch.cmake")
    if("${kind}" STREQUAL "headers")
      diffattn_fetch_headers(${target} ${ARGN})
    else()
      diffattn_fetch_build(${target} ${ARGN})
    endif()
  endif()
  if(NOT TARGET ${target})
    message(FATAL_ERROR "diffattn: ${package} not found. Install it with `sh cmake/install-deps.sh`, or configure with "
                        "-DDIFFATTN_FETCH_DEPS=ON, or without tests and benchmarks: -DDIFFATTN_BUILD_TESTS=OFF "
                        "-DDIFFATTN_BUILD_BENCH=OFF.")
  endif()
endmacro()

find_package(Threads REQUIRED)
find_package(OpenMP QUIET COMPONENTS CXX) # optional: the OpenMP executor
if(DIFFATTN_BUILD_TESTS)
  diffattn_need(GTest GTest::gtest_main build googletest https://github.com/google/googletest.git v1.15.2
                BUILD_GMOCK=OFF INSTALL_GTEST=OFF)
  find_package(rapidcheck QUIET) # not in every distribution: without it there are no property tests
endif()
if(DIFFATTN_BUILD_BENCH)
  diffattn_need(benchmark benchmark::benchmark build benchmark https://github.com/google/benchmark.git v1.9.1
                BENCHMARK_ENABLE_TESTING=OFF BENCHMARK_ENABLE_GTEST_TESTS=OFF BENCHMARK_ENABLE_INSTALL=OFF
                BENCHMARK_INSTALL_DOCS=OFF)
endif()
# Reads stored results and model checkpoints.
diffattn_need(nlohmann_json nlohmann_json::nlohmann_json headers json https://github.com/nlohmann/json.git v3.11.3
              include)
if(DIFFATTN_BUILD_TESTS OR DIFFATTN_BUILD_EXAMPLES)
  diffattn_need(CLI11 CLI11::CLI11 headers cli11 https://github.com/CLIUtils/CLI11.git v2.3.2 include)
endif()

# <llm/….hpp>: checkpoints, and the language model that an example makes of them. Maps files, so not for Windows.
add_library(diffattn_llm INTERFACE)
target_include_directories(diffattn_llm INTERFACE "${PROJECT_SOURCE_DIR}/examples")
target_link_libraries(diffattn_llm INTERFACE diffattn::diffattn nlohmann_json::nlohmann_json)
