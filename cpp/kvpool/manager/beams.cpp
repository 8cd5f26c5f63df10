// Beams: full blocks of the prompt are shared, what is still written to is each beam's own.
//
// A new beam gets a page of its own for every block from history / tpb on of which beam 0 has one, and a state of its own;
// the block that history ends in and the state are copied from beam 0, the rest holds nothing yet.
#include "kvpool/core/errors.hpp"
#include "kvpool/manager/state.hpp"

namespace kvpool {
namespace {

constexpr std::int64_t kMaxBeamWidth =
    65536;  // a cache without pages could have any number else, and use up the memory

}  // namespace

void ManagerState::set_beam_width(KvCache& cache, std::int64_t width) {
    require(cache, CacheStatus::active, "beam_width");
    if (width < 1 || width > kMaxBeamWidth) {
        throw ArgumentError("beam_width must be from 1 to " + std::to_string(kMaxBeamWidth) + ", not " +
                            std::to_string(width));
    }
    if (width > cache.beam_width) {
        grow_beams(cache, static_cast<std::int32_t>(width));
    } else if (width < cache.beam_width) {
        shrink_beams(cache, static_cast<std::int32_t>(width));
    }
}

std::vector<std::int64_t> ManagerState::room_for_beams(const KvCache& cache, std::int64_t width) const {
    std::vector<std::int64_t> wanted(layout.pool_groups.size());
    std::vector<std::int64_t> live(layout.pool_groups.size());
    const std::int64_t added = width - cache.beam_width;
    for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
        const std::size_t group = group_of(i).index();
        const bool is_ssm = layout.life_cycles[i].key.is_ssm;
        const HalfOpenRange own = own_blocks(cache, i);
        wanted[group] += added * (is_ssm ? cache.table(i, 0).count() : cache.table(i, 0).count_in(own.beg, own.end));
        for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
            live[group] += cache.table(i, beam).count() - cache.table(i, beam).held();
        }
    }
    for (std::size_t group = 0; group < wanted.size(); ++group) {
        const std::int64_t total = tier.total(make_id<PoolGroupId>(group));
        if (live[group] + wanted[group] > total) {
            throw NeverFitsError("beam_width " + std::to_string(width) + ": " +
                                 std::to_string(live[group] + wanted[group]) + " slots of pool group " +
                                 std::to_string(group) + " needed, which has " + std::to_string(total) + " in all");
        }
    }
    for (std::size_t group = 0; group < wanted.size(); ++group) {
        const auto id = make_id<PoolGroupId>(group);
        const std::int64_t room = tier.free(id) + prefix.evictable(id);
        if (wanted[group] > room) {
            throw OutOfPagesError("beam_width " + std::to_string(width) + ": " + std::to_string(wanted[group] - room) +
                                  " slots of pool group " + std::to_string(group) + " lack");
        }
    }
    return wanted;
}

HalfOpenRange ManagerState::own_blocks(const KvCache& cache, std::size_t life_cycle) const noexcept {
    if (layout.life_cycles[life_cycle].key.is_ssm) {
        return {};
    }
    const std::int64_t tpb = layout.tokens_per_block;
    const HalfOpenRange stale = stale_range(layout.life_cycles[life_cycle].key, tpb, cache.history);
    return {std::max(cache.history / tpb, stale.empty() ? std::int64_t{0} : stale.end), context.num_blocks(cache)};
}

void ManagerState::grow_beams(KvCache& cache, std::int32_t width) {
    if (context.has_scratch(cache)) {
        throw LogicError("beam_width: can not grow while scratch blocks are in use");
    }
    const std::vector<std::int64_t> wanted = room_for_beams(cache, width);
    const std::int32_t old_width = cache.beam_width;
    const std::int64_t blocks = context.num_blocks(cache);
    const std::int64_t tail =
        cache.history % layout.tokens_per_block != 0 ? cache.history / layout.tokens_per_block : -1;
    std::vector<BlockTable> added(context.num_life_cycles() * static_cast<std::size_t>(width));
    transact([&] {
        for (std::size_t group = 0; group < wanted.size(); ++group) {
            transaction.make_room(make_id<PoolGroupId>(group), wanted[group]);
        }
        for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
            const auto id = make_id<LifeCycleId>(i);
            const BlockTable& source = cache.table(i, 0);
            const bool is_ssm = layout.life_cycles[i].key.is_ssm;
            const HalfOpenRange own = is_ssm ? HalfOpenRange{0, 1} : own_blocks(cache, i);
            const auto at = [&](std::int32_t beam) -> BlockTable& {
                return added[i * static_cast<std::size_t>(width) + static_cast<std::size_t>(beam)];
            };
            for (std::int32_t beam = old_width; beam < width; ++beam) {
                at(beam).resize(is_ssm ? 1 : static_cast<std::int32_t>(blocks));
            }
            for (std::int64_t ordinal = own.beg; ordinal < own.end; ++ordinal) {
                for (std::int32_t beam = old_width; beam < width && source[ordinal] != kBadSlot; ++beam) {
                    const std::int64_t block = is_ssm ? std::int64_t{cache.committed_blocks} : ordinal;
                    const SlotId slot = transaction.allocate(id, at(beam), ordinal, cache.priority(i, block));
                    if (is_ssm || ordinal == tail) {
                        transaction.copy(id, slot, source[ordinal]);
                    }
                }
            }
        }
        settle(cache);
    });
    for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
        for (std::int32_t beam = 0; beam < old_width; ++beam) {
            added[i * static_cast<std::size_t>(width) + static_cast<std::size_t>(beam)] =
                std::move(cache.table(i, beam));
        }
    }
    cache.tables = std::move(added);
    cache.beam_width = width;
    cache.unbind();
}

void ManagerState::shrink_beams(KvCache& cache, std::int32_t width) {
    std::vector<BlockTable> kept(context.num_life_cycles() * static_cast<std::size_t>(width));
    transact([&] {
        for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
            for (std::int32_t beam = width; beam < cache.beam_width; ++beam) {
                release_pages(i, cache.table(i, beam), {0, cache.table(i, beam).size()});
            }
        }
        settle(cache);
    });
    for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
        for (std::int32_t beam = 0; beam < width; ++beam) {
            kept[i * static_cast<std::size_t>(width) + static_cast<std::size_t>(beam)] =
                std::move(cache.table(i, beam));
        }
    }
    detach(cache, width);
    cache.tables = std::move(kept);
    cache.beam_width = width;
    cache.unbind();
}

}  // namespace kvpool
