// The pure sizing functions, under the names of kvpool._py.storage.sizing.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "kvpool/core/errors.hpp"
#include "kvpool/core/math.hpp"
#include "kvpool/storage/sizing.hpp"

namespace py = pybind11;

namespace kvpool::bindings {
namespace {

using Sizes = std::vector<std::int64_t>;
using Key = std::tuple<int, std::int64_t, std::int64_t>;  // 0 attention | 1 ssm, window or -1, sink blocks

std::vector<std::int64_t> solve(std::int64_t quota, std::int64_t grain, const std::vector<Sizes>& slot_sizes,
                                const Sizes& floors, const Sizes& needs, const std::vector<Key>& keys,
                                const std::optional<std::vector<std::string>>& names) {
    const std::size_t n = slot_sizes.size();
    if (floors.size() != n || needs.size() != n || keys.size() != n || (names && names->size() != n)) {
        throw ArgumentError("slot_sizes, floors, needs, keys and names must have one entry per pool group (" +
                            std::to_string(n) + ")");
    }
    std::vector<SizingGroup> groups;
    groups.reserve(n);
    for (std::size_t i = 0; i < n; ++i) {
        const auto& [kind, window, sink_blocks] = keys[i];
        groups.push_back({.slot_sizes = slot_sizes[i],
                          .floor = floors[i],
                          .need = needs[i],
                          .key = {.is_ssm = kind != 0, .window = window, .sink_blocks = sink_blocks},
                          .label = names ? (*names)[i] : std::string()});
    }
    return solve_slot_counts(quota, grain, groups);
}

std::pair<std::int64_t, std::int64_t> decimal_fraction(double x) {
    const Decimal decimal = Decimal::from_double(x);
    return {decimal.num, decimal.den};
}

}  // namespace

void bind_sizing(py::module_& m) {
    m.def("grain_for_quota", &grain_for_quota, py::arg("quota"), py::arg("granularity"),
          "Bytes of one grain of a level with this quota.");
    m.def(
        "grains_for_slots",
        [](std::int64_t num_slots, const Sizes& slot_sizes, std::int64_t grain) {
            return grains_for_slots(num_slots, slot_sizes, grain);
        },
        py::arg("num_slots"), py::arg("slot_sizes"), py::arg("grain"), "Grains that the slots take in all pools.");
    m.def(
        "grains_to_slots",
        [](std::int64_t grains, const Sizes& slot_sizes, std::int64_t grain) {
            return grains_to_slots(grains, slot_sizes, grain);
        },
        py::arg("grains"), py::arg("slot_sizes"), py::arg("grain"),
        "(Most slots that these grains hold, grains that they really use).");
    m.def("solve_slot_counts", &solve, py::arg("quota"), py::arg("grain"), py::arg("slot_sizes"), py::arg("floors"),
          py::arg("needs"), py::arg("keys"), py::arg("names") = py::none(), "Slots per pool group within the quota.");
    m.def("decimal_fraction", &decimal_fraction, py::arg("x"),
          "What a user wrote as x: (numerator, power of ten of at most 10**18).");
}

}  // namespace kvpool::bindings
