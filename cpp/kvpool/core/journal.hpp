// The changes of one call, so that a call that fails half-way leaves everything as it was.
//
// Words
//   entry      how to take one change back: a function, what it works on, and the old value (<= 8 bytes)
//   remark     what the call has done to a slot, for its end; taken back with the entries around it (see Tier)
//   savepoint  a place in the log to which part of a call can be taken back
// Use: begin(); changes through set() and note(); commit().  Whoever catches an error between calls roll_back().  Entries are
// undone newest first, so an entry may rely on everything being as it was right after its own change.
// Rules
//   every change of shared state inside a call goes through the journal: a field that is written past it keeps its new value
//   fields are plain data at addresses that do not move before commit(): slabs, lazy arrays, members of managers
//   the entry is logged before the change is made: if the log can not grow (std::bad_alloc), nothing has changed
// Memory: the log keeps its capacity, so a steady state allocates nothing.  Not thread safe: used under the manager's lock.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "kvpool/core/ids.hpp"

namespace kvpool {

class Journal {
public:
    // Takes one change back; may throw CorruptedError if the state is not the one that the change had left.
    using Undo = void (*)(void* target, std::uint64_t old);
    // Valid until the next begin(), commit() or roll_back(), and as long as nothing before it has been taken back.
    struct Savepoint {
        std::size_t size = 0;
        std::size_t num_remarks = 0;
    };
    struct Remark {
        std::int32_t kind;
        PoolGroupId group;
        SlotId slot;
    };

    Journal() noexcept = default;
    Journal(const Journal&) = delete;
    Journal& operator=(const Journal&) = delete;

    // Starts a call with an empty log.
    void begin() noexcept {
        next_ = entries_.get();
        remarks_.clear();
        ++call_;
    }
    // Ends the call; its changes stay.
    void commit() noexcept {
        next_ = entries_.get();
        remarks_.clear();
    }
    // Takes the whole call back.
    void roll_back() { roll_back_to({0, 0}); }

    [[nodiscard]] Savepoint savepoint() const noexcept { return {size(), remarks_.size()}; }
    // Takes back what has been changed since.
    void roll_back_to(Savepoint savepoint);

    // field = value.
    template <class T>
    void set(T& field, std::type_identity_t<T> value) {
        save(field);
        store(field, value);
    }
    // field += delta.
    template <class T>
    void add(T& field, std::type_identity_t<T> delta) {
        set(field, static_cast<T>(field + delta));
    }
    // Remembers the field; the caller changes it afterwards, as often as it likes.
    template <class T>
    void save(T& field) {
        static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(std::uint64_t));
        std::uint64_t old = 0;
        std::memcpy(&old, &field, sizeof(T));
        note(&restore<sizeof(T)>, &field, old);
    }
    // field = value in one piece: a save() soon after, which reads it in one piece, need not wait for several small writes.
    template <class T>
    static void store(T& field, std::type_identity_t<T> value) noexcept {
        if constexpr (sizeof(T) == sizeof(std::uint64_t)) {
            const auto bits = std::bit_cast<std::uint64_t>(value);
            std::memcpy(static_cast<void*>(&field), &bits, sizeof bits);
        } else {
            field = value;
        }
    }
    // A change of any other kind: undo(target, old) will take it back.
    void note(Undo undo, void* target, std::uint64_t old) {
        if (next_ == limit_) {
            grow();
        }
        *next_++ = {undo, target, old};
    }

    void remark(const Remark& remark) { remarks_.push_back(remark); }
    // Remarks of this call that have not been taken back, in order.
    [[nodiscard]] std::span<const Remark> remarks() const noexcept { return remarks_; }

    // Entries of this call that have not been taken back.
    [[nodiscard]] std::size_t size() const noexcept { return static_cast<std::size_t>(next_ - entries_.get()); }
    // Number of calls begun; tells whether something was done in this very call.
    [[nodiscard]] std::uint64_t call() const noexcept { return call_; }

private:
    struct Entry {
        Undo undo;
        void* target;
        std::uint64_t old;
    };
    struct Free {
        void operator()(Entry* entries) const noexcept { std::free(entries); }
    };

    template <std::size_t kBytes>
    static void restore(void* target, std::uint64_t old) noexcept {
        std::memcpy(target, &old, kBytes);  // the low bytes: little-endian, as everything here
    }
    void grow();

    std::unique_ptr<Entry[], Free> entries_;
    Entry* next_ = nullptr;   // where the next entry goes
    Entry* limit_ = nullptr;  // end of the room for entries
    std::vector<Remark> remarks_;
    std::uint64_t call_ = 0;
};

}  // namespace kvpool
