// The core's values as the plain Python values that kvpool.v2._backend asks for.
#pragma once

#include <pybind11/pybind11.h>

#include "kvpool/manager/snapshot.hpp"
#include "kvpool/storage/layout.hpp"
#include "kvpool/storage/sizing.hpp"

namespace kvpool::bindings {

// In the order of kvpool.v2._backend.Layout's fields, as plain tuples, lists and a dict.
[[nodiscard]] pybind11::tuple describe_layout(const Layout& layout, const PoolPlan& plan);
[[nodiscard]] pybind11::dict describe_snapshot(const ManagerSnapshot& snapshot);

}  // namespace kvpool::bindings
