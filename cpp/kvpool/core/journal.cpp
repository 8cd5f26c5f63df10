#include "kvpool/core/journal.hpp"

#include <algorithm>
#include <new>

namespace kvpool {

void Journal::roll_back_to(Savepoint savepoint) {
    while (size() > savepoint.size) {
        const Entry& entry = *--next_;
        entry.undo(entry.target, entry.old);
    }
    remarks_.resize(std::min(remarks_.size(), savepoint.num_remarks));
}

void Journal::grow() {
    const std::size_t used = size();
    const std::size_t capacity = std::max<std::size_t>(256, 2 * used);
    void* const grown = std::realloc(entries_.get(), capacity * sizeof(Entry));
    if (grown == nullptr) {
        throw std::bad_alloc();  // the old log is untouched
    }
    static_cast<void>(entries_.release());
    entries_.reset(static_cast<Entry*>(grown));
    next_ = entries_.get() + used;
    limit_ = entries_.get() + capacity;
}

}  // namespace kvpool
