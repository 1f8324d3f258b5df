# One target per folder: dmoe_<name>, known to others as dmoe::<name>.

# dmoe_library(<name> SOURCES … PUBLIC_HEADERS … LINK_PUBLIC … LINK_PRIVATE …)
# Headers are included from the root of the tree ("dht/routing_table.hpp"); only the public ones are installed.
function(dmoe_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;PUBLIC_HEADERS;LINK_PUBLIC;LINK_PRIVATE" ${ARGN})
  add_library(dmoe_${name} STATIC ${arg_SOURCES})
  add_library(dmoe::${name} ALIAS dmoe_${name})
  set_target_properties(dmoe_${name} PROPERTIES EXPORT_NAME ${name})
  target_sources(dmoe_${name} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${arg_PUBLIC_HEADERS})
  target_compile_features(dmoe_${name} PUBLIC cxx_std_20)
  target_link_libraries(dmoe_${name} PUBLIC ${arg_LINK_PUBLIC} PRIVATE ${arg_LINK_PRIVATE} $<BUILD_INTERFACE:dmoe_warnings>)
endfunction()

# Compiles the torch headers that most torch files include, once for all targets. Not <torch/torch.h>: what that leaves
# to be instantiated costs every file that reads it 8 s of compiling, precompiled or not; these cost under 3.
# The first caller makes the header, the others share it, so all must be compiled with the same flags.
function(dmoe_precompile_torch target)
  if(NOT TARGET dmoe_torch_pch)
    file(WRITE ${PROJECT_BINARY_DIR}/generated/torch_pch.cpp "// Carries the precompiled torch header.\n")
    add_library(dmoe_torch_pch OBJECT ${PROJECT_BINARY_DIR}/generated/torch_pch.cpp)
    # Same warning flags as its users: -Wpedantic changes predefined macros, and gcc then refuses the header.
    target_link_libraries(dmoe_torch_pch PUBLIC torch PRIVATE dmoe_warnings)
    target_precompile_headers(dmoe_torch_pch PRIVATE <torch/types.h> <torch/utils.h>
      <torch/csrc/autograd/custom_function.h> <torch/nn/cloneable.h> <torch/nn/modules/linear.h>
      <torch/nn/modules/normalization.h> <torch/optim/adam.h> <torch/optim/sgd.h>)
  endif()
  get_target_property(type ${target} TYPE)
  if(type STREQUAL EXECUTABLE)
    # Programs would be compiled with -fPIE, which does not go with a header compiled with -fPIC.
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_precompile_headers(${target} REUSE_FROM dmoe_torch_pch)
endfunction()

# Compiles files of the calling folder for loops over much memory: at -O2 gcc 12 vectorizes next to none (WebSocket masking
# runs at 9 GB/s instead of 56), and a square root that may set errno is never vectorized.
function(dmoe_vectorize)
  set_source_files_properties(${ARGN} PROPERTIES
    COMPILE_OPTIONS "$<$<CONFIG:Release>:-O3>;-fno-math-errno;-fno-trapping-math")
endfunction()
