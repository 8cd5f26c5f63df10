// kvpool._native.PoolMemory: the bytes of one pool, as a writable buffer that keeps the memory alive.
#include "pool_memory.hpp"

#include "bindings.hpp"

namespace py = pybind11;

namespace kvpool::bindings {

void bind_pool_memory(py::module_& m) {
    py::class_<PoolMemory>(
        m, "PoolMemory", py::buffer_protocol(),
        "The bytes of one pool (writable buffer of uint8). The memory lives as long as this object or a "
        "view of it, also after the manager has been shut down.")
        .def("__len__", [](const PoolMemory& self) { return self.bytes; })
        .def_property_readonly("address", [](const PoolMemory& self) { return self.arena->address(); })
        .def_buffer([](PoolMemory& self) {
            return py::buffer_info(reinterpret_cast<std::uint8_t*>(self.arena->data()), self.bytes);
        });
}

}  // namespace kvpool::bindings
