# Configures, builds and runs one consumer project in a directory of its own.
#   cmake -D CONSUMER=<folder> -D SOURCE=… -D BINARY=… -D WORK=… -D GENERATOR=… … -P run.cmake

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "failed (${result}): ${command}")
  endif()
endfunction()

set(work "${WORK}/${CONSUMER}")
file(REMOVE_RECURSE "${work}")
file(MAKE_DIRECTORY "${work}")
string(REPLACE "|" ";" prefixes "${PREFIX_PATH}")

if(CONSUMER STREQUAL "find_package")
  run("${CMAKE_COMMAND}" --install "${BINARY}" --prefix "${work}/installed")

  # The package knows neither this machine's processor nor this tree.
  file(GLOB_RECURSE package "${work}/installed/*.cmake")
  if(NOT package)
    message(FATAL_ERROR "no package was installed")
  endif()
  foreach(file IN LISTS package)
    file(READ "${file}" text)
    string(FIND "${text}" "${SOURCE}/" at)
    if(NOT at EQUAL -1 OR text MATCHES "-march|-mcpu")
      message(FATAL_ERROR "${file} names the source tree or a processor")
    endif()
  endforeach()
  # A package is moved before it is used.
  file(RENAME "${work}/installed" "${work}/moved")
  list(PREPEND prefixes "${work}/moved")
endif()

# By the environment, since a list does not survive as an argument.
cmake_path(CONVERT "${prefixes}" TO_NATIVE_PATH_LIST prefixes)
set(ENV{CMAKE_PREFIX_PATH} "${prefixes}")

# Compilers take flags from these; the consumer has none.
unset(ENV{CXXFLAGS})
unset(ENV{LDFLAGS})

run("${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}/${CONSUMER}" -B "${work}/build" -G "${GENERATOR}"
    "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}" "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}"
    "-DEigen3_DIR=${EIGEN3_DIR}" "-DDIFFATTN_XSIMD_INCLUDE_DIR=${XSIMD_INCLUDE_DIR}" "-DDIFFATTN_SOURCE_DIR=${SOURCE}"
    "-DEXPECTED_MAJOR=${MAJOR}" "-DEXPECTED_MINOR=${MINOR}" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON --no-warn-unused-cli)

file(READ "${work}/build/compile_commands.json" commands)
if(commands MATCHES "-march|-mcpu|-mavx|-fopenmp|-O[123]")
  message(FATAL_ERROR "diffattn adds code generation flags: ${commands}")
endif()

run("${CMAKE_COMMAND}" --build "${work}/build")
run("${work}/build/consumer")
