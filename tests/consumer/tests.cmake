# Projects that use diffattn, by find_package of an installation and by add_subdirectory, built and run by ctest. They are
# compiled without any flag, which makes them the test of the plain x86-64 and of the unoptimised build as well.

if(DIFFATTN_SANITIZE OR CMAKE_CROSSCOMPILING OR diffattn_multi_config OR diffattn_FETCHED)
  return()
endif()

set(diffattn_consumers add_subdirectory)
if(DIFFATTN_INSTALL)
  list(APPEND diffattn_consumers find_package)
endif()
list(JOIN CMAKE_PREFIX_PATH "|" diffattn_prefix_path)
foreach(consumer IN LISTS diffattn_consumers)
  add_test(
    NAME consumer.${consumer}
    COMMAND
      "${CMAKE_COMMAND}" -D CONSUMER=${consumer} -D "SOURCE=${PROJECT_SOURCE_DIR}" -D "BINARY=${PROJECT_BINARY_DIR}" -D
      "WORK=${PROJECT_BINARY_DIR}/consumer" -D "GENERATOR=${CMAKE_GENERATOR}" -D "MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}" -D
      "CXX_COMPILER=${CMAKE_CXX_COMPILER}" -D "PREFIX_PATH=${diffattn_prefix_path}" -D "EIGEN3_DIR=${Eigen3_DIR}" -D
      "XSIMD_INCLUDE_DIR=${DIFFATTN_XSIMD_INCLUDE_DIR}" -D "MAJOR=${PROJECT_VERSION_MAJOR}" -D
      "MINOR=${PROJECT_VERSION_MINOR}" -P "${PROJECT_SOURCE_DIR}/tests/consumer/run.cmake")
  set_tests_properties(consumer.${consumer} PROPERTIES LABELS consumer)
endforeach()
