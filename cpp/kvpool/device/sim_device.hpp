// A device for tests: host bytes, queued work that runs as late and in as adverse an order as recorded events permit,
// and device calls that fail on request.  It proves event order and failure atomicity.
//
// Queues
//   Each stream is a queue of operations; streams come into being when first named, create_stream() gives the number
//   above the highest so far (1 at first).  Operations: record, wait, copy (one per batch), write, read.  Nothing
//   runs when it is queued.  The head of a stream is runnable unless it is a wait for an event that is not complete;
//   an event is complete once its record has run.  An event exists before anyone can wait for it, so
//   the first queued operation of all is always runnable and nothing can hang.
//   Every executed operation is one tick of clock().  record() always queues and never answers 0.  Waiting for event
//   0 is no call at all: nothing is queued or counted.  Waiting for an event that was never recorded is a LogicError.
// What makes work run
//   synchronize_event(e), read_result(t): exactly the operations that e or t depends on: everything before it in its
//     stream, and for each wait among those what that event depends on, and so on.
//   run_all(adverse, 0): the runnable head of the youngest stream (highest id), one operation at a time, until
//     nothing is left: what was queued last overtakes all that no event protects.  With a seed other than 0 the
//     stream is drawn among the runnable ones, highest id first, by splitmix64(seed) mod their number.
//   run_all(fifo): in the order of queueing.       synchronize() = run_all(adverse, 0).
//   query(e) runs nothing.
// Memory: an operation that touches bytes which are not committed when it runs is dropped and throws CorruptedError;
//   the rest stays queued.  Memory views show only what has run.
// Failing calls: reserve, commit, record, wait and copy are counted by calls() in the order they are made;
//   fail_call(n, kind) makes the n-th of them from now (1 = the next) throw CuOomError or CuError(999) before it
//   changes anything, once.  The enqueue_* calls are the test's own kernels: they are not counted and never fail.
// Threads: any; one lock inside.  Arenas keep the device alive.
#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "kvpool/device/device.hpp"
#include "kvpool/device/host_device.hpp"

namespace kvpool {

class SimDevice final : public Device, public std::enable_shared_from_this<SimDevice> {
public:
    enum class Order { adverse, fifo };
    enum class Failure { oom, cu };
    static constexpr int kFailureCode = 999;

    [[nodiscard]] static std::shared_ptr<SimDevice> create();

    // Device
    [[nodiscard]] std::string_view name() const noexcept override { return "sim"; }
    [[nodiscard]] std::int64_t granularity() const noexcept override { return HostDevice::kGranularity; }
    [[nodiscard]] bool has_bytes() const noexcept override { return true; }
    [[nodiscard]] std::shared_ptr<Arena> reserve(std::int64_t bytes) override;
    [[nodiscard]] EventId record(StreamId stream) override;
    void wait(StreamId stream, EventId event) override;
    [[nodiscard]] bool query(EventId event) override;
    void synchronize_event(EventId event) override;
    void synchronize() override;
    void copy(StreamId stream, std::span<const CopyTask> tasks) override;

    // Test interface
    [[nodiscard]] StreamId create_stream();
    void enqueue_write(StreamId stream, Address address, std::string data);
    void enqueue_copy(StreamId stream, Address dst, Address src, std::int64_t bytes);
    // A ticket for read_result(); tickets count from 1.
    [[nodiscard]] std::int64_t enqueue_read(StreamId stream, Address address, std::int64_t bytes);
    // The bytes that the read saw; runs what it depends on.  A ticket is good once: ArgumentError after that.
    [[nodiscard]] std::string read_result(std::int64_t ticket);
    void run_all(Order order, std::uint64_t seed);
    // Operations queued and not yet run.
    [[nodiscard]] std::int64_t pending() const;
    // Fallible device calls made so far, failed ones included.
    [[nodiscard]] std::int64_t calls() const;
    // nullopt cancels.  ArgumentError unless n >= 1.
    void fail_call(std::optional<std::int64_t> n, Failure kind);
    // Operations executed so far.
    [[nodiscard]] std::int64_t clock() const;

private:
    friend class SimArena;

    struct RecordOp {
        EventId event;
    };
    struct WaitOp {
        EventId event;
    };
    struct CopyOp {
        std::vector<CopyTask> tasks;
    };
    struct WriteOp {
        Address address;
        std::string data;
    };
    struct ReadOp {
        std::int64_t ticket;
        Address address;
        std::int64_t bytes;
    };
    using Work = std::variant<RecordOp, WaitOp, CopyOp, WriteOp, ReadOp>;
    struct Op {
        std::uint64_t number;  // running number of queueing over all streams
        Work work;
    };
    struct Place {  // where an operation stands
        StreamId stream;
        std::uint64_t number;
    };
    SimDevice() = default;

    // All below: lock held.
    void count_call(const char* what);
    Place enqueue(StreamId stream, Work work);
    [[nodiscard]] bool complete(EventId event) const;
    [[nodiscard]] bool runnable(const std::deque<Op>& queue) const;
    void run_head(std::deque<Op>& queue);
    void execute(Work& work);
    void run_through(Place target);
    [[nodiscard]] std::deque<Op>* next_queue(Order order, std::uint64_t* random);
    void run_everything(Order order, std::uint64_t seed);
    [[nodiscard]] std::byte* bytes_at(Address address, std::int64_t length) const;

    mutable std::mutex mutex_;
    std::map<StreamId, std::deque<Op>> streams_{{kOwnStream, {}}};
    std::map<Address, HostArena*> arenas_;            // by address; an arena takes itself out before it is unmapped
    std::unordered_map<EventId, Place> open_events_;  // recorded, their record not yet run
    std::map<std::int64_t, Place> open_reads_;
    std::map<std::int64_t, std::string> read_results_;
    std::uint64_t last_event_ = 0;
    std::uint64_t last_op_ = 0;
    std::int64_t last_ticket_ = 0;
    std::int64_t pending_ = 0;
    std::int64_t calls_ = 0;
    std::int64_t clock_ = 0;
    std::int64_t fail_at_ = 0;  // the value of calls_ that fails; 0: none
    Failure fail_kind_ = Failure::oom;
};

}  // namespace kvpool
