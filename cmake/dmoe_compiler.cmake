# Language level, warnings, sanitizers and output folders that every dmoe target shares.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
# -O2, not CMake's -O3: the arithmetic is libtorch's, so -O3 adds build time and no speed.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

# Reading and instantiating Asio, Beast and torch costs most files more than their own code does.
if(DMOE_UNITY_BUILD)
  set(CMAKE_UNITY_BUILD ON)
  set(CMAKE_UNITY_BUILD_BATCH_SIZE 10)
endif()

# It links a program in a fifth of the time that the usual linker takes.
find_program(DMOE_GOLD ld.gold)
if(DMOE_GOLD)
  add_link_options(-fuse-ld=gold)
endif()

find_program(DMOE_CCACHE ccache)
if(DMOE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${DMOE_CCACHE})
endif()

if(DMOE_SANITIZE)
  add_compile_options(-fsanitize=${DMOE_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=undefined)
  add_link_options(-fsanitize=${DMOE_SANITIZE})
  if(DMOE_SANITIZE MATCHES undefined)  # What it puts before functions, clang 14 cannot put before parts of coroutines.
    add_compile_options($<$<CXX_COMPILER_ID:Clang>:-fno-sanitize=function>)
  endif()
endif()
if(DMOE_SANITIZE STREQUAL "thread")  # Asio's fences, which the thread sanitizer does not follow.
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
endif()

# Warnings apply to the project's own sources only: generated Cap'n Proto code does not link this.
add_library(dmoe_warnings INTERFACE)
target_compile_options(dmoe_warnings INTERFACE -Wall -Wextra -Wpedantic
  # gcc 12 sees overlapping copies in `"text" + std::to_string(n)` (gcc bug 105651).
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
  # Takes sources that are included into a unity source for headers.
  $<$<AND:$<BOOL:${DMOE_UNITY_BUILD}>,$<CXX_COMPILER_ID:GNU>>:-Wno-subobject-linkage>
  $<$<BOOL:${DMOE_WARNINGS_AS_ERRORS}>:-Werror>)
