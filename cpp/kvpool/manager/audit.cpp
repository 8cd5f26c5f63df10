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
    explicit Audit(const ManagerState& state) : state_(state), owned_(state.layout.pool_groups.size()) {}

    void cache(CacheHandle handle, const KvCache& cache) {
        name_ = describe_handle(handle);
        expect(0 <= cache.history && cache.history <= cache.capacity, name_ + ": history <= capacity");
        expect(cache.status != CacheStatus::closed, name_ + ": status");
        num_active_ += cache.is_active() ? 1 : 0;
        for (std::size_t i = 0; i < state_.context.num_life_cycles(); ++i) {
            scratch(cache, i);
            for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
                const BlockTable& table = cache.table(i, beam);
                collect(i, table);
                if (state_.layout.life_cycles[i].key.is_ssm) {
                    expect(table.size() == (cache.has_state ? 1 : 0) && table.count() == table.size(),
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
        for (std::size_t group = 0; group < owned_.size(); ++group) {
            std::vector<SlotId>& owned = owned_[group];
            std::sort(owned.begin(), owned.end());
            expect(std::adjacent_find(owned.begin(), owned.end()) == owned.end(),
                   "a slot has two owners in " + where(group));
            expect(owned == state_.tier.allocator(make_id<PoolGroupId>(group)).occupied_ids(),
                   "occupied slots are not the owned ones in " + where(group));
        }
    }

private:
    [[nodiscard]] std::string where(std::size_t group) const { return state_.describe_group(group); }

    void collect(std::size_t life_cycle, const BlockTable& table) {
        for (std::int32_t i = 0; i < table.size(); ++i) {
            if (table[i] != kBadSlot) {
                owned_[state_.group_of(life_cycle).index()].push_back(table[i]);
            }
        }
        expect(table.count() == table.count_in(0, table.size()), name_ + ": count of pages");
    }

    void scratch(const KvCache& cache, std::size_t i) {
        if (cache.scratch.empty()) {
            return;
        }
        const ScratchBlocks& scratch = cache.scratch[i];
        const std::int64_t slots = ceil_times(scratch.blocks.size(), state_.layout.life_cycles[i].scratch_fraction);
        expect(scratch.slots.size() == (cache.is_active() ? slots : 0), name_ + ": scratch slots");
        collect(i, scratch.slots);
    }

    // Live blocks have pages, in every beam from the first block that it has of its own; scratch blocks have none; stale ones
    // only as long as they may be committed.
    void blocks(const KvCache& cache, std::size_t i, std::int32_t beam) {
        const BlockTable& table = cache.table(i, beam);
        const std::string name = name_ + ", layer group " + std::to_string(i) + ", beam " + std::to_string(beam);
        expect(table.size() == state_.context.num_blocks(cache), name + ": number of blocks");
        const HalfOpenRange stale =
            stale_range(state_.layout.life_cycles[i].key, state_.layout.tokens_per_block, cache.history);
        const std::int64_t in_stale = table.count_in(stale.beg, std::max(stale.beg, stale.end));
        expect(in_stale == table.held() && (in_stale == 0 || state_.context.keeps_stale(cache)), name + ": held pages");
        for (std::int32_t ordinal = 0; ordinal < table.size(); ++ordinal) {
            const bool live = !stale.contains(ordinal) && !cache.scratch_range(i).contains(ordinal);
            const bool has_page = table[ordinal] != kBadSlot;
            const bool may_be_shared = beam > 0 && ordinal < cache.history / state_.layout.tokens_per_block;
            expect(stale.contains(ordinal) || has_page == live || (may_be_shared && !has_page),
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
    std::vector<std::vector<SlotId>> owned_;  // by pool group
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
