// kvpool._native.Manager: the native backend, twin of kvpool._py.manager.manager.Manager.
//
// The interpreter lock is held during calls and given away only while the manager's lock is waited for (and while the device
// is drained), so nothing in the core ever runs Python code or touches reference counts without it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"
#include "config.hpp"
#include "describe.hpp"
#include "kvpool/core/errors.hpp"
#include "kvpool/device/sim_device.hpp"
#include "kvpool/manager/manager.hpp"
#include "pool_memory.hpp"
#include "step_call.hpp"

namespace py = pybind11;

namespace kvpool::bindings {
namespace {

using Handle = CacheHandle;
using MaybeInt = std::optional<std::int64_t>;

void wait_without_interpreter_lock(std::mutex& mutex) {
    if (PyGILState_Check() != 0) {
        const py::gil_scoped_release unlocked;
        mutex.lock();
    } else {
        mutex.lock();
    }
}

std::optional<StreamId> to_stream(MaybeInt stream) {
    return stream.has_value() ? std::optional<StreamId>(*stream) : std::nullopt;
}

class PyManager {
public:
    PyManager(const py::object& config, const std::string& device) : core_(read_config(config), device) {}

    [[nodiscard]] Manager& core() noexcept { return core_; }

    py::object step(py::handle handles, py::handle rows, py::handle capacities, py::handle histories, py::handle table,
                    py::handle tokens, py::handle stream) {
        return step_.run(core_, handles, rows, capacities, histories, table, tokens, stream);
    }

private:
    Manager core_;
    StepCall step_;
};

py::object device_handle(PyManager& self) {
    return py::cast(std::dynamic_pointer_cast<SimDevice>(self.core().device()));  // None unless it is one
}

PoolMemory pool_memory(PyManager& self, std::int64_t pool_group, std::int64_t pool) {
    const Pool found = self.core().pool(pool_group, pool);
    static_cast<void>(found.arena()->data());  // UnsupportedError on a device without bytes
    return {found.arena(), static_cast<py::ssize_t>(found.slot_bytes() * found.num_slots())};
}

std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> statistics(PyManager& self) {
    std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> rows;
    for (const SlotStatistics& row : self.core().statistics()) {
        rows.emplace_back(row.total, row.free, row.evictable);
    }
    return rows;
}

py::object scratch_desc(PyManager& self, Handle handle, std::int64_t life_cycle) {
    const std::optional<ScratchDescription> desc = self.core().scratch_desc(handle, life_cycle);
    if (!desc.has_value()) {
        return py::none();
    }
    return py::make_tuple(desc->blocks.beg, desc->blocks.end, desc->slots);
}

py::array to_array(const std::vector<std::int32_t>& values) {
    return py::array_t<std::int32_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::array page_indices(PyManager& self, Handle handle, std::int64_t life_cycle, std::int64_t beam) {
    const auto hold = std::static_pointer_cast<BufferHold>(self.core().attached_buffer(handle, life_cycle, beam));
    if (hold == nullptr) {
        return to_array(self.core().page_indices(handle, life_cycle, beam));
    }
    const Py_buffer& view = hold->view();
    const py::capsule keep_alive(new std::shared_ptr<BufferHold>(hold),
                                 [](void* kept) { delete static_cast<std::shared_ptr<BufferHold>*>(kept); });
    return py::array_t<std::int32_t>({view.shape[0]}, {view.itemsize}, static_cast<std::int32_t*>(view.buf),
                                     keep_alive);
}

void attach_buffer(PyManager& self, Handle handle, std::int64_t beam, std::int64_t life_cycle,
                   const py::object& buffer) {
    if (buffer.is_none()) {
        self.core().attach_buffer(handle, beam, life_cycle, {}, nullptr);
        return;
    }
    const std::shared_ptr<BufferHold> hold = hold_index_row(buffer);
    const std::span<std::int32_t> entries(static_cast<std::int32_t*>(hold->view().buf),
                                          static_cast<std::size_t>(hold->view().shape[0]));
    self.core().attach_buffer(handle, beam, life_cycle, entries, hold);
}

std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> lengths(PyManager& self, Handle handle) {
    const CacheLengths found = self.core().lengths(handle);
    return {found.committed, found.history, found.capacity, found.num_blocks};
}

void hold_lock(PyManager& self, double seconds) {
    self.core().with_lock([&] {
        const py::gil_scoped_release unlocked;
        std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    });
}

void bind_pools(py::class_<PyManager>& manager) {
    manager
        .def("layout", [](PyManager& self) { return describe_layout(self.core().layout(), self.core().pool_plan()); })
        .def("slot_counts", [](PyManager& self) { return self.core().slot_counts(); })
        .def("pool_addresses", [](PyManager& self) { return self.core().pool_addresses(); })
        .def("pool_memory", &pool_memory, py::arg("pool_group"), py::arg("pool"))
        .def("mapped_bytes", [](PyManager& self) { return self.core().mapped_bytes(); })
        .def("device_handle", &device_handle)
        .def("statistics", &statistics)
        .def(
            "clamp_max_seq_len",
            [](PyManager& self, std::int64_t batch_size, std::int64_t token_num_upper_bound) {
                return self.core().clamp_max_seq_len(batch_size, token_num_upper_bound);
            },
            py::arg("batch_size"), py::arg("token_num_upper_bound"))
        .def(
            "synchronize", [](PyManager& self) { self.core().synchronize(); }, py::call_guard<py::gil_scoped_release>())
        .def("snapshot", [](PyManager& self) { return describe_snapshot(self.core().snapshot()); })
        .def("audit", [](PyManager& self) { self.core().audit(); })
        .def("num_open", [](PyManager& self) { return self.core().num_open(); })
        .def("shutdown", [](PyManager& self) { self.core().shutdown(); })
        .def("_hold_lock", &hold_lock, py::arg("seconds"),
             "For tests: holds the manager's lock, not the interpreter's.");
}

void bind_caches(py::class_<PyManager>& manager) {
    const py::arg handle("handle");
    manager.def("create", [](PyManager& self) { return self.core().create(); })
        .def(
            "resume",
            [](PyManager& self, Handle h, MaybeInt stream) { return self.core().resume(h, to_stream(stream)); }, handle,
            py::arg("stream"))
        .def(
            "suspend", [](PyManager& self, Handle h) { self.core().suspend(h); }, handle)
        .def(
            "close", [](PyManager& self, Handle h) { self.core().close(h); }, handle)
        .def(
            "resize",
            [](PyManager& self, Handle h, MaybeInt capacity, MaybeInt history) {
                return self.core().resize(h, capacity, history);
            },
            handle, py::arg("capacity"), py::arg("history"))
        .def(
            "stop_committing", [](PyManager& self, Handle h) { self.core().stop_committing(h); }, handle)
        .def(
            "commit_allowed", [](PyManager& self, Handle h) { return self.core().commit_allowed(h); }, handle)
        .def("lengths", &lengths, handle)
        .def(
            "status", [](PyManager& self, Handle h) { return static_cast<int>(self.core().status(h)); }, handle)
        .def(
            "stream",
            [](PyManager& self, Handle h) {
                const std::optional<StreamId> stream = self.core().stream(h);
                return stream.has_value() ? MaybeInt(stream->value()) : std::nullopt;
            },
            handle)
        .def(
            "set_stream",
            [](PyManager& self, Handle h, std::int64_t stream) { self.core().set_stream(h, StreamId(stream)); }, handle,
            py::arg("stream"))
        .def(
            "beam_width", [](PyManager& self, Handle h) { return self.core().beam_width(h); }, handle)
        .def(
            "set_beam_width",
            [](PyManager& self, Handle h, std::int64_t width) { self.core().set_beam_width(h, width); }, handle,
            py::arg("width"))
        .def(
            "scratch_enabled", [](PyManager& self, Handle h) { return self.core().scratch_enabled(h); }, handle)
        .def(
            "set_scratch_enabled",
            [](PyManager& self, Handle h, bool value) { self.core().set_scratch_enabled(h, value); }, handle,
            py::arg("value"));
}

void bind_pages(py::class_<PyManager>& manager) {
    const py::arg handle("handle");
    manager.def("scratch_desc", &scratch_desc, handle, py::arg("life_cycle"))
        .def("page_indices", &page_indices, handle, py::arg("life_cycle"), py::arg("beam"))
        .def(
            "held_page_indices",
            [](PyManager& self, Handle h, std::int64_t life_cycle, std::int64_t beam) {
                return to_array(self.core().held_page_indices(h, life_cycle, beam));
            },
            handle, py::arg("life_cycle"), py::arg("beam"))
        .def("attach_buffer", &attach_buffer, handle, py::arg("beam"), py::arg("life_cycle"), py::arg("buffer"))
        .def(
            "ssm_slot",
            [](PyManager& self, Handle h, std::int64_t life_cycle, std::int64_t beam) {
                return self.core().ssm_slot(h, life_cycle, beam).value();
            },
            handle, py::arg("life_cycle"), py::arg("beam"))
        .def("step", &PyManager::step, py::arg("handles"), py::arg("rows"), py::arg("capacities"), py::arg("histories"),
             py::arg("table"), py::arg("tokens") = py::none(), py::arg("stream") = py::none());
}

}  // namespace

void bind_manager(py::module_& m) {
    set_lock_waiter(&wait_without_interpreter_lock);
    py::class_<PyManager> manager(m, "Manager",
                                  "The native backend; kvpool.v2._backend.ManagerCore says what its methods mean.");
    manager.def(py::init<const py::object&, const std::string&>(), py::arg("config"), py::arg("device"));
    manager.attr("backend") = "cpp";
    manager.def_property_readonly("device", [](PyManager& self) { return self.core().device_name(); });
    bind_pools(manager);
    bind_caches(manager);
    bind_pages(manager);
}

}  // namespace kvpool::bindings
