# Finds what the headers include, xsimd and Eigen, for the build and for the installed package alike. Defines
# diffattn::xsimd and Eigen3::Eigen, or says in diffattn_MISSING what is not there. Uses what the including project has
# already defined.

set(diffattn_MISSING "")

# Only the directory of xsimd: Debian's package of xsimd 8.1 defines a target that links a library which does not exist.
if(NOT TARGET diffattn::xsimd)
  if(TARGET xsimd)
    add_library(diffattn::xsimd INTERFACE IMPORTED)
    set_property(TARGET diffattn::xsimd PROPERTY INTERFACE_INCLUDE_DIRECTORIES
                                                 "$<TARGET_PROPERTY:xsimd,INTERFACE_INCLUDE_DIRECTORIES>")
  else()
    find_path(DIFFATTN_XSIMD_INCLUDE_DIR xsimd/xsimd.hpp HINTS "${xsimd_ROOT}" ENV xsimd_ROOT PATH_SUFFIXES include
              DOC "Directory that holds xsimd/xsimd.hpp")
    mark_as_advanced(DIFFATTN_XSIMD_INCLUDE_DIR)
    set(diffattn_xsimd_major 0)
    if(EXISTS "${DIFFATTN_XSIMD_INCLUDE_DIR}/xsimd/config/xsimd_config.hpp")
      file(STRINGS "${DIFFATTN_XSIMD_INCLUDE_DIR}/xsimd/config/xsimd_config.hpp" diffattn_xsimd_major
           REGEX "define XSIMD_VERSION_MAJOR ")
      string(REGEX MATCH "[0-9]+$" diffattn_xsimd_major "${diffattn_xsimd_major}")
    endif()
    if(diffattn_xsimd_major GREATER_EQUAL 8)
      add_library(diffattn::xsimd INTERFACE IMPORTED)
      # Naming a directory that the compiler searches anyway would break the #include_next of the standard headers.
      if(NOT DIFFATTN_XSIMD_INCLUDE_DIR IN_LIST CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES)
        set_property(TARGET diffattn::xsimd PROPERTY INTERFACE_INCLUDE_DIRECTORIES "${DIFFATTN_XSIMD_INCLUDE_DIR}")
      endif()
    else()
      list(APPEND diffattn_MISSING "xsimd >= 8 (set DIFFATTN_XSIMD_INCLUDE_DIR to the directory that holds xsimd/xsimd.hpp)")
    endif()
    unset(diffattn_xsimd_major)
  endif()
endif()

# Asked for without a version, since Eigen 5 declares itself incompatible with every request for 3.x.
if(NOT TARGET Eigen3::Eigen)
  find_package(Eigen3 CONFIG QUIET)
  if(NOT Eigen3_FOUND)
    list(APPEND diffattn_MISSING "Eigen >= 3.4 (set Eigen3_DIR to the directory that holds Eigen3Config.cmake)")
  elseif(Eigen3_VERSION VERSION_LESS 3.4)
    list(APPEND diffattn_MISSING "Eigen >= 3.4 (found ${Eigen3_VERSION} in ${Eigen3_DIR})")
  endif()
endif()
