// Records of caches, addressed by handles that notice reuse.
//
// Words
//   handle   generation << 32 | index; the generation of an index counts from 1 and grows with every open()
// Invariants
//   freed indices are used again last in, first out; else the next new index is taken
//   records never move: chunk k holds kFirstChunk << k of them and is never freed before the slab
// find() may be called by any thread without the lock and tells whether the handle lives at that moment; open() and close()
// need the lock.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/core/errors.hpp"
#include "kvpool/sequence/kv_cache.hpp"

namespace kvpool {

using CacheHandle = std::int64_t;

// "handle 0x100000003", for messages.
[[nodiscard]] std::string describe_handle(CacheHandle handle);

class CacheSlab {
public:
    [[nodiscard]] static constexpr std::uint32_t index_of(CacheHandle handle) noexcept {
        return static_cast<std::uint32_t>(handle & 0xFFFFFFFF);
    }
    [[nodiscard]] static constexpr std::uint32_t generation_of(CacheHandle handle) noexcept {
        return static_cast<std::uint32_t>(static_cast<std::uint64_t>(handle) >> 32);
    }

    // The living record of a handle, or nullptr.
    [[nodiscard]] KvCache* find(CacheHandle handle) const noexcept {
        const std::uint32_t index = index_of(handle);
        if (handle < 0 || index >= size_.load(std::memory_order_acquire)) {
            return nullptr;
        }
        KvCache& cache = at(index);
        const std::uint32_t generation = generation_of(handle);
        return generation != 0 && cache.generation.load(std::memory_order_acquire) == generation ? &cache : nullptr;
    }

    // A fresh SUSPENDED cache; its handle.
    CacheHandle open(std::size_t num_life_cycles, bool scratch_on) {
        const bool reuse = !free_.empty();
        const std::uint32_t index = reuse ? free_.back() : add();
        KvCache& cache = at(index);
        if (!reuse) {
            free_.push_back(index);  // so that a failing open() below leaves the index usable
        }
        cache.open(num_life_cycles, scratch_on, cache.last_generation + 1);
        free_.pop_back();
        ++num_open_;
        return handle_at(index, cache);
    }

    // Ends the cache's life; its record is cleared and its index freed.
    void close(CacheHandle handle) noexcept {
        at(index_of(handle)).end();
        free_.push_back(index_of(handle));  // add() has reserved the room
        --num_open_;
    }

    [[nodiscard]] std::int64_t num_open() const noexcept { return num_open_; }

    // Every living cache in ascending order of its handle: f(handle, cache). O(n log n).
    template <class F>
    void for_each(F&& f) const {
        std::vector<CacheHandle> handles;
        const std::uint32_t size = size_.load(std::memory_order_relaxed);
        for (std::uint32_t index = 0; index < size; ++index) {
            if (at(index).generation.load(std::memory_order_relaxed) != 0) {
                handles.push_back(handle_at(index, at(index)));
            }
        }
        std::sort(handles.begin(), handles.end());
        for (const CacheHandle handle : handles) {
            f(handle, at(index_of(handle)));
        }
    }

private:
    static constexpr std::uint32_t kFirstChunk = 64;
    static constexpr std::size_t kChunks = 26;  // 64 * 2^26 records

    [[nodiscard]] static CacheHandle handle_at(std::uint32_t index, const KvCache& cache) noexcept {
        return static_cast<CacheHandle>(std::uint64_t{cache.last_generation} << 32 | index);
    }
    [[nodiscard]] static constexpr std::size_t chunk_of(std::uint32_t index) noexcept {
        return static_cast<std::size_t>(std::bit_width(index / kFirstChunk + 1)) - 1;
    }
    [[nodiscard]] KvCache& at(std::uint32_t index) const noexcept {
        const std::size_t chunk = chunk_of(index);
        return chunks_[chunk][index - ((kFirstChunk << chunk) - kFirstChunk)];
    }

    std::uint32_t add() {
        const std::uint32_t index = size_.load(std::memory_order_relaxed);
        const std::size_t chunk = chunk_of(index);
        if (chunk >= kChunks) {
            throw OutOfMemoryError("too many open KV caches");
        }
        if (chunks_[chunk] == nullptr) {
            chunks_[chunk] = std::make_unique<KvCache[]>(std::size_t{kFirstChunk} << chunk);
        }
        free_.reserve(index + 1 <= free_.capacity() ? 0 : 2 * (std::size_t{index} + 1));
        size_.store(index + 1, std::memory_order_release);
        return index;
    }

    std::array<std::unique_ptr<KvCache[]>, kChunks> chunks_;
    std::atomic<std::uint32_t> size_{0};
    std::vector<std::uint32_t> free_;
    std::int64_t num_open_ = 0;
};

}  // namespace kvpool
