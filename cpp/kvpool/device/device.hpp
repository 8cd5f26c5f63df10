// The device seam.  Everything above it is device-free: it knows addresses, streams and events as numbers.
//
// Words
//   arena     one range of addresses, reserved once and never moved; parts of it are committed (usable) or not
//   stream    a queue of device work; work of one stream runs in order.  0 is the device's own stream
//   event     a point in a stream; 0 is complete from the start
//   fallible  reserve, commit, record, wait and copy may throw; each leaves the device as it was when it does
//
// Invariants
//   committed ranges of an arena are disjoint, multiples of granularity(), inside [0, bytes)
//   an arena lives until its last reference is gone: a view of its memory keeps it (and its addresses) alive, also
//   after the device handle and the manager are gone
//
// Threads: a device is used under its manager's lock; SimDevice has a lock of its own besides, because tests reach it
// directly.  Errors: HostOomError / CuOomError for memory, CuError for the rest, ArgumentError / LogicError for
// misuse.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "kvpool/core/ids.hpp"

namespace kvpool {

// A device or host address; also of devices without bytes, so never a pointer.
using Address = std::uint64_t;

struct CopyTask {
    Address dst = 0;
    Address src = 0;
    std::int64_t bytes = 0;
};

class Arena {
public:
    Arena(const Arena&) = delete;  // an arena is a place; share it by its shared_ptr
    Arena& operator=(const Arena&) = delete;
    virtual ~Arena() = default;

    [[nodiscard]] Address address() const noexcept { return address_; }
    [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }

    // Makes [offset, offset + bytes) usable; zero filled when first touched.  ArgumentError unless both are
    // multiples of the granularity and the range lies in the arena; LogicError if part of it is committed already.
    virtual void commit(std::int64_t offset, std::int64_t bytes) = 0;
    // Gives the memory of a fully committed range back; the addresses stay reserved.  Same errors.
    virtual void decommit(std::int64_t offset, std::int64_t bytes) = 0;
    [[nodiscard]] virtual std::int64_t committed_bytes() const = 0;
    // The bytes themselves.  UnsupportedError on a device without bytes.
    [[nodiscard]] virtual std::byte* data() = 0;

protected:
    Arena(Address address, std::int64_t bytes) noexcept : address_(address), bytes_(bytes) {}

private:
    Address address_;
    std::int64_t bytes_;
};

class Device {
public:
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
    virtual ~Device() = default;

    [[nodiscard]] virtual std::string_view name() const noexcept = 0;
    // Commits are made in multiples of this many bytes.
    [[nodiscard]] virtual std::int64_t granularity() const noexcept = 0;
    // Whether Arena::data() works.
    [[nodiscard]] virtual bool has_bytes() const noexcept = 0;
    [[nodiscard]] StreamId own_stream() const noexcept { return kOwnStream; }

    // Reserves addresses only; bytes > 0, rounded up to the granularity.
    [[nodiscard]] virtual std::shared_ptr<Arena> reserve(std::int64_t bytes) = 0;

    // An event that completes when everything queued on `stream` so far has run; 0 if that is so already.
    [[nodiscard]] virtual EventId record(StreamId stream) = 0;
    // What is queued on `stream` from now on runs after `event`.
    virtual void wait(StreamId stream, EventId event) = 0;
    // Whether the event is complete; never blocks, never runs anything.
    [[nodiscard]] virtual bool query(EventId event) = 0;
    // Blocks the host until the event is complete.
    virtual void synchronize_event(EventId event) = 0;
    // Blocks the host until everything queued so far has run.
    virtual void synchronize() = 0;
    // Queues copies on `stream` as one unit; the tasks must not overlap one another.
    virtual void copy(StreamId stream, std::span<const CopyTask> tasks) = 0;

protected:
    Device() = default;
};

}  // namespace kvpool
