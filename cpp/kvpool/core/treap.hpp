// An ordered set of records, intrusive and plain: a binary search tree over record indices that is also a heap by mix(index).
//
// Words
//   root   an int32 of the owner: the record on top, kNil when empty
//   links  left and right of a record, found by Access::links(index)
// Invariants
//   left subtree < record < right subtree;  priority(record) > priority of its children
// The shape depends on the members alone.  All steps take expected O(log n); a set of one is its root, without a comparison.
// Every link is changed through the journal, so an undo restores the very shape.  Order comes from a function of the caller:
// compare(other) = order of the record (or key) at hand against record `other`: < 0, 0, > 0.
#pragma once

#include <cstdint>

#include "kvpool/core/journal.hpp"

namespace kvpool {

inline constexpr std::int32_t kNil = -1;

struct TreapLinks {
    std::int32_t left = kNil;
    std::int32_t right = kNil;
};

// A bijection of 32 bits: different indices have different priorities.
[[nodiscard]] constexpr std::uint32_t treap_priority(std::int32_t index) noexcept {
    auto x = static_cast<std::uint32_t>(index);
    x = (x ^ (x >> 16)) * 0x7feb352dU;
    x = (x ^ (x >> 15)) * 0x846ca68bU;
    return x ^ (x >> 16);
}

// Adds a record, which is no member; its links are set.
template <class Access, class Compare>
void treap_insert(Journal& journal, std::int32_t& root, std::int32_t index, Access& access, Compare&& compare) {
    std::int32_t* hook = &root;
    const std::uint32_t priority = treap_priority(index);
    while (*hook != kNil && treap_priority(*hook) > priority) {
        TreapLinks& links = access.links(*hook);
        hook = compare(*hook) < 0 ? &links.left : &links.right;
    }
    std::int32_t below = *hook;
    journal.set(*hook, index);
    TreapLinks& links = access.links(index);
    journal.save(links);
    links = {};
    // Split what was here: the smaller ones to the left, the others to the right.
    std::int32_t* smaller = &links.left;
    std::int32_t* larger = &links.right;
    while (below != kNil) {
        TreapLinks& other = access.links(below);
        if (compare(below) < 0) {
            journal.set(*larger, below);
            larger = &other.left;
            below = *larger;
        } else {
            journal.set(*smaller, below);
            smaller = &other.right;
            below = *smaller;
        }
    }
    if (*smaller != kNil) {
        journal.set(*smaller, kNil);
    }
    if (*larger != kNil) {
        journal.set(*larger, kNil);
    }
}

// Takes a member out.
template <class Access, class Compare>
void treap_erase(Journal& journal, std::int32_t& root, std::int32_t index, Access& access, Compare&& compare) {
    std::int32_t* hook = &root;
    while (*hook != index) {
        TreapLinks& links = access.links(*hook);
        hook = compare(*hook) < 0 ? &links.left : &links.right;
    }
    std::int32_t left = access.links(index).left;
    std::int32_t right = access.links(index).right;
    while (left != kNil && right != kNil) {
        if (treap_priority(left) > treap_priority(right)) {
            journal.set(*hook, left);
            hook = &access.links(left).right;
            left = *hook;
        } else {
            journal.set(*hook, right);
            hook = &access.links(right).left;
            right = *hook;
        }
    }
    journal.set(*hook, left != kNil ? left : right);
}

// Members around a key: the largest below it, and the smallest that is not below it.
struct TreapPlace {
    std::int32_t before = kNil;
    std::int32_t from = kNil;
};

template <class Access, class Compare>
[[nodiscard]] TreapPlace treap_place(std::int32_t root, const Access& access, Compare&& compare) {
    TreapPlace place;
    while (root != kNil) {
        const TreapLinks& links = access.links(root);
        if (compare(root) > 0) {
            place.before = root;
            root = links.right;
        } else {
            place.from = root;
            root = links.left;
        }
    }
    return place;
}

// Smallest member above the key.
template <class Access, class Compare>
[[nodiscard]] std::int32_t treap_after(std::int32_t root, const Access& access, Compare&& compare) {
    std::int32_t after = kNil;
    while (root != kNil) {
        const TreapLinks& links = access.links(root);
        if (compare(root) < 0) {
            after = root;
            root = links.left;
        } else {
            root = links.right;
        }
    }
    return after;
}

}  // namespace kvpool
