// Records in chunks: addressed by index, never moved, freed ones used again.
//
// Words
//   record  `stride` bytes of plain data; the first 4 are its link in the free list while nobody has it; what it holds when taken is
//           anything
//   recent  records given back in the running call: they are not handed out again before the next one
// Because of `recent`, whoever takes a record may write into it past the journal: undoing the call needs nothing of what it had
// held.  The first 4 bytes alone are restored by the journal.  Chunks are freed with the slab.
// Not thread safe: used under the manager's lock.
#pragma once

#include <sys/mman.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvpool/core/errors.hpp"
#include "kvpool/core/journal.hpp"

namespace kvpool {

// Records whose size is known when the slab is made.
class RecordSlab {
public:
    static constexpr std::int32_t kNone = -1;

    // With `many` records to come, chunks are huge pages: first use and look-ups are several times faster then, but the first
    // record costs 2 MiB.
    explicit RecordSlab(std::size_t stride, bool many = false) noexcept
        : stride_(stride),
          many_(many),
          bits_(stride < chunk_bytes() ? static_cast<int>(std::bit_width(chunk_bytes() / stride)) - 1 : 0),
          mask_((std::size_t{1} << bits_) - 1) {}

    // Of a record that was ever taken.
    [[nodiscard]] std::byte* at(std::int32_t index) const noexcept {
        const auto i = static_cast<std::size_t>(index);
        return chunks_[i >> bits_].get() + (i & mask_) * stride_;
    }
    // Where record index + 1 lies, seen from record `index`; nullptr if that is another chunk.
    [[nodiscard]] const std::byte* behind(std::int32_t index, const std::byte* record) const noexcept {
        return (static_cast<std::size_t>(index) & mask_) != mask_ ? record + stride_ : nullptr;
    }

    [[nodiscard]] std::int32_t take(Journal& journal) {
        settle(journal);
        const std::int32_t index = free_;
        if (index == kNone) {
            if (static_cast<std::size_t>(end_) == chunks_.size() << bits_) {
                add_chunk();
            }
            journal.save(end_);
            return end_++;
        }
        journal.set(free_, link(index));
        journal.save(link(index));
        return index;
    }
    void give(Journal& journal, std::int32_t index) {
        settle(journal);
        journal.set(link(index), recent_);
        journal.set(recent_, index);
    }

private:
    struct Free {
        void operator()(std::byte* chunk) const noexcept { std::free(chunk); }
    };
    static constexpr std::size_t kChunkBytes = std::size_t{1} << 18;  // untouched pages of it cost nothing
    static constexpr std::size_t kHugePage = std::size_t{1} << 21;
    static constexpr std::size_t kCacheLine = 64;

    // About; a record may be larger.
    [[nodiscard]] std::size_t chunk_bytes() const noexcept { return many_ ? kHugePage : kChunkBytes; }

    [[nodiscard]] std::int32_t& link(std::int32_t index) noexcept {
        return *reinterpret_cast<std::int32_t*>(at(index));
    }

    // Frees what earlier calls gave back.  Comes before this call's first entry about the slab, so it needs none itself.
    void settle(const Journal& journal) noexcept {
        if (call_ == journal.call()) {
            return;
        }
        call_ = journal.call();
        if (free_ == kNone) {
            free_ = recent_;
            recent_ = kNone;
        }
        while (recent_ != kNone) {
            const std::int32_t index = recent_;
            recent_ = link(index);
            link(index) = free_;
            free_ = index;
        }
    }

    void add_chunk() {
        if (chunks_.size() == static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()) >> bits_) {
            throw OutOfMemoryError("too many records");
        }
        const std::size_t alignment = many_ ? kHugePage : kCacheLine;
        const std::size_t bytes = ((stride_ << bits_) + alignment - 1) / alignment * alignment;
        std::unique_ptr<std::byte[], Free> chunk(static_cast<std::byte*>(std::aligned_alloc(alignment, bytes)));
        if (chunk == nullptr) {
            throw std::bad_alloc();
        }
        if (many_) {
            static_cast<void>(::madvise(chunk.get(), bytes, MADV_HUGEPAGE));  // a hint: small pages will do
        }
        chunks_.push_back(std::move(chunk));
    }

    std::size_t stride_;
    bool many_;
    int bits_;  // a chunk has 2^bits_ records
    std::size_t mask_;
    std::vector<std::unique_ptr<std::byte[], Free>> chunks_;
    std::int32_t end_ = 0;
    std::int32_t free_ = kNone;
    std::int32_t recent_ = kNone;
    std::uint64_t call_ = 0;
};

// Records of one type, whose first member is an int32 that the slab uses while nobody has the record.
template <class T>
class Slab {
    static_assert(std::is_trivially_copyable_v<T> && std::is_standard_layout_v<T>);

public:
    Slab() noexcept : records_(sizeof(T)) {}

    [[nodiscard]] T& operator[](std::int32_t index) noexcept { return *reinterpret_cast<T*>(records_.at(index)); }
    [[nodiscard]] const T& operator[](std::int32_t index) const noexcept {
        return *reinterpret_cast<const T*>(records_.at(index));
    }
    [[nodiscard]] std::int32_t take(Journal& journal) { return records_.take(journal); }
    void give(Journal& journal, std::int32_t index) { records_.give(journal, index); }

private:
    RecordSlab records_;
};

}  // namespace kvpool
