#include "kvpool/device/host_device.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "kvpool/core/errors.hpp"
#include "kvpool/core/math.hpp"

namespace kvpool {

namespace {

constexpr std::int64_t kHugePage = HostDevice::kGranularity;

[[noreturn]] void throw_oom(const char* what, std::int64_t bytes) {
    const int code = errno;
    throw HostOomError(std::string(what) + " of " + std::to_string(bytes) +
                       " bytes of host memory failed: " + std::strerror(code));
}

std::size_t to_size(std::int64_t bytes) noexcept { return static_cast<std::size_t>(bytes); }

Address address_of(const void* p) noexcept { return reinterpret_cast<Address>(p); }

}  // namespace

HostArena::HostArena(std::byte* base, std::int64_t bytes)
    : Arena(address_of(base), bytes), base_(base), committed_(bytes, HostDevice::kGranularity) {}

std::unique_ptr<HostArena> HostArena::map(std::int64_t bytes) {
    if (bytes <= 0 || bytes > kHuge) {
        throw ArgumentError("arena size must be in [1, 2^62] bytes, got " + std::to_string(bytes));
    }
    const std::int64_t size = round_up(bytes, kHugePage);
    // Take a huge page more than needed and give back what does not lie on the boundary.
    void* p = ::mmap(nullptr, to_size(size + kHugePage), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        throw_oom("reserving", size);
    }
    auto* raw = static_cast<std::byte*>(p);
    const auto past = static_cast<std::int64_t>(address_of(raw) % static_cast<Address>(kHugePage));
    const std::int64_t head = past == 0 ? 0 : kHugePage - past;
    if (head > 0) {
        ::munmap(raw, to_size(head));
    }
    if (head < kHugePage) {
        ::munmap(raw + head + size, to_size(kHugePage - head));
    }
    return std::unique_ptr<HostArena>(new HostArena(raw + head, size));
}

HostArena::~HostArena() { ::munmap(base_, to_size(bytes())); }

void HostArena::commit(std::int64_t offset, std::int64_t bytes) {
    committed_.check_add(offset, bytes);
    if (::mprotect(base_ + offset, to_size(bytes), PROT_READ | PROT_WRITE) != 0) {
        throw_oom("committing", bytes);
    }
    ::madvise(base_ + offset, to_size(bytes), MADV_HUGEPAGE);  // advice only: a kernel without it is fine
    committed_.add(offset, bytes);
}

void HostArena::decommit(std::int64_t offset, std::int64_t bytes) {
    committed_.check_remove(offset, bytes);
    // A fresh mapping in its place gives back the pages and what they count against the machine's limit.
    void* p = ::mmap(base_ + offset, to_size(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (p == MAP_FAILED) {
        throw_oom("decommitting", bytes);
    }
    committed_.remove(offset, bytes);
}

void HostDevice::copy(StreamId, std::span<const CopyTask> tasks) {
    for (const CopyTask& task : tasks) {
        std::memmove(reinterpret_cast<void*>(task.dst), reinterpret_cast<const void*>(task.src), to_size(task.bytes));
    }
}

}  // namespace kvpool
