# Let ccache, if it is installed, keep what was compiled. Paths are hashed relative to the checkout, so that every clone on a machine
# shares one cache; the debugger then finds sources from the build folder's parent instead of by absolute paths.
find_program(CCACHE ccache)
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  get_filename_component(checkout ${CMAKE_CURRENT_LIST_DIR} DIRECTORY)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${checkout} CCACHE_NOHASHDIR=true ${CCACHE})
endif()
