# Pinned releases for machines without the packages. FETCHCONTENT_SOURCE_DIR_<NAME> points to a local copy instead.

include(FetchContent)

# A header-only dependency: none of its own CMake code runs, and its headers count as system headers.
function(diffattn_fetch_headers target name repository tag include_directory)
  FetchContent_Declare(
    ${name}
    GIT_REPOSITORY ${repository}
    GIT_TAG ${tag}
    GIT_SHALLOW TRUE
    GIT_PROGRESS TRUE
    SOURCE_SUBDIR .headers-only)
  FetchContent_MakeAvailable(${name})
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  set_property(TARGET ${target} PROPERTY INTERFACE_INCLUDE_DIRECTORIES "${${name}_SOURCE_DIR}/${include_directory}")
endfunction()

# A dependency that is built. The settings after the tag are plain variables, so that they end with the function.
function(diffattn_fetch_build target name repository tag)
  FetchContent_Declare(
    ${name}
    GIT_REPOSITORY ${repository}
    GIT_TAG ${tag}
    GIT_SHALLOW TRUE
    GIT_PROGRESS TRUE)
  set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)
  foreach(setting IN LISTS ARGN)
    string(REPLACE "=" ";" setting "${setting}")
    list(GET setting 0 setting_name)
    list(GET setting 1 setting_value)
    set(${setting_name} ${setting_value})
  endforeach()
  FetchContent_MakeAvailable(${name})
  # Its headers are not held to our warnings.
  get_target_property(actual ${target} ALIASED_TARGET)
  get_target_property(include_directories ${actual} INTERFACE_INCLUDE_DIRECTORIES)
  set_property(TARGET ${actual} APPEND PROPERTY INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${include_directories}")
endfunction()
