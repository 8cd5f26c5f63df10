// The extension module kvpool._native: registration only.
#include <pybind11/pybind11.h>

#include "bindings.hpp"

PYBIND11_MODULE(_native, m) {
    m.doc() = "Compiled core of kvpool; use kvpool.v2.";
    m.attr("__version__") = KVPOOL_VERSION;
    kvpool::bindings::register_errors();
    kvpool::bindings::bind_slot_allocator(m);
    kvpool::bindings::bind_sizing(m);
    kvpool::bindings::bind_sim_device(m);
    kvpool::bindings::bind_pool_memory(m);
    kvpool::bindings::bind_manager(m);
}
