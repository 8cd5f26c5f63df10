// The children of a node that share leading tokens with a query, outward from the query's place in token order: most shared
// first; at equal numbers the side of smaller tokens first, and the nearer before the farther.
// A step takes O(log n) comparisons among n children.  A view: it is over with the next change of the tree.
#pragma once

#include <cstdint>

#include "kvpool/core/ids.hpp"
#include "kvpool/core/tokens.hpp"
#include "kvpool/reuse/radix_tree.hpp"

namespace kvpool {

class Siblings {
public:
    // `except` is left out.
    Siblings(const RadixTree& tree, NodeId parent, Level level, const Query& query, NodeId except = kNoNode) noexcept;

    struct Sibling {
        NodeId node;  // kNoNode: no more
        std::int64_t shared = 0;
    };
    [[nodiscard]] Sibling next() noexcept;

private:
    void step_before() noexcept;
    void step_after() noexcept;
    [[nodiscard]] std::int64_t shared_with(std::int32_t node) const noexcept;

    const RadixTree* tree_;
    std::int32_t root_;
    Level level_;
    Query query_;
    NodeId except_;
    std::int32_t before_;
    std::int32_t after_;
    std::int64_t shared_before_;
    std::int64_t shared_after_;
};

}  // namespace kvpool
