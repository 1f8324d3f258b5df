# Installs the build, then configures, builds and runs projects that know nothing but the installed tree.
#   cmake -DBUILD_DIR=… -DWORK_DIR=… -DSOURCE_DIR=… [-DLAUNCHER=…] -P install_test.cmake
file(REMOVE_RECURSE ${WORK_DIR})

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${ARGV}:\n${output}")
  endif()
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/installed)
foreach(project consumer examples)
  set(source ${SOURCE_DIR}/examples)
  if(project STREQUAL consumer)
    set(source ${SOURCE_DIR}/tests/packaging/consumer)
  endif()
  run(${CMAKE_COMMAND} -G Ninja -S ${source} -B ${WORK_DIR}/${project} -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_PREFIX_PATH=${WORK_DIR}/installed -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
  run(${CMAKE_COMMAND} --build ${WORK_DIR}/${project})
endforeach()

# Port 1 of the loopback: nobody answers there.
execute_process(COMMAND ${WORK_DIR}/consumer/consumer 127.0.0.1:1 RESULT_VARIABLE status OUTPUT_VARIABLE output)
if(NOT status EQUAL 3 OR NOT output MATCHES "127.0.0.1:1")
  message(FATAL_ERROR "the consumer ended with ${status} and said: ${output}")
endif()
foreach(example mnist_dmoe remote_sequential text_transformer)
  execute_process(COMMAND ${WORK_DIR}/examples/${example}/${example} RESULT_VARIABLE status ERROR_VARIABLE output)
  if(NOT status EQUAL 1 OR NOT output MATCHES "usage: ${example} HOST:PORT")
    message(FATAL_ERROR "${example} ended with ${status} and said: ${output}")
  endif()
endforeach()
execute_process(COMMAND ${WORK_DIR}/installed/bin/dmoe --version RESULT_VARIABLE status OUTPUT_VARIABLE output)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "the installed program does not start: ${status}")
endif()
