# The version is written once, in python/kvpool/_version.py; package metadata and the extension take it from there.
set(_version_file "${CMAKE_CURRENT_SOURCE_DIR}/python/kvpool/_version.py")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${_version_file}")
file(STRINGS "${_version_file}" _line REGEX "^__version__ = \"[0-9]+\\.[0-9]+\\.[0-9]+" LIMIT_COUNT 1)
if(NOT _line MATCHES "\"(([0-9]+\\.[0-9]+\\.[0-9]+)[^\"]*)\"")
  message(FATAL_ERROR "no line '__version__ = \"X.Y.Z\"' in ${_version_file}")
endif()
set(KVPOOL_FULL_VERSION "${CMAKE_MATCH_1}")
set(KVPOOL_VERSION "${CMAKE_MATCH_2}")
