// What Manager.pool_memory() gives.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "kvpool/device/device.hpp"

namespace kvpool::bindings {

struct PoolMemory {
    std::shared_ptr<Arena> arena;
    pybind11::ssize_t bytes = 0;  // of its slots; the arena may be larger
};

}  // namespace kvpool::bindings
