if(NOT CMAKE_SYSTEM_NAME STREQUAL Linux)  # epoll, recvmmsg, /proc and signals as Linux has them. Field case e18.
  message(FATAL_ERROR "dmoe runs on Linux (Debian 12 or 13); this system is ${CMAKE_SYSTEM_NAME}. Use a Linux machine, "
    "container or WSL 2.")
endif()

# Every third-party package, as Debian 12 and 13 ship them. deploy/install-deps.sh installs all of them.
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(Boost 1.81 REQUIRED)
find_package(CapnProto REQUIRED)
# CVE-2022-46149: readers of lists of pointers step out of bounds. Field case f6.
if(CapnProto_VERSION VERSION_LESS 0.9.2 OR
   (CapnProto_VERSION VERSION_GREATER_EQUAL 0.10 AND CapnProto_VERSION VERSION_LESS 0.10.3))
  message(FATAL_ERROR "Cap'n Proto ${CapnProto_VERSION} reads out of bounds on hostile messages; use 0.9.2, 0.10.3 or newer")
endif()
find_package(OpenSSL REQUIRED)
pkg_check_modules(sodium REQUIRED IMPORTED_TARGET libsodium)
find_package(ZLIB REQUIRED)
# Before RocksDB, which finds gflags under another target name: Torch would then make a "gflags" without a library.
find_package(Torch REQUIRED)
if(TORCH_CXX_FLAGS MATCHES "_GLIBCXX_USE_CXX11_ABI=0")  # Field case e5.
  message(FATAL_ERROR "this libtorch (${TORCH_INSTALL_PREFIX}) was built with the old C++ ABI and cannot be linked with "
    "Boost or RocksDB; use Debian's libtorch-dev, or the upstream build that is called cxx11-abi")
endif()
find_package(RocksDB REQUIRED)
include(${CMAKE_CURRENT_LIST_DIR}/find_onednn.cmake)
find_package(CLI11 REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED COMPONENTS core)
if(DMOE_BUILD_TESTS)
  find_package(Catch2 REQUIRED)
endif()
