# Field case f1: what can run code or trusts its input reads nothing that came from a network. Only Cap'n Proto does, and
# the readers of the DHT's datagrams and of safetensors, which are fuzzed.
#   cmake -DSOURCE_DIR=… -P sources_test.cmake
set(forbidden "torch::load|pickle_load|jit::load|import_ir|jit::pickle|jit::unpickle|dlopen|popen|[^_]system\\(")
# The operator's own TorchScript file, named on the command line.
set(allowed expert_server/script_expert.cpp)
foreach(folder net dht gating expert_server dmoe)
  file(GLOB sources RELATIVE ${SOURCE_DIR} ${SOURCE_DIR}/${folder}/*.cpp ${SOURCE_DIR}/${folder}/*.hpp)
  if(NOT sources)
    message(FATAL_ERROR "no sources in ${SOURCE_DIR}/${folder}")
  endif()
  list(REMOVE_ITEM sources ${allowed})
  foreach(source ${sources})
    file(STRINGS ${SOURCE_DIR}/${source} found REGEX "${forbidden}")
    foreach(line ${found})
      string(STRIP "${line}" line)
      if(NOT line MATCHES "^//")
        message(SEND_ERROR "${source}: ${line}")
      endif()
    endforeach()
  endforeach()
endforeach()
