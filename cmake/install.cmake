# Headers and the package for find_package(diffattn). Nothing in it depends on the processor, so it goes to share/.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(diffattn_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/diffattn")

target_include_directories(diffattn INTERFACE "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
install(TARGETS diffattn EXPORT diffattnTargets)
install(EXPORT diffattnTargets NAMESPACE diffattn:: DESTINATION "${diffattn_package_dir}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/diffattn" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
        FILES_MATCHING PATTERN "*.hpp")

configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/diffattnConfig.cmake.in" diffattnConfig.cmake
                              INSTALL_DESTINATION "${diffattn_package_dir}")
write_basic_package_version_file(diffattnConfigVersion.cmake COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/diffattnConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/diffattnConfigVersion.cmake"
              "${CMAKE_CURRENT_LIST_DIR}/find_dependencies.cmake" DESTINATION "${diffattn_package_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
