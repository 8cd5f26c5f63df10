#include "kvpool/device/sim_device.hpp"

#include <cstring>
#include <iterator>
#include <utility>

#include "kvpool/core/errors.hpp"

namespace kvpool {

namespace {

std::uint64_t splitmix64(std::uint64_t& state) noexcept {
    state += 0x9E3779B97F4A7C15u;
    std::uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

}  // namespace

// Keeps the device alive; memory is a host arena's.
class SimArena final : public Arena {
public:
    SimArena(std::shared_ptr<SimDevice> device, std::unique_ptr<HostArena> memory)
        : Arena(memory->address(), memory->bytes()), device_(std::move(device)), memory_(std::move(memory)) {
        device_->arenas_.emplace(address(), memory_.get());
    }
    ~SimArena() override {
        const std::lock_guard lock(device_->mutex_);
        device_->arenas_.erase(address());
        memory_.reset();  // under the lock, so that no operation meets a half-gone mapping
    }

    void commit(std::int64_t offset, std::int64_t bytes) override {
        const std::lock_guard lock(device_->mutex_);
        device_->count_call("commit");
        memory_->commit(offset, bytes);
    }
    void decommit(std::int64_t offset, std::int64_t bytes) override {
        const std::lock_guard lock(device_->mutex_);
        memory_->decommit(offset, bytes);
    }
    [[nodiscard]] std::int64_t committed_bytes() const override {
        const std::lock_guard lock(device_->mutex_);
        return memory_->committed_bytes();
    }
    [[nodiscard]] std::byte* data() override { return memory_->data(); }

private:
    std::shared_ptr<SimDevice> device_;
    std::unique_ptr<HostArena> memory_;
};

std::shared_ptr<SimDevice> SimDevice::create() { return std::shared_ptr<SimDevice>(new SimDevice()); }

// ---- device calls

std::shared_ptr<Arena> SimDevice::reserve(std::int64_t bytes) {
    std::shared_ptr<SimDevice> self = shared_from_this();
    const std::lock_guard lock(mutex_);
    count_call("reserve");
    return std::make_shared<SimArena>(std::move(self), HostArena::map(bytes));
}

EventId SimDevice::record(StreamId stream) {
    const std::lock_guard lock(mutex_);
    count_call("record");
    const EventId event{last_event_ + 1};
    const Place place = enqueue(stream, RecordOp{event});
    open_events_.emplace(event, place);
    last_event_ = event.value();
    return event;
}

void SimDevice::wait(StreamId stream, EventId event) {
    const std::lock_guard lock(mutex_);
    if (event == kCompleteEvent) {
        return;
    }
    if (event.value() > last_event_) {
        throw LogicError("event " + std::to_string(event.value()) + " was never recorded; the last one is " +
                         std::to_string(last_event_));
    }
    count_call("wait");
    enqueue(stream, WaitOp{event});
}

bool SimDevice::query(EventId event) {
    const std::lock_guard lock(mutex_);
    return complete(event);
}

void SimDevice::synchronize_event(EventId event) {
    const std::lock_guard lock(mutex_);
    const auto it = open_events_.find(event);
    if (it != open_events_.end()) {
        run_through(it->second);
    }
}

void SimDevice::synchronize() {
    const std::lock_guard lock(mutex_);
    run_everything(Order::adverse, 0);
}

void SimDevice::copy(StreamId stream, std::span<const CopyTask> tasks) {
    const std::lock_guard lock(mutex_);
    count_call("copy");
    enqueue(stream, CopyOp{{tasks.begin(), tasks.end()}});
}

// ---- test interface

StreamId SimDevice::create_stream() {
    const std::lock_guard lock(mutex_);
    const StreamId stream{streams_.rbegin()->first.value() + 1};
    streams_[stream];
    return stream;
}

void SimDevice::enqueue_write(StreamId stream, Address address, std::string data) {
    const std::lock_guard lock(mutex_);
    enqueue(stream, WriteOp{address, std::move(data)});
}

void SimDevice::enqueue_copy(StreamId stream, Address dst, Address src, std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    enqueue(stream, CopyOp{{CopyTask{dst, src, bytes}}});
}

std::int64_t SimDevice::enqueue_read(StreamId stream, Address address, std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (bytes < 0) {
        throw ArgumentError("n must not be negative, got " + std::to_string(bytes));
    }
    const std::int64_t ticket = last_ticket_ + 1;
    open_reads_.emplace(ticket, enqueue(stream, ReadOp{ticket, address, bytes}));
    last_ticket_ = ticket;
    return ticket;
}

std::string SimDevice::read_result(std::int64_t ticket) {
    const std::lock_guard lock(mutex_);
    const auto open = open_reads_.find(ticket);
    if (open != open_reads_.end()) {
        run_through(open->second);
    }
    auto result = read_results_.extract(ticket);
    if (result.empty()) {
        throw ArgumentError("no read with ticket " + std::to_string(ticket) + ", or its result was taken already");
    }
    return std::move(result.mapped());
}

void SimDevice::run_all(Order order, std::uint64_t seed) {
    const std::lock_guard lock(mutex_);
    run_everything(order, seed);
}

std::int64_t SimDevice::pending() const {
    const std::lock_guard lock(mutex_);
    return pending_;
}

std::int64_t SimDevice::calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
}

std::int64_t SimDevice::clock() const {
    const std::lock_guard lock(mutex_);
    return clock_;
}

void SimDevice::fail_call(std::optional<std::int64_t> n, Failure kind) {
    const std::lock_guard lock(mutex_);
    if (n && *n < 1) {
        throw ArgumentError("n must be at least 1 (the next call) or None, got " + std::to_string(*n));
    }
    fail_at_ = n ? calls_ + *n : 0;
    fail_kind_ = kind;
}

// ---- queues

void SimDevice::count_call(const char* what) {
    ++calls_;
    if (calls_ != fail_at_) {
        return;
    }
    fail_at_ = 0;
    const std::string message = std::string("sim device: ") + what + " failed on request";
    if (fail_kind_ == Failure::oom) {
        throw CuOomError(message);
    }
    throw CuError(kFailureCode, message);
}

SimDevice::Place SimDevice::enqueue(StreamId stream, Work work) {
    const Place place{stream, last_op_ + 1};
    streams_[stream].push_back(Op{place.number, std::move(work)});
    last_op_ = place.number;
    ++pending_;
    return place;
}

bool SimDevice::complete(EventId event) const { return !open_events_.contains(event); }

bool SimDevice::runnable(const std::deque<Op>& queue) const {
    if (queue.empty()) {
        return false;
    }
    const auto* wait = std::get_if<WaitOp>(&queue.front().work);
    return wait == nullptr || complete(wait->event);
}

void SimDevice::run_head(std::deque<Op>& queue) {
    Work work = std::move(queue.front().work);
    queue.pop_front();
    --pending_;
    ++clock_;
    execute(work);
}

void SimDevice::execute(Work& work) {
    if (const auto* record = std::get_if<RecordOp>(&work)) {
        open_events_.erase(record->event);
    } else if (const auto* copy = std::get_if<CopyOp>(&work)) {
        for (const CopyTask& task : copy->tasks) {  // all or nothing
            (void)bytes_at(task.dst, task.bytes);
            (void)bytes_at(task.src, task.bytes);
        }
        for (const CopyTask& task : copy->tasks) {
            std::memmove(bytes_at(task.dst, task.bytes), bytes_at(task.src, task.bytes),
                         static_cast<std::size_t>(task.bytes));
        }
    } else if (const auto* write = std::get_if<WriteOp>(&work)) {
        std::byte* to = bytes_at(write->address, static_cast<std::int64_t>(write->data.size()));
        std::memcpy(to, write->data.data(), write->data.size());
    } else if (const auto* read = std::get_if<ReadOp>(&work)) {
        open_reads_.erase(read->ticket);
        const auto* from = reinterpret_cast<const char*>(bytes_at(read->address, read->bytes));
        read_results_[read->ticket] = std::string(from, static_cast<std::size_t>(read->bytes));
    }
}

void SimDevice::run_through(Place target) {
    std::vector<Place> goals{target};
    while (!goals.empty()) {
        const Place goal = goals.back();
        std::deque<Op>& queue = streams_[goal.stream];
        if (queue.empty() || queue.front().number > goal.number) {
            goals.pop_back();
        } else if (runnable(queue)) {
            run_head(queue);
        } else {
            goals.push_back(open_events_.at(std::get<WaitOp>(queue.front().work).event));
        }
    }
}

std::deque<SimDevice::Op>* SimDevice::next_queue(Order order, std::uint64_t* random) {
    std::vector<std::deque<Op>*> choices;  // youngest stream first
    for (auto it = streams_.rbegin(); it != streams_.rend(); ++it) {
        if (runnable(it->second)) {
            choices.push_back(&it->second);
        }
    }
    if (choices.empty()) {
        return nullptr;
    }
    if (order == Order::fifo) {
        std::deque<Op>* first = choices.front();
        for (std::deque<Op>* queue : choices) {
            first = queue->front().number < first->front().number ? queue : first;
        }
        return first;
    }
    return random == nullptr ? choices.front() : choices[splitmix64(*random) % choices.size()];
}

void SimDevice::run_everything(Order order, std::uint64_t seed) {
    std::uint64_t state = seed;
    while (std::deque<Op>* queue = next_queue(order, seed == 0 ? nullptr : &state)) {
        run_head(*queue);
    }
    if (pending_ != 0) {
        throw CorruptedError("sim device: queued work that can never run");
    }
}

std::byte* SimDevice::bytes_at(Address address, std::int64_t length) const {
    const auto after = arenas_.upper_bound(address);
    if (after != arenas_.begin() && length >= 0) {
        const auto& [base, arena] = *std::prev(after);
        const Address offset = address - base;
        if (offset <= static_cast<Address>(arena->bytes()) &&
            arena->committed().contains(static_cast<std::int64_t>(offset), length)) {
            return arena->data() + offset;
        }
    }
    throw CorruptedError("sim device: an operation touches " + std::to_string(length) + " bytes at address " +
                         std::to_string(address) + ", which are not committed");
}

}  // namespace kvpool
