// kvpool._native.SlotAllocator: the native slot allocator by itself, for tests. Same names as its Python twin.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "bindings.hpp"
#include "kvpool/core/errors.hpp"
#include "kvpool/storage/slot_allocator.hpp"

namespace py = pybind11;

namespace kvpool::bindings {
namespace {

// An id that no allocator has is not occupied: any Python integer of 64 bits may be asked about.
SlotId to_slot(std::int64_t id) {
    const auto narrow = static_cast<std::int32_t>(id);
    return narrow == id ? SlotId(narrow) : kBadSlot;
}

std::vector<std::int32_t> to_values(const std::vector<SlotId>& ids) {
    std::vector<std::int32_t> values;
    values.reserve(ids.size());
    for (const SlotId id : ids) {
        values.push_back(id.value());
    }
    return values;
}

bool is_intact(const SlotAllocator& allocator) {
    try {
        allocator.audit();
    } catch (const CorruptedError&) {
        return false;
    }
    return true;
}

}  // namespace

void bind_slot_allocator(py::module_& m) {
    py::class_<SlotAllocator>(m, "SlotAllocator", "Hands out slot ids, always the lowest free one.")
        .def(py::init<std::int64_t>(), py::arg("capacity"))
        .def_property_readonly("capacity", &SlotAllocator::capacity)
        .def_property_readonly("target_capacity", &SlotAllocator::target_capacity)
        .def_property_readonly("active", &SlotAllocator::num_active)
        .def_property_readonly("num_free", &SlotAllocator::num_free)
        .def_property_readonly("num_occupied", &SlotAllocator::num_occupied)
        .def_property_readonly("num_overflow", &SlotAllocator::num_overflow)
        .def_property_readonly("shrink_in_progress", &SlotAllocator::shrink_in_progress)
        .def("allocate", [](SlotAllocator& self) { return self.allocate().value(); })
        .def(
            "allocate_many",
            [](SlotAllocator& self, std::int64_t count) { return to_values(self.allocate_many(count)); },
            py::arg("count"))
        .def(
            "release", [](SlotAllocator& self, std::int64_t slot) { self.release(to_slot(slot)); }, py::arg("slot"))
        .def(
            "is_occupied", [](const SlotAllocator& self, std::int64_t slot) { return self.is_occupied(to_slot(slot)); },
            py::arg("slot"))
        .def("occupied_ids", [](const SlotAllocator& self) { return to_values(self.occupied_ids()); })
        .def("slots_blocking_shrink", [](const SlotAllocator& self) { return to_values(self.slots_blocking_shrink()); })
        .def("expand", &SlotAllocator::expand, py::arg("capacity"))
        .def("prepare_for_shrink", &SlotAllocator::prepare_for_shrink, py::arg("capacity"))
        .def("finish_shrink", &SlotAllocator::finish_shrink)
        .def("audit", &is_intact, "Whether the invariants hold; O(capacity).");
}

}  // namespace kvpool::bindings
