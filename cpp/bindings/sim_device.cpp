// kvpool._native.SimDevice: the test interface of the sim device. Same names as its Python twin.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "bindings.hpp"
#include "kvpool/core/errors.hpp"
#include "kvpool/device/sim_device.hpp"

namespace py = pybind11;

namespace kvpool::bindings {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;  // the device's lock may be waited for

SimDevice::Order to_order(const std::string& order) {
    if (order != "adverse" && order != "fifo") {
        throw ArgumentError("order must be \"adverse\" or \"fifo\", got \"" + order + "\"");
    }
    return order == "fifo" ? SimDevice::Order::fifo : SimDevice::Order::adverse;
}

SimDevice::Failure to_failure(const std::string& error) {
    if (error != "oom" && error != "cu") {
        throw ArgumentError("error must be \"oom\" or \"cu\", got \"" + error + "\"");
    }
    return error == "oom" ? SimDevice::Failure::oom : SimDevice::Failure::cu;
}

py::bytes read_result(SimDevice& self, std::int64_t ticket) {
    std::string data;
    {
        const py::gil_scoped_release unlocked;
        data = self.read_result(ticket);
    }
    return py::bytes(data);
}

void enqueue_write(SimDevice& self, std::int64_t stream, Address address, const py::bytes& data) {
    std::string copied(data);
    const py::gil_scoped_release unlocked;
    self.enqueue_write(StreamId(stream), address, std::move(copied));
}

}  // namespace

void bind_sim_device(py::module_& m) {
    py::class_<SimDevice, std::shared_ptr<SimDevice>>(
        m, "SimDevice", "Test interface of the sim device: queued work runs as late as recorded events permit.")
        .def(py::init(&SimDevice::create))
        .def_property_readonly("name", [](const SimDevice&) { return "sim"; })
        .def_property_readonly("granularity", &SimDevice::granularity)
        // streams and events
        .def(
            "create_stream", [](SimDevice& self) { return self.create_stream().value(); }, Unlocked())
        .def(
            "record", [](SimDevice& self, std::int64_t stream) { return self.record(StreamId(stream)).value(); },
            py::arg("stream"), Unlocked())
        .def(
            "wait",
            [](SimDevice& self, std::int64_t stream, std::uint64_t event) {
                self.wait(StreamId(stream), EventId(event));
            },
            py::arg("stream"), py::arg("event"), Unlocked())
        .def(
            "query", [](SimDevice& self, std::uint64_t event) { return self.query(EventId(event)); }, py::arg("event"),
            Unlocked())
        .def(
            "synchronize_event", [](SimDevice& self, std::uint64_t event) { self.synchronize_event(EventId(event)); },
            py::arg("event"), Unlocked())
        .def("synchronize", &SimDevice::synchronize, Unlocked())
        // the test's own work
        .def("enqueue_write", &enqueue_write, py::arg("stream"), py::arg("address"), py::arg("data"))
        .def(
            "enqueue_copy",
            [](SimDevice& self, std::int64_t stream, Address destination, Address source, std::int64_t size) {
                self.enqueue_copy(StreamId(stream), destination, source, size);
            },
            py::arg("stream"), py::arg("destination"), py::arg("source"), py::arg("size"), Unlocked())
        .def(
            "enqueue_read",
            [](SimDevice& self, std::int64_t stream, Address address, std::int64_t size) {
                return self.enqueue_read(StreamId(stream), address, size);
            },
            py::arg("stream"), py::arg("address"), py::arg("size"), Unlocked())
        .def("read_result", &read_result, py::arg("ticket"))
        .def(
            "run_all",
            [](SimDevice& self, const std::string& order, std::uint64_t seed) { self.run_all(to_order(order), seed); },
            py::arg("order") = "adverse", py::arg("seed") = 0, Unlocked())
        .def("pending", &SimDevice::pending, Unlocked())
        // faults and time
        .def("calls", &SimDevice::calls, Unlocked())
        .def(
            "fail_call",
            [](SimDevice& self, std::optional<std::int64_t> n, const std::string& error) {
                self.fail_call(n, to_failure(error));
            },
            py::arg("n"), py::arg("error") = "oom", Unlocked())
        .def("clock", &SimDevice::clock, Unlocked());
}

}  // namespace kvpool::bindings
