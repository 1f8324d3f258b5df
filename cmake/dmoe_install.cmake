# An installed tree: programs, libraries, headers under include/dmoe/<folder>, and what find_package(dmoe) reads.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/dmoe)
install(TARGETS dmoe_schema dmoe_dht_schema dmoe_net dmoe_net_tensor dmoe_dht dmoe_gating dmoe_expert_server dmoe_dmoe
  EXPORT dmoe_targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET HEADERS DESTINATION include/dmoe
  INCLUDES DESTINATION include/dmoe)
install(DIRECTORY ${PROJECT_BINARY_DIR}/generated/net DESTINATION include/dmoe FILES_MATCHING PATTERN "*.capnp.h")
install(EXPORT dmoe_targets NAMESPACE dmoe:: DESTINATION ${package_dir})
install(TARGETS dmoe RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/dmoe-config.cmake.in ${PROJECT_BINARY_DIR}/dmoe-config.cmake
  INSTALL_DESTINATION ${package_dir})
# Before 1.0 every minor version may change the API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/dmoe-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/dmoe-config.cmake ${PROJECT_BINARY_DIR}/dmoe-config-version.cmake
  ${CMAKE_CURRENT_LIST_DIR}/find_onednn.cmake
  DESTINATION ${package_dir})
