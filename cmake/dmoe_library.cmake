# One target per folder: dmoe_<name>, known to others as dmoe::<name>.

# dmoe_library(<name> SOURCES … TORCH_SOURCES … PUBLIC_HEADERS … LINK_PUBLIC … LINK_PRIVATE …)
# TORCH_SOURCES: files that include torch, by themselves or through another header.
# Headers are included from the root of the tree ("dht/routing_table.hpp"); only the public ones are installed.
function(dmoe_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;TORCH_SOURCES;PUBLIC_HEADERS;LINK_PUBLIC;LINK_PRIVATE" ${ARGN})
  add_library(dmoe_${name} STATIC ${arg_SOURCES})
  add_library(dmoe::${name} ALIAS dmoe_${name})
  set_target_properties(dmoe_${name} PROPERTIES EXPORT_NAME ${name})
  target_sources(dmoe_${name} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${arg_PUBLIC_HEADERS})
  target_compile_features(dmoe_${name} PUBLIC cxx_std_20)
  target_link_libraries(dmoe_${name} PUBLIC ${arg_LINK_PUBLIC} PRIVATE ${arg_LINK_PRIVATE} $<BUILD_INTERFACE:dmoe_warnings>)
  if(arg_TORCH_SOURCES)
    dmoe_torch_sources(dmoe_${name} ${arg_TORCH_SOURCES})
  endif()
endfunction()

# Hands a target of position-independent code the torch headers that most torch files include, compiled once for all.
# Not <torch/torch.h>: what that leaves to be instantiated costs every file that reads it 8 s of compiling, precompiled or
# not; these cost under 3. All users must be compiled with the same flags, but for -O1 instead of -O2.
function(dmoe_share_torch_headers target)
  if(NOT TARGET dmoe_torch_pch)
    file(WRITE ${PROJECT_BINARY_DIR}/generated/torch_pch.cpp "// Carries the precompiled torch header.\n")
    add_library(dmoe_torch_pch OBJECT ${PROJECT_BINARY_DIR}/generated/torch_pch.cpp)
    # Same warning flags as its users: -Wpedantic changes predefined macros, and gcc then refuses the header.
    target_link_libraries(dmoe_torch_pch PUBLIC torch PRIVATE dmoe_warnings)
    target_precompile_headers(dmoe_torch_pch PRIVATE <torch/types.h> <torch/utils.h>
      <torch/csrc/autograd/custom_function.h> <torch/nn/cloneable.h> <torch/nn/modules/linear.h>
      <torch/nn/modules/normalization.h> <torch/optim/adam.h> <torch/optim/sgd.h>)
  endif()
  target_precompile_headers(${target} REUSE_FROM dmoe_torch_pch)
endfunction()

# dmoe_torch_sources(<target> <file>…)
# Compiles files as part of a target that has all its libraries, with the shared torch headers. Apart from the target's
# other files: CMake hands a precompiled header to every unity source, and one of 500 MB is not free to those without torch.
function(dmoe_torch_sources target)
  add_library(${target}_torch OBJECT ${ARGN})
  get_target_property(libraries ${target} LINK_LIBRARIES)
  target_link_libraries(${target}_torch PRIVATE ${libraries})
  target_include_directories(${target}_torch PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(${target}_torch PRIVATE $<TARGET_PROPERTY:${target},COMPILE_DEFINITIONS>)
  target_compile_options(${target}_torch PRIVATE $<TARGET_PROPERTY:${target},COMPILE_OPTIONS>)
  dmoe_share_torch_headers(${target}_torch)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_torch>)
endfunction()

# Compiles files of the calling folder for loops over much memory: at -O2 gcc 12 vectorizes next to none (WebSocket masking
# runs at 9 GB/s instead of 56), and a square root that may set errno is never vectorized.
function(dmoe_vectorize)
  set_source_files_properties(${ARGN} PROPERTIES
    COMPILE_OPTIONS "$<$<CONFIG:Release>:-O3>;-fno-math-errno;-fno-trapping-math")
endfunction()
