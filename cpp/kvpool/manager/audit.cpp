// audit(): every invariant that the headers state, checked in full.
#include <algorithm>

#include "kvpool/core/errors.hpp"
#include "kvpool/manager/state.hpp"

namespace kvpool {
namespace {

void expect(bool condition, const std::string& what) {
    if (!condition) {
        throw CorruptedError("invariant broken: " + what);
    }
}

class Audit {
public:
    explicit Audit(const ManagerState& state) : state_(state) {
        for (std::size_t group = 0; group < state.layout.pool_groups.size(); ++group) {
            const std::int64_t total = state.tier.total(make_id<PoolGroupId>(group));
            owners_.refs.emplace_back(static_cast<std::size_t>(total));
        }
    }

    void cache(CacheHandle handle, const KvCache& cache) {
        name_ = describe_handle(handle);
        expect(0 <= cache.committed && cache.committed <= cache.history && cache.history <= cache.capacity,
               name_ + ": committed <= history <= capacity");
        expect(cache.status != CacheStatus::closed, name_ + ": status");
        num_active_ += cache.is_active() ? 1 : 0;
        collect(cache);
        committed(cache);
        for (std::size_t i = 0; i < state_.context.num_life_cycles(); ++i) {
            scratch(cache, i);
            for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
                const BlockTable& table = cache.table(i, beam);
                expect(table.count() == table.count_in(0, table.size()), name_ + ": count of pages");
                if (state_.layout.life_cycles[i].key.is_ssm) {
                    expect(table.size() == (cache.was_resumed ? 1 : 0) &&
                               (table.count() == table.size() || !cache.commit_allowed),
                           name_ + ": state slot");
                } else {
                    blocks(cache, i, beam);
                }
            }
        }
        for (const AttachedBuffer& buffer : cache.attached) {
            attached(cache, buffer);
        }
    }

    void finish() {
        expect(num_active_ == state_.num_active, "number of ACTIVE caches");
        for (std::size_t group = 0; group < owners_.refs.size(); ++group) {
            const auto id = make_id<PoolGroupId>(group);
            std::int64_t cached = 0;
            for (const SlotId slot : state_.tier.allocator(id).occupied_ids()) {
                cached += owners_.refs[group][slot.index()] == 0 ? 1 : 0;
            }
            const auto owned = static_cast<std::int64_t>(std::count_if(
                owners_.refs[group].begin(), owners_.refs[group].end(), [](std::int32_t refs) { return refs > 0; }));
            expect(owned + cached == state_.tier.used(id), "a slot that a cache owns is free in " + where(group));
            expect(cached == state_.prefix.evictable(id), "slots without an owner in " + where(group));
        }
        state_.prefix.audit(owners_);
    }

private:
    [[nodiscard]] std::string where(std::size_t group) const { return state_.describe_group(group); }

    void collect(const KvCache& cache) {
        std::vector<std::pair<std::int32_t, std::int32_t>> own;  // group and slot
        state_.context.for_each_slot(cache, [&](LifeCycleId life_cycle, SlotId slot) {
            const PoolGroupId group = state_.group_of(life_cycle.index());
            ++owners_.refs[group.index()][slot.index()];
            own.emplace_back(group.value(), slot.value());
        });
        std::sort(own.begin(), own.end());
        expect(std::adjacent_find(own.begin(), own.end()) == own.end(), name_ + ": owns a slot twice");
        if (cache.last_node != kNoNode) {
            owners_.last_nodes.push_back(cache.last_node);
        }
        owners_.tails.push_back(cache.tail.tokens());
    }

    // The last node and the tail are where the committed tokens end; what the tree knows of a page fits its place.
    void committed(const KvCache& cache) {
        const std::int64_t tpb = state_.layout.tokens_per_block;
        const PrefixCache& prefix = state_.prefix;
        NodeId node = cache.last_node;
        expect(cache.committed == cache.committed_blocks * tpb + cache.tail.size() && cache.tail.size() < tpb,
               name_ + ": tail");
        expect(cache.committed_blocks == (node == kNoNode ? 0 : prefix.ordinal(node) + 1), name_ + ": last node");
        for (std::int64_t ordinal = cache.committed_blocks; ordinal-- > 0; node = prefix.parent(node)) {
            for (const std::size_t i : state_.context.attention) {
                const SlotId slot = cache.table(i, 0)[ordinal];
                const NodeId known = slot == kBadSlot ? kNoNode : prefix.node_of(make_id<LifeCycleId>(i), slot);
                expect(known == kNoNode || known == node,
                       name_ + ": page of block " + std::to_string(ordinal) + " of layer group " + std::to_string(i));
            }
        }
    }

    void scratch(const KvCache& cache, std::size_t i) {
        if (cache.scratch.empty()) {
            return;
        }
        const ScratchBlocks& scratch = cache.scratch[i];
        const std::int64_t slots = ceil_times(scratch.blocks.size(), state_.layout.life_cycles[i].scratch_fraction);
        expect(scratch.slots.size() == (cache.is_active() ? slots : 0), name_ + ": scratch slots");
        expect(scratch.slots.count() == scratch.slots.size(), name_ + ": count of scratch slots");
    }

    // Live blocks have pages, in every beam from the first block that it has of its own; scratch blocks have none; stale ones
    // only as long as they may be committed.
    void blocks(const KvCache& cache, std::size_t i, std::int32_t beam) {
        const BlockTable& table = cache.table(i, beam);
        const LifeCycleKey& key = state_.layout.life_cycles[i].key;
        const std::string name = name_ + ", layer group " + std::to_string(i) + ", beam " + std::to_string(beam);
        expect(table.size() == state_.context.num_blocks(cache), name + ": number of blocks");
        const HalfOpenRange stale = stale_range(key, state_.layout.tokens_per_block, cache.history);
        const std::int64_t in_stale = table.count_in(stale.beg, std::max(stale.beg, stale.end));
        const std::int64_t held = table.count_in(std::max(stale.beg, std::int64_t{cache.committed_blocks}), stale.end);
        expect(in_stale == held && held == table.held() && (held == 0 || state_.context.keeps_stale(cache)),
               name + ": held pages");
        const bool may_lack = cache.is_matched() && key.optional;
        for (std::int32_t ordinal = 0; ordinal < table.size(); ++ordinal) {
            const bool live = !stale.contains(ordinal) && !cache.scratch_range(i).contains(ordinal);
            const bool has_page = table[ordinal] != kBadSlot;
            const bool may_be_shared = beam > 0 && ordinal < cache.history / state_.layout.tokens_per_block;
            expect(
                stale.contains(ordinal) || has_page == live || (may_be_shared && !has_page) || (may_lack && !has_page),
                name + ": page of block " + std::to_string(ordinal));
        }
    }

    void attached(const KvCache& cache, const AttachedBuffer& buffer) {
        std::vector<std::int32_t> want(buffer.entries.size());
        state_.context.expose(cache, buffer.life_cycle.index(), buffer.beam.value(), 0,
                              static_cast<std::int64_t>(want.size()), want.data());
        expect(std::equal(want.begin(), want.end(), buffer.entries.begin()), name_ + ": attached buffer");
    }

    const ManagerState& state_;
    PrefixCache::Owners owners_;
    std::int64_t num_active_ = 0;
    std::string name_;
};

}  // namespace

void ManagerState::audit() const {
    tier.audit();
    Audit audit(*this);
    slab.for_each([&](CacheHandle handle, const KvCache& cache) { audit.cache(handle, cache); });
    audit.finish();
}

}  // namespace kvpool
