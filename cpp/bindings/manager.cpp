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
#include <utility>
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
#include "tokens.hpp"

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

using Lists = std::vector<std::vector<std::int32_t>>;

Handle create(PyManager& self, py::handle scope, py::handle ids, py::handle digests, std::int64_t prompt_length,
              bool text_only, std::optional<Lists> priorities) {
    const TokenArguments tokens(ids, digests);
    CreateInput input;
    input.scope = read_scope(scope);
    input.ids = tokens.has_ids() ? std::optional<TokenSpan>(tokens.ids()) : std::nullopt;
    input.digests = tokens.digests();
    input.prompt_length = prompt_length;
    input.text_only = text_only;
    if (priorities.has_value()) {
        input.priorities = std::move(*priorities);
    }
    return self.core().create(std::move(input));
}

void commit(PyManager& self, Handle handle, py::handle ids, py::handle digests, bool is_end) {
    const TokenArguments tokens(ids, digests);
    self.core().commit(handle, tokens.ids(), tokens.digests(), is_end);
}

std::int64_t probe_reuse(PyManager& self, py::handle scope, py::handle ids, py::handle digests) {
    const TokenArguments tokens(ids, digests);
    return self.core().probe_reuse(read_scope(scope), tokens.ids(), tokens.digests());
}

py::object probe_first_new_block_key(PyManager& self, py::handle scope, py::handle ids, py::handle digests) {
    const TokenArguments tokens(ids, digests);
    const std::optional<BlockKey> key =
        self.core().probe_first_new_block_key(read_scope(scope), tokens.ids(), tokens.digests());
    return key.has_value() ? py::object(to_bytes(*key)) : py::object(py::none());
}

py::tuple match_pages(PyManager& self, py::handle scope, py::handle ids, py::handle digests, std::int64_t life_cycle,
                      bool partial) {
    const TokenArguments tokens(ids, digests);
    const PagesOnPath found =
        self.core().match_pages(read_scope(scope), tokens.ids(), tokens.digests(), life_cycle, partial);
    py::list pages;
    for (const std::optional<PagesOnPath::Page>& page : found.pages) {
        pages.append(page.has_value() ? py::object(py::make_tuple(page->slot.value(), page->coverage))
                                      : py::object(py::none()));
    }
    return py::make_tuple(found.tokens, pages);
}

void debug_insert_block(PyManager& self, py::handle scope, py::handle ids, py::handle digests,
                        const std::vector<std::int64_t>& coverage) {
    const TokenArguments tokens(ids, digests);
    self.core().debug_insert_block(read_scope(scope), tokens.ids(), tokens.digests(), coverage);
}

void debug_set_coverage(PyManager& self, py::handle scope, py::handle ids, py::handle digests, std::int64_t life_cycle,
                        std::int64_t coverage) {
    const TokenArguments tokens(ids, digests);
    self.core().debug_set_coverage(read_scope(scope), tokens.ids(), tokens.digests(), life_cycle, coverage);
}

py::tuple committed_tokens(PyManager& self, Handle handle) {
    const auto [ids, digests] = self.core().committed_tokens(handle);
    return describe_tokens(ids, digests);
}

py::list reuse_status(PyManager& self, Handle handle) {
    const py::object type = py::module_::import("kvpool.v2._backend").attr("ReuseStatus");
    py::list out;
    for (const ReuseStatus& row : self.core().reuse_status(handle)) {
        py::list coverage;
        for (const HalfOpenRange& range : row.coverage) {
            coverage.append(py::make_tuple(range.beg, range.end));
        }
        out.append(type(row.group.value(), row.optional, row.complete, row.endpoint, coverage));
    }
    return out;
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

void bind_tree(py::class_<PyManager>& manager) {
    const py::arg scope("scope");
    const py::arg ids("ids");
    const py::arg digests("digests");
    manager.def("probe_reuse", &probe_reuse, scope, ids, digests)
        .def("probe_first_new_block_key", &probe_first_new_block_key, scope, ids, digests)
        .def("clear_reusable_blocks", [](PyManager& self) { self.core().clear_reusable_blocks(); })
        .def(
            "drop_planned", [](PyManager& self, std::int64_t plan) { return self.core().drop_planned(plan); },
            py::arg("plan"))
        .def("match_pages", &match_pages, scope, ids, digests, py::arg("life_cycle"), py::arg("partial"))
        .def("all_tree_pages_droppable", [](PyManager& self) { return self.core().all_tree_pages_droppable(); })
        .def("debug_insert_block", &debug_insert_block, scope, ids, digests, py::arg("coverage"))
        .def("debug_set_coverage", &debug_set_coverage, scope, ids, digests, py::arg("life_cycle"),
             py::arg("coverage"));
}

void bind_prefix(py::class_<PyManager>& manager) {
    const py::arg handle("handle");
    manager
        .def("create", &create, py::arg("scope") = py::make_tuple(py::none(), py::none()), py::arg("ids") = py::none(),
             py::arg("digests") = py::tuple(), py::arg("prompt_length") = 0, py::arg("text_only") = false,
             py::arg("priorities") = py::none())
        .def(
            "extend_priorities",
            [](PyManager& self, Handle h, const Lists& priorities) { self.core().extend_priorities(h, priorities); },
            handle, py::arg("priorities"))
        .def("commit", &commit, handle, py::arg("ids"), py::arg("digests"), py::arg("is_end"))
        .def("committed_tokens", &committed_tokens, handle)
        .def(
            "block_keys", [](PyManager& self, Handle h) { return describe_keys(self.core().block_keys(h)); }, handle)
        .def(
            "match_depths", [](PyManager& self, Handle h) { return self.core().match_depths(h); }, handle)
        .def("reuse_status", &reuse_status, handle)
        .def(
            "plan_drop", [](PyManager& self, Handle h) { return self.core().plan_drop(h); }, handle)
        .def(
            "page_is_linked",
            [](PyManager& self, Handle h, std::int64_t ordinal, std::int64_t life_cycle) {
                return self.core().page_is_linked(h, ordinal, life_cycle);
            },
            handle, py::arg("ordinal"), py::arg("life_cycle"));
}

void bind_caches(py::class_<PyManager>& manager) {
    const py::arg handle("handle");
    manager
        .def(
            "resume",
            [](PyManager& self, Handle h, MaybeInt stream, const std::optional<std::vector<std::int64_t>>& groups) {
                return self.core().resume(h, to_stream(stream), groups);
            },
            handle, py::arg("stream"), py::arg("optional_groups") = py::none())
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
    bind_tree(manager);
    bind_prefix(manager);
    bind_caches(manager);
    bind_pages(manager);
}

}  // namespace kvpool::bindings
