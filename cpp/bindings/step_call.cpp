#include "step_call.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kvpool/core/errors.hpp"

namespace py = pybind11;

namespace kvpool::bindings {
namespace {

void check_length(const ArrayArgument& array, const char* name, std::int64_t n) {
    if (array.extent(0) != n) {
        throw ArgumentError(std::string("step(): ") + name + " has " + std::to_string(array.extent(0)) +
                            " entries, handles has " + std::to_string(n));
    }
}

std::optional<StreamId> read_stream(py::handle stream) {
    if (stream.is_none()) {
        return std::nullopt;
    }
    if (PyLong_Check(stream.ptr()) == 0 || PyBool_Check(stream.ptr()) != 0) {
        throw TypeError(std::string("step(): stream must be an int or None, not ") + Py_TYPE(stream.ptr())->tp_name);
    }
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(stream.ptr(), &overflow);
    if (overflow != 0 || number < 0) {
        throw ArgumentError("step(): stream must be from 0 to 9223372036854775807, not " +
                            std::string(py::str(stream)));
    }
    return StreamId(number);
}

std::pair<py::object, py::object> split_tokens(py::handle tokens) {
    if (PyTuple_Check(tokens.ptr()) == 0 && PyList_Check(tokens.ptr()) == 0) {
        throw TypeError("step(): tokens must be (values, offsets)");
    }
    const auto pair = py::reinterpret_borrow<py::sequence>(tokens);
    if (pair.size() != 2) {
        throw TypeError("step(): tokens must be (values, offsets)");
    }
    return {pair[0], pair[1]};
}

}  // namespace

StepCall::StepCall()
    : result_type_(py::module_::import("kvpool.v2._backend").attr("StepResult")),
      int32_(py::dtype::of<std::int32_t>()),
      int64_(py::dtype::of<std::int64_t>()),
      ok_(py::dtype::of<bool>(), 0),
      dirty_(py::dtype::of<std::int32_t>(), 4) {}

py::object StepCall::run(Manager& manager, py::handle handles, py::handle rows, py::handle capacities,
                         py::handle histories, py::handle table, py::handle tokens, py::handle stream) {
    const std::optional<StreamId> target = read_stream(stream);
    const ArrayArgument table_array("step(): table", table, int32_, 3, true);
    const ArrayArgument handle_array("step(): handles", handles, int64_, 1, false);
    const ArrayArgument row_array("step(): rows", rows, int32_, 1, false);
    const ArrayArgument capacity_array("step(): capacities", capacities, int32_, 1, false);
    const ArrayArgument history_array("step(): histories", histories, int32_, 1, false);
    const std::int64_t n = handle_array.extent(0);
    std::optional<ArrayArgument> token_array;
    std::optional<ArrayArgument> offset_array;
    TokenSpan values;
    std::span<const std::int32_t> offsets;
    if (!tokens.is_none()) {
        const auto [value_object, offset_object] = split_tokens(tokens);
        values = token_array.emplace("step(): tokens values", value_object, int32_, 1, false).values<Token>();
        offsets =
            offset_array.emplace("step(): tokens offsets", offset_object, int32_, 1, false).values<std::int32_t>();
    }
    check_length(row_array, "rows", n);
    check_length(capacity_array, "capacities", n);
    check_length(history_array, "histories", n);
    if (!tokens.is_none()) {
        check_step_tokens(static_cast<std::size_t>(n), values, offsets);
    }
    const TableView view{table_array.data<std::int32_t>(), table_array.extent(0), table_array.extent(1),
                         table_array.extent(2)};
    const StepOutput output = manager.step({.handles = handle_array.values<CacheHandle>(),
                                            .rows = row_array.values<std::int32_t>(),
                                            .capacities = capacity_array.values<std::int32_t>(),
                                            .histories = history_array.values<std::int32_t>(),
                                            .table = view,
                                            .table_memory = memory_of(table_array, view),
                                            .stream = target,
                                            .token_values = values,
                                            .token_offsets = offsets});
    // Making Python objects and letting go of the former table may run the caller's code, which may step again.
    copy_answer(output);
    return make_result(ok_.view(output.ok.size()), dirty_.view(output.dirty.size()), output.event);
}

void StepCall::copy_answer(const StepOutput& output) {
    if (ok_.holds(output.ok.size()) && dirty_.holds(output.dirty.size())) {
        ok_.copy(output.ok.data(), output.ok.size());
        dirty_.copy(output.dirty.data(), output.dirty.size());
        return;
    }
    const std::vector<std::uint8_t> ok(output.ok.begin(), output.ok.end());
    const std::vector<DirtyRange> dirty(output.dirty.begin(), output.dirty.end());
    ok_.grow(ok.size());
    dirty_.grow(dirty.size());
    ok_.copy(ok.data(), ok.size());
    dirty_.copy(dirty.data(), dirty.size());
}

std::shared_ptr<void> StepCall::memory_of(const ArrayArgument& table, const TableView& view) {
    if (held_table_ == nullptr || view != held_view_) {
        const std::shared_ptr<void> hold = std::make_shared<BufferHold>(table.array(), PyBUF_WRITABLE | PyBUF_ND);
        std::shared_ptr<void> former = hold;
        held_view_ = view;
        std::swap(held_table_, former);
        return hold;  // before the end of the former one, which may run the caller's code
    }
    return held_table_;
}

// Each of the two leaves a consistent object before anything dies: the end of an array may run the caller's code.
void StepCall::ResultArray::grow(std::size_t n) {
    if (holds(n)) {
        return;
    }
    const std::size_t capacity = std::max({n, 2 * capacity_, std::size_t{16}});
    std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(capacity)};
    if (columns_ != 0) {
        shape.push_back(columns_);
    }
    py::array array(dtype_, shape);
    if (capacity <= capacity_) {
        return;  // a step inside this one was here first
    }
    std::vector<py::object> former_views;
    former_views.swap(views_);
    std::swap(whole_, array);
    data_ = whole_.mutable_data();
    row_bytes_ = static_cast<std::size_t>(whole_.nbytes()) / capacity;
    capacity_ = capacity;
}

void StepCall::ResultArray::copy(const void* values, std::size_t n) noexcept {
    if (n != 0) {
        std::memcpy(data_, values, n * row_bytes_);
    }
}

py::object StepCall::ResultArray::view(std::size_t n) {
    if (n < views_.size() && views_[n]) {
        return views_[n];
    }
    const py::array whole = whole_;
    py::object view = whole[py::slice(0, static_cast<py::ssize_t>(n), 1)];
    if (n < kMostViews && whole.is(whole_)) {
        views_.resize(std::max(views_.size(), n + 1));
        views_[n] = view;
    }
    return view;
}

py::object StepCall::make_result(py::object ok, py::object dirty, EventId event) const {
    py::int_ event_number(event.value());
    auto* type = reinterpret_cast<PyTypeObject*>(result_type_.ptr());
    py::object result =
        py::reinterpret_steal<py::object>(type->tp_alloc(type, 3));  // as tuple.__new__ makes a subclass's
    if (!result) {
        throw py::error_already_set();
    }
    PyTuple_SET_ITEM(result.ptr(), 0, ok.release().ptr());
    PyTuple_SET_ITEM(result.ptr(), 1, dirty.release().ptr());
    PyTuple_SET_ITEM(result.ptr(), 2, event_number.release().ptr());
    return result;
}

}  // namespace kvpool::bindings
