#include "kvpool/page/eviction_queue.hpp"

#include <bit>
#include <string>

#include "kvpool/core/errors.hpp"

namespace kvpool {

void EvictionQueue::push(SlotId slot, bool is_class_b) {
    const std::int32_t id = slot.value() + 1;
    Page& page = at(id);
    journal_->save(page.neighbours);
    journal_->note(
        [](void* queue, std::uint64_t old) noexcept {
            static_cast<EvictionQueue*>(queue)->take_out(static_cast<std::int32_t>(old));
        },
        this, static_cast<std::uint64_t>(id));
    page.head.is_class_b = is_class_b;
    append(id);
}

void EvictionQueue::erase(SlotId slot) {
    const std::int32_t id = slot.value() + 1;
    journal_->note(
        [](void* queue, std::uint64_t old) noexcept {
            static_cast<EvictionQueue*>(queue)->put_back(static_cast<std::int32_t>(old));
        },
        this, static_cast<std::uint64_t>(id));
    take_out(id);
}

void EvictionQueue::append(std::int32_t id) noexcept {
    Page& page = at(id);
    const std::size_t i = list_of(page);
    List& list = lists_[i];
    page.head.is_queued = true;
    page.neighbours = {list.last, 0};
    if (list.last != 0) {
        at(list.last).neighbours.after = id;
    } else {
        list.first = id;
        not_empty_[i >> 6] |= std::uint64_t{1} << (i & 63);
    }
    list.last = id;
    ++size_;
}

void EvictionQueue::take_out(std::int32_t id) noexcept {
    Page& page = at(id);
    const std::size_t i = list_of(page);
    List& list = lists_[i];
    const Page::Neighbours around = page.neighbours;  // stay with the page, for put_back()
    page.head.is_queued = false;
    (around.before != 0 ? at(around.before).neighbours.after : list.first) = around.after;
    (around.after != 0 ? at(around.after).neighbours.before : list.last) = around.before;
    if (list.first == 0) {
        not_empty_[i >> 6] &= ~(std::uint64_t{1} << (i & 63));
    }
    --size_;
}

void EvictionQueue::put_back(std::int32_t id) noexcept {
    Page& page = at(id);
    const std::size_t i = list_of(page);
    List& list = lists_[i];
    const Page::Neighbours around = page.neighbours;
    page.head.is_queued = true;
    (around.before != 0 ? at(around.before).neighbours.after : list.first) = id;
    (around.after != 0 ? at(around.after).neighbours.before : list.last) = id;
    not_empty_[i >> 6] |= std::uint64_t{1} << (i & 63);
    ++size_;
}

SlotId EvictionQueue::first() const noexcept {
    for (std::size_t word = 0; word < not_empty_.size(); ++word) {
        if (not_empty_[word] != 0) {
            const std::size_t i = (word << 6) | static_cast<std::size_t>(std::countr_zero(not_empty_[word]));
            return SlotId(lists_[i].first - 1);
        }
    }
    return kBadSlot;
}

std::vector<SlotId> EvictionQueue::in_order() const {
    std::vector<SlotId> slots;
    slots.reserve(static_cast<std::size_t>(size_));
    for (const List& list : lists_) {
        for (std::int32_t id = list.first; id != 0; id = at(id).neighbours.after) {
            slots.emplace_back(id - 1);
        }
    }
    return slots;
}

void EvictionQueue::audit() const {
    std::int64_t found = 0;
    bool valid = true;
    for (std::size_t i = 0; i < kLists; ++i) {
        std::int32_t before = 0;
        for (std::int32_t id = lists_[i].first; id != 0 && found <= size_; id = at(id).neighbours.after) {
            const Page& page = at(id);
            valid = valid && page.neighbours.before == before && list_of(page) == i && page.head.is_queued;
            before = id;
            ++found;
        }
        valid = valid && lists_[i].last == before &&
                ((not_empty_[i >> 6] >> (i & 63)) & 1) == (lists_[i].first != 0 ? 1 : 0);
    }
    if (!valid || found != size_) {
        throw CorruptedError("eviction queue: " + std::to_string(found) + " pages found, " + std::to_string(size_) +
                             " counted, or a link is wrong");
    }
}

}  // namespace kvpool
