// Marks: end points that prompts are likely to come back to, and the window pages that those need.
//
// A windowed life cycle serves an end point only while the pages of the window before it, its tail, are there.  Every mark counts
// in the tails of the blocks of its tail; pages that a mark needs give way after those that none does.
//   sequence  a cache was closed here
//   prompt    a prompt ended here, give or take the slack: the next one may differ in its last tokens
//   fork      the node has two children or more: prompts are known to part here
// Invariant: tails[lc] of a node = marks at or below it whose tail of lc reaches it.  Without retain_window_tails there are no
// marks.  Changes go through the journal.
#pragma once

#include <cstdint>

#include "kvpool/core/ids.hpp"
#include "kvpool/reuse/radix_tree.hpp"

namespace kvpool {

// Learns which pages come to be needed by a mark, or are needed by none any more.
class TailListener {
public:
    virtual void tail_changed(NodeId node, LifeCycleId lc) = 0;

protected:
    TailListener() = default;
    ~TailListener() = default;
    TailListener(const TailListener&) = default;
    TailListener& operator=(const TailListener&) = default;
};

class Retention {
public:
    // Both outlive it.
    Retention(RadixTree& tree, TailListener& listener) noexcept : tree_(&tree), listener_(&listener) {}

    // Nothing when set already, and on a root.
    void mark(NodeId node, Mark bit);
    // Nothing when not set.
    void unmark(NodeId node, Mark bit);
    // Clears all marks of a node.
    void clear(NodeId node);

    // CorruptedError unless the tails of all nodes are what the marks make them.  O(marks * window + nodes).
    void audit() const;

private:
    void count(NodeId node, Mark bit, std::int32_t n);
    // f(lc, node) for each block of the tail of a mark: life cycles ascending, from the node upward.
    template <class F>
    void for_tail(NodeId node, Mark bit, F&& f) const;

    RadixTree* tree_;
    TailListener* listener_;
};

}  // namespace kvpool
