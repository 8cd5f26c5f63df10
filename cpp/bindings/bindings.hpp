// One registration function per bound class; module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

namespace kvpool::bindings {

// C++ exceptions to the classes of kvpool.errors. Before all classes.
void register_errors();

void bind_slot_allocator(pybind11::module_& m);
void bind_sizing(pybind11::module_& m);
void bind_sim_device(pybind11::module_& m);
void bind_pool_memory(pybind11::module_& m);
void bind_manager(pybind11::module_& m);

}  // namespace kvpool::bindings
