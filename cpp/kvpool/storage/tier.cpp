#include "kvpool/storage/tier.hpp"

#include <algorithm>

#include "kvpool/core/errors.hpp"

namespace kvpool {

Tier::Tier(Device& device, Journal& journal, const Layout& layout, std::span<const std::int64_t> slot_counts,
           std::int64_t grain)
    : device_(&device), journal_(&journal) {
    groups_.reserve(layout.pool_groups.size());
    for (std::size_t g = 0; g < layout.pool_groups.size(); ++g) {
        const std::int64_t slots = slot_counts[g];
        Group group{SlotAllocator(slots), make_lazy_array<ReadySet>(static_cast<std::size_t>(slots)), {}};
        for (const std::int64_t slot_bytes : layout.pool_groups[g].slot_sizes) {
            group.pools.emplace_back(device, slot_bytes, slots, grain);
        }
        groups_.push_back(std::move(group));
    }
}

SlotId Tier::allocate(PoolGroupId g) {
    Group& group = at(g);
    const SlotId slot = group.allocator.allocate();
    try {
        journal_->remark({kHandedOut, g, slot});
        journal_->note(&undo_allocate, &group, static_cast<std::uint64_t>(slot.value()));
    } catch (...) {
        group.allocator.release(slot);
        throw;
    }
    return slot;
}

void Tier::free_slot(PoolGroupId g, SlotId slot) {
    Group& group = at(g);
    group.allocator.release(slot);
    try {
        journal_->note(&undo_free, &group, static_cast<std::uint64_t>(slot.value()));
    } catch (...) {
        group.allocator.reoccupy(slot);
        throw;
    }
}

void Tier::undo_allocate(void* group, std::uint64_t slot) {
    try {
        static_cast<Group*>(group)->allocator.release(SlotId(static_cast<std::int32_t>(slot)));
    } catch (const LogicError& error) {
        throw CorruptedError(error.what());  // the slot is not where the journal had put it
    }
}

void Tier::undo_free(void* group, std::uint64_t slot) {
    try {
        static_cast<Group*>(group)->allocator.reoccupy(SlotId(static_cast<std::int32_t>(slot)));
    } catch (const LogicError& error) {
        throw CorruptedError(error.what());
    }
}

bool Tier::has_note(std::int32_t kind) const noexcept {
    const std::span<const Journal::Remark> notes = journal_->remarks();
    return std::any_of(notes.begin(), notes.end(), [&](const Journal::Remark& note) { return note.kind == kind; });
}

void Tier::events_to_wait_for(StreamId stream, std::vector<EventId>& out) const {
    out.clear();
    const auto take = [&](const StreamEvent& e) {
        if (e.event != 0 && e.stream != stream.value()) {
            out.emplace_back(e.event);
        }
    };
    for (const Journal::Remark& note : journal_->remarks()) {
        if (note.kind != kFinished) {
            const ReadySet& set = at(note.group).ready[note.slot.index()];
            take(set.first);
            for (std::int32_t i = set.more; i != 0; i = more_[i - 1].next) {
                take(more_[i - 1].event);
            }
        }
    }
    std::sort(out.begin(), out.end());
    out.erase(std::unique(out.begin(), out.end()), out.end());
}

void Tier::settle(StreamId stream, EventId event) {
    for (const Journal::Remark& note : journal_->remarks()) {
        ReadySet& set = at(note.group).ready[note.slot.index()];
        if (note.kind == kHandedOut) {
            clear(set);
        } else if (note.kind == kFinished && event != kCompleteEvent) {
            add(set, {stream.value(), event.value()});
        }
    }
}

void Tier::clear(ReadySet& set) {
    if (set.first.event == 0) {
        return;
    }
    while (set.more != 0) {
        const std::int32_t i = set.more - 1;
        journal_->set(set.more, more_[i].next);
        more_.give(*journal_, i);
    }
    journal_->set(set.first.event, 0);
}

void Tier::add(ReadySet& set, StreamEvent event) {
    if (set.first.event == 0 || set.first.stream == event.stream) {
        journal_->set(set.first.stream, event.stream);
        journal_->set(set.first.event, event.event);
        return;
    }
    std::size_t size = 1;
    for (std::int32_t i = set.more; i != 0; i = more_[i - 1].next) {
        if (more_[i - 1].event.stream == event.stream) {
            journal_->set(more_[i - 1].event.event, event.event);
            return;
        }
        ++size;
    }
    const std::int32_t fresh = more_.take(*journal_);
    more_[fresh].next = set.more;
    more_[fresh].event = event;
    journal_->set(set.more, fresh + 1);
    if (size + 1 > kManyEvents) {
        drop_complete(set, event.stream);
    }
}

void Tier::drop_complete(ReadySet& set, std::int64_t except_stream) {
    for (std::int32_t* hook = &set.more; *hook != 0;) {
        const std::int32_t i = *hook - 1;
        if (more_[i].event.stream != except_stream && device_->query(EventId(more_[i].event.event))) {
            journal_->set(*hook, more_[i].next);
            more_.give(*journal_, i);
        } else {
            hook = &more_[i].next;
        }
    }
    if (set.first.stream != except_stream && device_->query(EventId(set.first.event))) {
        const std::int32_t i = set.more - 1;  // the event just added is there
        journal_->set(set.first.stream, more_[i].event.stream);
        journal_->set(set.first.event, more_[i].event.event);
        journal_->set(set.more, more_[i].next);
        more_.give(*journal_, i);
    }
}

void Tier::append_ready_set(PoolGroupId g, SlotId slot, std::vector<std::pair<StreamId, EventId>>& out) const {
    const ReadySet& set = at(g).ready[slot.index()];
    if (set.first.event == 0) {
        return;
    }
    out.emplace_back(set.first.stream, set.first.event);
    for (std::int32_t i = set.more; i != 0; i = more_[i - 1].next) {
        out.emplace_back(more_[i - 1].event.stream, more_[i - 1].event.event);
    }
}

std::int64_t Tier::mapped_bytes() const {
    std::int64_t sum = 0;
    for (const Group& group : groups_) {
        for (const Pool& pool : group.pools) {
            sum += pool.mapped_bytes();
        }
    }
    return sum;
}

void Tier::append_slot_copy(PoolGroupId g, SlotId dst, SlotId src, std::vector<CopyTask>& tasks) const {
    for (const Pool& pool : at(g).pools) {
        tasks.push_back({pool.slot_address(dst), pool.slot_address(src), pool.slot_bytes()});
    }
}

void Tier::audit() const {
    for (const Group& group : groups_) {
        group.allocator.audit();
        for (std::int64_t slot = 0; slot < group.allocator.num_active(); ++slot) {
            const ReadySet& set = group.ready[static_cast<std::size_t>(slot)];
            if (set.first.event == 0 && set.more != 0) {
                throw CorruptedError("slot " + std::to_string(slot) + ": the ready set lacks its first event");
            }
        }
    }
}

}  // namespace kvpool
