#include "kvpool/storage/sizing.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "kvpool/core/errors.hpp"
#include "kvpool/core/math.hpp"
#include "kvpool/storage/demand.hpp"

namespace kvpool {

namespace {

// No sum of costs passes this: what is above it can only be "too much".
constexpr Int128 kCostCap = Int128{1} << 120;

void check_positive(const char* name, std::int64_t value) {
    if (value < 1 || value > kHuge) {
        throw ArgumentError(std::string(name) + " must be in [1, 2^62], got " + std::to_string(value));
    }
}

void check_slot_sizes(std::span<const std::int64_t> slot_sizes, std::int64_t grain) {
    check_positive("granularity", grain);
    for (const std::int64_t size : slot_sizes) {
        check_positive("slot_sizes", size);
    }
}

Int128 cost_of(std::int64_t slots, std::span<const std::int64_t> slot_sizes, std::int64_t grain) {
    Int128 sum = 0;
    for (const std::int64_t size : slot_sizes) {
        sum = std::min(kCostCap, sum + round_up(Int128{slots} * Int128{size}, Int128{grain}));
    }
    return sum;
}

// One division of a quota.  counts_ only ever grows, and total(counts_) <= quota_ after the constructor.
class Division {
public:
    Division(std::int64_t quota, std::int64_t grain, std::span<const SizingGroup> groups)
        : quota_(quota), grain_(grain), groups_(groups) {
        for (const SizingGroup& group : groups) {
            counts_.push_back(group.floor);
            slot_bytes_.push_back(cost_of(1, group.slot_sizes, 1));
        }
        if (total(counts_) > Int128{quota}) {
            throw_floors();
        }
        rank_groups();
    }

    std::vector<std::int64_t> run() {
        scale_needs();
        spend_rest();
        return counts_;
    }

private:
    [[nodiscard]] Int128 total(const std::vector<std::int64_t>& counts) const {
        Int128 sum = 0;
        for (std::size_t i = 0; i < groups_.size(); ++i) {
            sum = std::min(kCostCap, sum + cost_of(counts[i], groups_[i].slot_sizes, grain_));
        }
        return sum;
    }

    [[nodiscard]] bool fits(const std::vector<std::int64_t>& counts) const { return total(counts) <= Int128{quota_}; }

    [[noreturn]] void throw_floors() const {
        std::string text = "the quota of " + std::to_string(quota_) + " bytes is below the floors of " +
                           std::to_string(saturate(total(counts_))) + " bytes (grain " + std::to_string(grain_) + ")";
        for (std::size_t i = 0; i < groups_.size(); ++i) {
            const SizingGroup& group = groups_[i];
            text += (i == 0 ? ": pool group " : "; pool group ") + std::to_string(i) +
                    (group.label.empty() ? " (" + describe(group.key) + ")" : " of " + group.label) + ": floor " +
                    std::to_string(group.floor) +
                    " slots = " + std::to_string(saturate(cost_of(group.floor, group.slot_sizes, grain_))) + " bytes";
        }
        throw ConfigError(text);
    }

    // rank_: who goes first among groups of equal count / need.
    void rank_groups() {
        std::vector<std::size_t> order(groups_.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
            return slot_bytes_[a] != slot_bytes_[b] ? slot_bytes_[a] > slot_bytes_[b] : groups_[a].key < groups_[b].key;
        });
        rank_.resize(order.size());
        for (std::size_t r = 0; r < order.size(); ++r) {
            rank_[order[r]] = r;
        }
    }

    // Step 1: the largest common multiple of the needs.
    void scale_needs() {
        if (groups_.empty()) {
            return;
        }
        std::size_t most = 0;
        for (std::size_t i = 1; i < groups_.size(); ++i) {
            most = groups_[i].need > groups_[most].need ? i : most;
        }
        const auto counts_at = [&](std::int64_t m) {
            std::vector<std::int64_t> counts;
            counts.reserve(groups_.size());
            for (const SizingGroup& group : groups_) {
                const Int128 share = Int128{m} * Int128{group.need} / Int128{groups_[most].need};
                counts.push_back(std::max(group.floor, static_cast<std::int64_t>(share)));
            }
            return counts;
        };
        const auto upper = saturate(Int128{quota_} / slot_bytes_[most]);
        counts_ = counts_at(largest_that_fits(0, upper, [&](std::int64_t m) { return fits(counts_at(m)); }));
    }

    // Step 2.  Handing out slot by slot is a walk along one fixed order of tokens (group, count), sorted by count /
    // need and then rank; a prefix of it whose cost fits is walked without anyone being turned away.  So the walk
    // may jump to the end of such a prefix, and only the last few slots before somebody drops out are given one at a
    // time.
    void spend_rest() {
        std::vector<std::size_t> open(groups_.size());
        std::iota(open.begin(), open.end(), std::size_t{0});
        std::stable_sort(open.begin(), open.end(),
                         [&](std::size_t a, std::size_t b) { return groups_[a].need < groups_[b].need; });
        while (!open.empty()) {
            for (const std::size_t reference : open) {
                jump(open, reference);
            }
            for (bool someone_left = false; !someone_left;) {
                const auto next = std::min_element(open.begin(), open.end(),
                                                   [&](std::size_t a, std::size_t b) { return goes_first(a, b); });
                std::vector<std::int64_t> counts = counts_;
                ++counts[*next];
                if (fits(counts)) {
                    counts_ = std::move(counts);
                } else {
                    open.erase(next);
                    someone_left = true;
                }
            }
        }
    }

    [[nodiscard]] bool goes_first(std::size_t a, std::size_t b) const {
        const Int128 left = Int128{counts_[a]} * Int128{groups_[b].need};
        const Int128 right = Int128{counts_[b]} * Int128{groups_[a].need};
        return left != right ? left < right : rank_[a] < rank_[b];
    }

    // The counts once every token before (reference, x) has been taken.
    [[nodiscard]] std::vector<std::int64_t> counts_before(const std::vector<std::size_t>& open, std::size_t reference,
                                                          std::int64_t x) const {
        std::vector<std::int64_t> counts = counts_;
        for (const std::size_t i : open) {
            const Int128 scaled = Int128{x} * Int128{groups_[i].need};
            const Int128 need = groups_[reference].need;
            const Int128 taken = rank_[i] < rank_[reference] ? scaled / need + 1 : div_up(scaled, need);
            counts[i] = std::max(counts[i], i == reference ? x : saturate(taken));
        }
        return counts;
    }

    void jump(const std::vector<std::size_t>& open, std::size_t reference) {
        const auto fits_before = [&](std::int64_t x) { return fits(counts_before(open, reference, x)); };
        const std::int64_t now = counts_[reference];
        if (fits_before(now)) {
            const auto upper = saturate(Int128{quota_} / slot_bytes_[reference]);
            counts_ = counts_before(open, reference, largest_that_fits(now, std::max(now, upper), fits_before));
        }
    }

    std::int64_t quota_;
    std::int64_t grain_;
    std::span<const SizingGroup> groups_;
    std::vector<std::int64_t> counts_;
    std::vector<Int128> slot_bytes_;
    std::vector<std::size_t> rank_;
};

// Relative slots of a byte share (weight is in billionths): six digits, since a ratio says no more. So groups whose slots
// differ by a few bytes count as equally needy, and the tie rules decide between them.
std::int64_t share_need(std::int64_t weight, std::int64_t slot_bytes) {
    const std::int64_t need = std::max<std::int64_t>(1, saturate((Int128{weight} << 20) / Int128{slot_bytes}));
    std::int64_t unit = 1;
    while (need / unit >= 1'000'000) {
        unit *= 10;
    }
    return (need + unit / 2) / unit * unit;
}

std::vector<std::int64_t> ratio_needs(const Layout& layout, const std::vector<double>& ratio) {
    const std::size_t n = layout.life_cycles.size();
    if (ratio.size() != n) {
        throw ConfigError("initial_pool_ratio must have one entry per life cycle (" + std::to_string(n) + "), got " +
                          std::to_string(ratio.size()));
    }
    std::vector<std::int64_t> weights;
    for (const double r : ratio) {
        if (!(r > 0.0 && r <= 1.000001)) {
            throw ConfigError("initial_pool_ratio: each entry must be in (0, 1], got " + std::to_string(r));
        }
        weights.push_back(static_cast<std::int64_t>(std::floor(r * 1e9 + 0.5)));
    }
    std::vector<std::int64_t> needs = sum_by_pool_group(layout, weights);
    for (std::size_t g = 0; g < needs.size(); ++g) {
        needs[g] = share_need(needs[g], layout.pool_groups[g].slot_bytes);
    }
    return needs;
}

// Per life cycle the most that a constraint batch asks of it below the limit, or its structural floor.
std::vector<std::int64_t> constraint_needs(const Layout& layout, const ManagerConfig& config) {
    const Decimal limit = Decimal::from_double(config.max_util_for_resume);
    std::vector<std::int64_t> needs = structural_floors(layout);
    for (const Batch& batch : config.constraints) {
        const std::vector<std::int64_t> demand = batch_demand(layout, batch, config.scratch_max_rewind_len);
        for (std::size_t i = 0; i < needs.size(); ++i) {
            const Decimal& share = layout.pool_group(layout.life_cycles[i].pool_group).ssm_only ? Decimal{1, 1} : limit;
            needs[i] = std::max(needs[i], ceil_div_by_limit(demand[i], share));
        }
    }
    return needs;
}

std::string label_of(const Layout& layout, const PoolGroup& group) {
    std::string text;
    for (const LifeCycleId id : group.life_cycles) {
        text += (text.empty() ? "layer group " : ", layer group ") + std::to_string(id.value()) + " (" +
                describe(layout.life_cycle(id).key) + ")";
    }
    return text;
}

}  // namespace

std::int64_t grain_for_quota(std::int64_t quota, std::int64_t granularity) {
    check_positive("quota", quota);
    check_positive("granularity", granularity);
    std::int64_t grain = std::int64_t{2} << 20;
    for (std::int64_t gib = quota >> 31; gib > 0 && grain < (std::int64_t{32} << 20); gib >>= 1) {
        grain <<= 1;
    }
    return saturate(round_up(Int128{grain}, Int128{granularity}));
}

std::int64_t grains_for_slots(std::int64_t n, std::span<const std::int64_t> slot_sizes, std::int64_t g) {
    check_slot_sizes(slot_sizes, g);
    if (n < 0 || n > kHuge) {
        throw ArgumentError("n must be in [0, 2^62], got " + std::to_string(n));
    }
    return saturate(cost_of(n, slot_sizes, g) / Int128{g});
}

std::pair<std::int64_t, std::int64_t> grains_to_slots(std::int64_t grains, std::span<const std::int64_t> slot_sizes,
                                                      std::int64_t g) {
    check_slot_sizes(slot_sizes, g);
    if (grains < 0 || grains > kHuge || slot_sizes.empty()) {
        throw ArgumentError("grains must be in [0, 2^62] and slot_sizes not empty");
    }
    const auto grains_at = [&](std::int64_t n) { return cost_of(n, slot_sizes, g) / Int128{g}; };
    const std::int64_t upper = saturate(Int128{grains} * Int128{g} / Int128{slot_sizes.front()});
    const std::int64_t slots =
        largest_that_fits(0, upper, [&](std::int64_t n) { return grains_at(n) <= Int128{grains}; });
    return {slots, static_cast<std::int64_t>(grains_at(slots))};
}

std::vector<std::int64_t> solve_slot_counts(std::int64_t quota, std::int64_t grain,
                                            std::span<const SizingGroup> groups) {
    check_positive("quota", quota);
    for (const SizingGroup& group : groups) {
        check_slot_sizes(group.slot_sizes, grain);
        check_positive("need", group.need);
        if (group.slot_sizes.empty() || group.floor < 0 || group.floor > kHuge) {
            throw ArgumentError("every pool group needs at least one pool and a floor in [0, 2^62]");
        }
    }
    return Division(quota, grain, groups).run();
}

std::vector<std::int64_t> pool_group_needs(const Layout& layout, const ManagerConfig& config) {
    if (config.initial_pool_ratio) {
        return ratio_needs(layout, *config.initial_pool_ratio);
    }
    const auto demand_of = [&](const Batch& batch) {
        return sum_by_pool_group(layout, batch_demand(layout, batch, config.scratch_max_rewind_len));
    };
    std::vector<std::int64_t> needs;
    if (config.typical_step) {
        needs = demand_of(*config.typical_step);
    } else if (!config.constraints.empty()) {
        needs = sum_by_pool_group(layout, constraint_needs(layout, config));
    } else {
        needs = demand_of({.requests = {{.capacity = 2049, .history = 2048}}, .system_prompt_length = 0});
    }
    for (std::int64_t& need : needs) {
        need = std::max<std::int64_t>(1, need);
    }
    return needs;
}

PoolPlan plan_pools(const Layout& layout, const ManagerConfig& config, std::int64_t granularity) {
    if (config.gpu_quota < 1 || config.gpu_quota > kHuge) {
        throw ConfigError("quota must be in [1, 2^62] bytes, got " + std::to_string(config.gpu_quota));
    }
    PoolPlan plan;
    plan.grain = grain_for_quota(config.gpu_quota, granularity);
    plan.floors = pool_group_floors(layout, config);
    const std::vector<std::int64_t> needs = pool_group_needs(layout, config);
    std::vector<SizingGroup> groups;
    for (std::size_t g = 0; g < layout.pool_groups.size(); ++g) {
        const PoolGroup& group = layout.pool_groups[g];
        groups.push_back({.slot_sizes = group.slot_sizes,
                          .floor = plan.floors[g],
                          .need = needs[g],
                          .key = group.key,
                          .label = label_of(layout, group)});
    }
    plan.counts = solve_slot_counts(config.gpu_quota, plan.grain, groups);
    check_index_range(layout, plan.counts);
    return plan;
}

}  // namespace kvpool
