// Pages, and the order in which the cached ones of a pool group give way.
//
// Lowest priority first; at equal priority class A (window pages that no likely end point needs) before class B; then the page
// that has waited longest.  A list per priority and class, with a bit for each that is not empty, so push, erase and first take
// a fixed number of instructions.
// Changes go through the journal: a page that is taken out keeps its neighbours' slots, so that an undo, newest change first,
// puts it back between them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kvpool/core/ids.hpp"
#include "kvpool/core/journal.hpp"
#include "kvpool/storage/slot_set.hpp"

namespace kvpool {

// The record of a slot; all zero while there is no page.  32 bytes a slot.
//   owned   refs > 0: so many caches own it
//   linked  has_node(): node.page[lc] == slot
//   cached  linked and not owned: it waits in the queue
struct Page {
    // Changed together: one entry of the journal.
    struct Head {
        std::int32_t refs;
        std::uint16_t life_cycle;
        std::uint8_t priority;
        bool is_queued : 1;
        bool is_class_b : 1;  // where it waits, or last did
    } head;
    struct Neighbours {
        std::int32_t before;  // slot + 1; 0: none
        std::int32_t after;
    } neighbours;
    std::int32_t node_plus_one;  // 0: none
    std::int32_t plans;          // planned drops
    std::uint64_t serial;        // tells it from other pages that had the slot before

    [[nodiscard]] bool exists() const noexcept { return head.refs != 0 || node_plus_one != 0; }
    [[nodiscard]] NodeId node() const noexcept { return NodeId(node_plus_one - 1); }
    [[nodiscard]] LifeCycleId life_cycle() const noexcept { return LifeCycleId(head.life_cycle); }
};

static_assert(sizeof(Page) == 32 && sizeof(Page::Head) == 8);

class EvictionQueue {
public:
    static constexpr std::int32_t kMaxPriority = 100;

    // `pages` by slot; they and the journal outlive the queue, which does not move.
    EvictionQueue(LazyArray<Page>& pages, Journal& journal) noexcept : pages_(&pages), journal_(&journal) {}
    EvictionQueue(const EvictionQueue&) = delete;
    EvictionQueue& operator=(const EvictionQueue&) = delete;

    [[nodiscard]] std::int64_t size() const noexcept { return size_; }
    // The page waits from now on, behind all others of its priority and class.  The caller has saved page.head in the journal.
    void push(SlotId slot, bool is_class_b);
    // The page waits no longer.
    void erase(SlotId slot);
    // The next victim; kBadSlot when empty.
    [[nodiscard]] SlotId first() const noexcept;
    // All of them, the next victim first.
    [[nodiscard]] std::vector<SlotId> in_order() const;

    // CorruptedError when lists, bits and pages disagree.
    void audit() const;

private:
    struct List {
        std::int32_t first = 0;  // slot + 1; 0: none
        std::int32_t last = 0;
    };
    static constexpr std::size_t kLists = 2 * static_cast<std::size_t>(kMaxPriority + 1);

    [[nodiscard]] Page& at(std::int32_t slot_plus_one) const noexcept {
        return (*pages_)[static_cast<std::size_t>(slot_plus_one) - 1];
    }
    [[nodiscard]] static std::size_t list_of(const Page& page) noexcept {
        return 2 * std::size_t{page.head.priority} + (page.head.is_class_b ? 1 : 0);
    }
    void append(std::int32_t slot_plus_one) noexcept;
    void take_out(std::int32_t slot_plus_one) noexcept;
    void put_back(std::int32_t slot_plus_one) noexcept;

    LazyArray<Page>* pages_;
    Journal* journal_;
    std::int64_t size_ = 0;
    std::array<std::uint64_t, (kLists + 63) / 64> not_empty_{};
    std::array<List, kLists> lists_{};
};

}  // namespace kvpool
