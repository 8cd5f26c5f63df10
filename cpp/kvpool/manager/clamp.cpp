// clamp_max_seq_len(): how long one sequence may get beside others of one token.
#include <algorithm>

#include "kvpool/core/math.hpp"
#include "kvpool/manager/state.hpp"
#include "kvpool/storage/demand.hpp"

namespace kvpool {
namespace {

// Slots per pool group of one sequence whose tokens are all done.
std::vector<std::int64_t> slots_of(const Layout& layout, std::int64_t length) {
    Batch batch;
    batch.requests.push_back({length, length});
    return sum_by_pool_group(layout, batch_demand(layout, batch, std::nullopt));
}

}  // namespace

std::int64_t ManagerState::clamp_max_seq_len(std::int64_t batch_size, std::int64_t token_num_upper_bound) const {
    const std::int64_t tpb = layout.tokens_per_block;
    const std::int64_t bound = std::max(std::int64_t{0}, token_num_upper_bound);
    const Int128 others = std::max(std::int64_t{0}, batch_size - 1);
    const std::vector<std::int64_t> one_token = slots_of(layout, 1);
    const auto fits = [&](std::int64_t blocks) {
        const std::vector<std::int64_t> demand = slots_of(layout, blocks * tpb);
        for (std::size_t group = 0; group < demand.size(); ++group) {
            if (Int128{demand[group]} + others * one_token[group] > tier.total(make_id<PoolGroupId>(group))) {
                return false;
            }
        }
        return true;
    };
    return std::min(largest_that_fits(0, div_up(bound, tpb), fits) * tpb, bound);
}

}  // namespace kvpool
