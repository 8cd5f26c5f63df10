// Plans to drop pages of the prefix cache, by number. A plan is a promise to itself: until it is dropped, its pages only carry a
// count, and pages that are gone meanwhile are skipped. Used under the manager's lock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "kvpool/page/prefix_cache.hpp"

namespace kvpool {

class PlannedDrops {
public:
    using Pages = std::vector<PlannedPage>;

    // Keeps a plan under the next number; they count from 1.
    void add(Pages pages) {
        plans_.emplace(last_ + 1, std::move(pages));
        ++last_;
    }
    // Number of the plan added last.
    [[nodiscard]] std::int64_t last() const noexcept { return last_; }
    // The pages of a plan; nullptr if there is no such plan (any more).
    [[nodiscard]] const Pages* find(std::int64_t plan) const noexcept {
        const auto found = plans_.find(plan);
        return found == plans_.end() ? nullptr : &found->second;
    }
    void remove(std::int64_t plan) noexcept { plans_.erase(plan); }
    void clear() noexcept { plans_.clear(); }

private:
    std::map<std::int64_t, Pages> plans_;
    std::int64_t last_ = 0;
};

}  // namespace kvpool
