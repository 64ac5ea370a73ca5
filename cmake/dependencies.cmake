# The dependencies of the library, installed ones first, fetched if DIFFATTN_FETCH_DEPS allows it.

set(diffattn_own_eigen TRUE)
if(TARGET Eigen3::Eigen)
  set(diffattn_own_eigen FALSE)
endif()

include("${CMAKE_CURRENT_LIST_DIR}/find_dependencies.cmake")

if(diffattn_MISSING AND DIFFATTN_FETCH_DEPS)
  include("${CMAKE_CURRENT_LIST_DIR}/fetch.cmake")
  if(diffattn_MISSING MATCHES "xsimd")
    diffattn_fetch_headers(diffattn::xsimd xsimd https://github.com/xtensor-stack/xsimd.git 13.2.0 include)
  endif()
  if(diffattn_MISSING MATCHES "Eigen")
    if(TARGET Eigen3::Eigen)
      message(FATAL_ERROR "diffattn: the installed Eigen ${Eigen3_VERSION} is too old and has already been loaded from "
                          "${Eigen3_DIR}. Configure with -DCMAKE_DISABLE_FIND_PACKAGE_Eigen3=ON to fetch a newer one.")
    endif()
    diffattn_fetch_headers(Eigen3::Eigen eigen https://gitlab.com/libeigen/eigen.git 3.4.0 .)
  endif()
  set(diffattn_MISSING "")
  set(diffattn_FETCHED TRUE)
endif()

if(diffattn_MISSING)
  list(JOIN diffattn_MISSING "\n  " diffattn_MISSING)
  message(FATAL_ERROR "diffattn: not found:\n  ${diffattn_MISSING}\n"
                      "Install them with `sh cmake/install-deps.sh`, or configure with -DDIFFATTN_FETCH_DEPS=ON.")
endif()

# A parent project that links diffattn must see the targets too. (One that it defined itself it sees already.)
get_target_property(diffattn_imported diffattn::xsimd IMPORTED_GLOBAL)
if(NOT diffattn_imported)
  set_target_properties(diffattn::xsimd PROPERTIES IMPORTED_GLOBAL TRUE)
endif()
if(diffattn_own_eigen)
  get_target_property(diffattn_imported Eigen3::Eigen IMPORTED_GLOBAL)
  if(NOT diffattn_imported)
    set_target_properties(Eigen3::Eigen PROPERTIES IMPORTED_GLOBAL TRUE)
  endif()
endif()
