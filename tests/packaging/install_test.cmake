# Installs the build, then configures, builds and runs a project that knows nothing but the installed tree.
#   cmake -DBUILD_DIR=… -DWORK_DIR=… -DSOURCE_DIR=… -P install_test.cmake
file(REMOVE_RECURSE ${WORK_DIR})
foreach(command
    "${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/installed"
    "${CMAKE_COMMAND} -G Ninja -S ${SOURCE_DIR} -B ${WORK_DIR}/build -DCMAKE_PREFIX_PATH=${WORK_DIR}/installed"
    "${CMAKE_COMMAND} --build ${WORK_DIR}/build")
  separate_arguments(command UNIX_COMMAND "${command}")
  execute_process(COMMAND ${command} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${command}:\n${output}")
  endif()
endforeach()

# Port 1 of the loopback: nobody answers there.
execute_process(COMMAND ${WORK_DIR}/build/consumer 127.0.0.1:1 RESULT_VARIABLE status OUTPUT_VARIABLE output)
if(NOT status EQUAL 3 OR NOT output MATCHES "127.0.0.1:1")
  message(FATAL_ERROR "the consumer ended with ${status} and said: ${output}")
endif()
execute_process(COMMAND ${WORK_DIR}/installed/bin/dmoe --version RESULT_VARIABLE status OUTPUT_VARIABLE output)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "the installed program does not start: ${status}")
endif()
