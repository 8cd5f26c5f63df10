#include "describe.hpp"

#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "tokens.hpp"

namespace py = pybind11;

namespace kvpool::bindings {
namespace {

template <class Range, class F>
py::list list_of(const Range& range, F&& f) {
    py::list out;
    for (const auto& item : range) {
        out.append(f(item));
    }
    return out;
}

py::tuple describe_life_cycle(const LifeCycle& life_cycle) {
    const py::list layers = list_of(life_cycle.layers, [](LayerId id) { return id.value(); });
    const py::list coalesced = list_of(life_cycle.coalesced, [](const CoalescedBuffer& part) {
        return py::make_tuple(part.single_size, list_of(part.buffers, [](const BufferId& id) {
                                  return py::make_tuple(id.layer.value(), id.role);
                              }));
    });
    const LifeCycleKey& key = life_cycle.key;
    const py::object window = key.is_windowed() ? py::object(py::int_(key.window)) : py::object(py::none());
    return py::make_tuple(key.is_ssm, window, key.sink_blocks, layers, life_cycle.pool_group.value(),
                          py::make_tuple(life_cycle.scratch_fraction.num, life_cycle.scratch_fraction.den), coalesced,
                          key.optional);
}

// Ids, and digests as hexadecimal strings.
py::list describe_values(const std::vector<TokenValue>& tokens) {
    return list_of(tokens, [](const TokenValue& token) -> py::object {
        if (const Token* const id = std::get_if<Token>(&token)) {
            return py::int_(*id);
        }
        return to_bytes(std::get<Digest>(token)).attr("hex")();
    });
}

py::list describe_node(const NodeSnapshot& node) {
    const py::list pages = list_of(node.pages, [](const std::optional<NodeSnapshot::Page>& page) -> py::object {
        if (!page.has_value()) {
            return py::none();
        }
        return py::cast(std::vector<std::int64_t>{page->slot, page->coverage, page->refs, page->priority, page->plans});
    });
    py::list out;
    out.append(describe_scope(node.scope));
    out.append(node.ordinal);
    out.append(describe_values(node.tokens));
    out.append(node.marks);
    out.append(pages);
    out.append(node.tails);
    return out;
}

}  // namespace

py::tuple describe_layout(const Layout& layout, const PoolPlan& plan) {
    py::list pool_groups;
    for (std::size_t group = 0; group < layout.pool_groups.size(); ++group) {
        const PoolGroup& pool_group = layout.pool_groups[group];
        pool_groups.append(py::make_tuple(list_of(pool_group.life_cycles, [](LifeCycleId id) { return id.value(); }),
                                          list_of(pool_group.slot_sizes, [](std::int64_t bytes) { return bytes; }),
                                          plan.floors[group]));
    }
    py::dict buffers;
    for (const auto& [id, place] : layout.buffers) {
        buffers[py::make_tuple(id.layer.value(), id.role)] =
            py::make_tuple(place.life_cycle.value(), place.pool.value(), place.offset, place.size, place.expansion,
                           place.scale, place.layer_util);
    }
    return py::make_tuple(list_of(layout.life_cycles, describe_life_cycle), pool_groups, buffers, plan.grain);
}

py::dict describe_snapshot(const ManagerSnapshot& snapshot) {
    using py::literals::operator""_a;
    py::dict out;
    out["pool_groups"] = list_of(snapshot.pool_groups, [](const PoolGroupSnapshot& group) {
        return py::dict("total"_a = group.total, "free"_a = group.free, "used"_a = group.used);
    });
    out["caches"] = list_of(snapshot.caches, [](const CacheSnapshot& cache) {
        return py::dict("handle"_a = cache.handle, "status"_a = static_cast<int>(cache.status),
                        "committed"_a = cache.committed, "history"_a = cache.history, "capacity"_a = cache.capacity,
                        "beam_width"_a = cache.beam_width, "commit_allowed"_a = cache.commit_allowed,
                        "scope"_a = describe_scope(cache.scope), "tail"_a = describe_values(cache.tail),
                        "match"_a = std::vector<std::int32_t>{cache.divergence, cache.hybrid}, "slots"_a = cache.slots,
                        "ssm"_a = cache.ssm, "ssm_source"_a = cache.ssm_source, "scratch"_a = cache.scratch);
    });
    out["tree"] = list_of(snapshot.tree, describe_node);
    out["queues"] = list_of(snapshot.queues, [](const std::vector<QueuedSnapshot>& queue) {
        return list_of(queue, [](const QueuedSnapshot& page) {
            return py::cast(std::vector<std::int32_t>{page.priority, page.victim_class, page.slot});
        });
    });
    return out;
}

}  // namespace kvpool::bindings
