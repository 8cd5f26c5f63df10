// Manager.step() between Python and the core: arrays in, views out, nothing allocated from call to call.
//
// The arrays of the answer are this object's own and filled by copying; so a view that the caller keeps stays readable
// memory whatever happens later, and only its contents are those of the last step.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "arrays.hpp"
#include "kvpool/manager/manager.hpp"

namespace kvpool::bindings {

class StepCall {
public:
    // Imports kvpool.v2._backend.StepResult.
    StepCall();

    pybind11::object run(Manager& manager, pybind11::handle handles, pybind11::handle rows, pybind11::handle capacities,
                         pybind11::handle histories, pybind11::handle table, pybind11::handle tokens,
                         pybind11::handle stream);

private:
    // The first n rows of an array that grows; the same view object for the same n.
    class ResultArray {
    public:
        ResultArray(pybind11::dtype dtype, pybind11::ssize_t columns) : dtype_(std::move(dtype)), columns_(columns) {}
        [[nodiscard]] bool holds(std::size_t n) const noexcept { return n <= capacity_ && capacity_ != 0; }
        void grow(std::size_t n);
        // Into the first n rows, for which there is room.
        void copy(const void* values, std::size_t n) noexcept;
        [[nodiscard]] pybind11::object view(std::size_t n);

    private:
        static constexpr std::size_t kMostViews = 1024;

        pybind11::dtype dtype_;
        pybind11::ssize_t columns_;  // 0: one dimension
        pybind11::array whole_;
        void* data_ = nullptr;
        std::size_t row_bytes_ = 0;
        std::size_t capacity_ = 0;
        std::vector<pybind11::object> views_;  // by n
    };

    void copy_answer(const StepOutput& output);
    [[nodiscard]] std::shared_ptr<void> memory_of(const ArrayArgument& table, const TableView& view);
    [[nodiscard]] pybind11::object make_result(pybind11::object ok, pybind11::object dirty, EventId event) const;

    pybind11::object result_type_;
    pybind11::dtype int32_;
    pybind11::dtype int64_;
    ResultArray ok_;
    ResultArray dirty_;
    TableView held_view_;               // whose memory held_table_ holds
    std::shared_ptr<void> held_table_;  // BufferHold
};

}  // namespace kvpool::bindings
