// Arrays of the caller without copies and without pybind11's typed conversions: a look at numpy's own record costs a few
// nanoseconds, where a typed argument costs a quarter of a microsecond.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "kvpool/core/errors.hpp"

namespace kvpool::bindings {

// Holds an export of an object's buffer: its memory neither moves nor dies meanwhile. Made and destroyed with the GIL.
class BufferHold {
public:
    // What PyObject_GetBuffer raises.
    BufferHold(pybind11::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
            throw pybind11::error_already_set();
        }
    }
    BufferHold(const BufferHold&) = delete;
    BufferHold& operator=(const BufferHold&) = delete;
    ~BufferHold() { PyBuffer_Release(&view_); }

    [[nodiscard]] const Py_buffer& view() const noexcept { return view_; }

private:
    Py_buffer view_{};
};

// A numpy array argument: checked, alive as long as this is.
class ArrayArgument {
public:
    // `dtype` with `ndim` dimensions, C-contiguous. Other objects with a buffer are taken as arrays. TypeError for what has
    // none; ArgumentError for anything else that is wrong; both begin with `name`.
    ArrayArgument(const char* name, pybind11::handle value, pybind11::handle dtype, int ndim, bool writable)
        : array_(pybind11::reinterpret_borrow<pybind11::object>(value)) {
        const auto& api = pybind11::detail::npy_api::get();
        if (!api.PyArray_Check_(array_.ptr())) {
            array_ = as_array(name, value, dtype);
        }
        const auto* record = pybind11::detail::array_proxy(array_.ptr());
        const int wanted = pybind11::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ |
                           pybind11::detail::npy_api::NPY_ARRAY_ALIGNED_ |
                           (writable ? pybind11::detail::npy_api::NPY_ARRAY_WRITEABLE_ : 0);
        const bool same_type = record->descr == dtype.ptr() || api.PyArray_EquivTypes_(record->descr, dtype.ptr());
        if (!same_type || record->nd != ndim || (record->flags & wanted) != wanted) {
            refuse(name, dtype, ndim);
        }
    }

    [[nodiscard]] pybind11::handle array() const noexcept { return array_; }
    [[nodiscard]] std::int64_t extent(int axis) const noexcept {
        return pybind11::detail::array_proxy(array_.ptr())->dimensions[axis];
    }
    template <class T>
    [[nodiscard]] T* data() const noexcept {
        return reinterpret_cast<T*>(pybind11::detail::array_proxy(array_.ptr())->data);
    }
    template <class T>
    [[nodiscard]] std::span<const T> values() const noexcept {
        return {data<const T>(), static_cast<std::size_t>(extent(0))};
    }

private:
    [[nodiscard]] static pybind11::object as_array(const char* name, pybind11::handle value, pybind11::handle dtype) {
        if (PyObject_CheckBuffer(value.ptr()) == 0) {
            throw TypeError(std::string(name) + " must be an array of " + std::string(pybind11::str(dtype)) + ", not " +
                            Py_TYPE(value.ptr())->tp_name);
        }
        return pybind11::module_::import("numpy").attr("asarray")(
            pybind11::memoryview(pybind11::reinterpret_borrow<pybind11::object>(value)));
    }

    [[noreturn]] void refuse(const char* name, pybind11::handle dtype, int ndim) const {
        const std::string prefix = std::string(name) + " must ";
        const auto* record = pybind11::detail::array_proxy(array_.ptr());
        if (!pybind11::detail::npy_api::get().PyArray_EquivTypes_(record->descr, dtype.ptr())) {
            throw ArgumentError(prefix + "have dtype " + std::string(pybind11::str(dtype)) + ", not " +
                                std::string(pybind11::str(array_.attr("dtype"))));
        }
        if (record->nd != ndim) {
            throw ArgumentError(prefix + "have " + std::to_string(ndim) + " dimension(s), not " +
                                std::to_string(record->nd));
        }
        if ((record->flags & pybind11::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_) == 0) {
            throw ArgumentError(prefix + "be C-contiguous");
        }
        if ((record->flags & pybind11::detail::npy_api::NPY_ARRAY_ALIGNED_) == 0) {
            throw ArgumentError(prefix + "be aligned");
        }
        throw ArgumentError(prefix + "be writable");
    }

    pybind11::object array_;
};

// The caller's row for set_base_page_index_buf: one dimension of int32, writable, C-contiguous; ArgumentError otherwise,
// TypeError for what has no buffer.
[[nodiscard]] inline std::shared_ptr<BufferHold> hold_index_row(pybind11::handle object) {
    auto hold = std::make_shared<BufferHold>(object, PyBUF_FULL_RO);
    const Py_buffer& view = hold->view();
    std::string format = view.format == nullptr ? "B" : view.format;
    format.erase(0, format.find_first_not_of("@=<"));
    if (view.ndim != 1 || view.itemsize != 4 || (format != "i" && format != "l")) {
        throw ArgumentError("buffer: one dimension of int32 wanted, not " + std::to_string(view.ndim) + " of format '" +
                            (view.format == nullptr ? "B" : view.format) + "'");
    }
    if (view.readonly != 0 || PyBuffer_IsContiguous(&view, 'C') == 0) {
        throw ArgumentError("buffer: must be writable and C-contiguous");
    }
    if (reinterpret_cast<std::uintptr_t>(view.buf) % alignof(std::int32_t) != 0) {
        throw ArgumentError("buffer: must be aligned");
    }
    return hold;
}

}  // namespace kvpool::bindings
