// Real bytes in host memory: the device for CPU inference and for tests that look at contents.
//
// An arena is a private anonymous mapping without access rights; commit opens pages for reading and writing and asks
// for huge pages (first touch is several times cheaper with them), decommit gives the pages back and closes the
// range.
// Addresses are 2 MiB aligned.  Copies run at once, so every event is 0 and there is nothing to wait for.
// A mapping that the kernel refuses is a HostOomError.
#pragma once

#include "kvpool/device/committed_ranges.hpp"
#include "kvpool/device/device.hpp"

namespace kvpool {

// One mapping.  Not thread safe.
class HostArena final : public Arena {
public:
    // HostOomError when the kernel refuses, ArgumentError unless bytes > 0.
    [[nodiscard]] static std::unique_ptr<HostArena> map(std::int64_t bytes);
    ~HostArena() override;

    void commit(std::int64_t offset, std::int64_t bytes) override;
    void decommit(std::int64_t offset, std::int64_t bytes) override;
    [[nodiscard]] std::int64_t committed_bytes() const override { return committed_.total(); }
    [[nodiscard]] std::byte* data() override { return base_; }
    [[nodiscard]] const CommittedRanges& committed() const noexcept { return committed_; }

private:
    HostArena(std::byte* base, std::int64_t bytes);

    std::byte* base_;
    CommittedRanges committed_;
};

class HostDevice final : public Device {
public:
    // A huge page: what an arena is aligned to and committed in.
    static constexpr std::int64_t kGranularity = std::int64_t{2} << 20;

    [[nodiscard]] std::string_view name() const noexcept override { return "host"; }
    [[nodiscard]] std::int64_t granularity() const noexcept override { return kGranularity; }
    [[nodiscard]] bool has_bytes() const noexcept override { return true; }
    [[nodiscard]] std::shared_ptr<Arena> reserve(std::int64_t bytes) override { return HostArena::map(bytes); }
    [[nodiscard]] EventId record(StreamId) override { return kCompleteEvent; }
    void wait(StreamId, EventId) override {}
    [[nodiscard]] bool query(EventId) override { return true; }
    void synchronize_event(EventId) override {}
    void synchronize() override {}
    void copy(StreamId stream, std::span<const CopyTask> tasks) override;
};

}  // namespace kvpool
