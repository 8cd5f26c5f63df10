// kvpool.v2.config.KVCacheManagerConfig, read by attribute into the core's plain structs.
#pragma once

#include <pybind11/pybind11.h>

#include "kvpool/core/config.hpp"

namespace kvpool::bindings {

// The configuration has been validated by its own class; a field that can not be read raises what Python raises.
[[nodiscard]] ManagerConfig read_config(const pybind11::object& config);

}  // namespace kvpool::bindings
