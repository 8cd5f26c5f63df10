// Who may enter a manager: one thread at a time, one call per cache, this process only, and nobody once it is corrupted.
//
// Order of checks of an entry: process (fork), cache not in use by another thread (busy flag, taken before the lock), lock,
// manager not corrupted, cache still alive. A second thread inside one cache is a LogicError in the thread that comes
// second. A CorruptedError that leaves an entry latches the manager: every later entry raises it again.
// The lock may be waited for, so Python's bindings set a waiter that gives the interpreter lock away meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "kvpool/core/errors.hpp"

namespace kvpool {

// Counts forks of this process as seen from the child: it differs from the parent's value in every child.
[[nodiscard]] std::uint32_t fork_generation() noexcept;

// Blocks until the mutex is locked by the calling thread. Called only after a try_lock has failed.
using LockWaiter = void (*)(std::mutex&);
// For the whole process; nullptr: plain lock().
void set_lock_waiter(LockWaiter waiter) noexcept;

class ManagerGuard {
public:
    ManagerGuard() noexcept : born_in_(fork_generation()) {}

    // Whether this process made the manager.
    [[nodiscard]] bool is_native_process() const noexcept { return born_in_ == fork_generation(); }
    // LogicError unless it did.
    void check_process() const {
        if (!is_native_process()) {
            throw_forked();
        }
    }

    // CorruptedError if latched. Lock held.
    void check_sound() const {
        if (corrupted_) {
            throw CorruptedError(reason_);
        }
    }
    // The first reason stays. Lock held.
    void latch(const char* reason) noexcept;
    [[nodiscard]] bool corrupted() const noexcept { return corrupted_; }

    // Runs f, latching the manager if it finds something broken. Lock held.
    template <class F>
    decltype(auto) run(F&& f) {
        check_sound();
        try {
            return f();
        } catch (const CorruptedError& error) {
            latch(error.what());
            throw;
        }
    }

    [[nodiscard]] std::mutex& mutex() noexcept { return mutex_; }

private:
    [[noreturn]] static void throw_forked();

    std::mutex mutex_;
    std::uint32_t born_in_;
    bool corrupted_ = false;
    std::string reason_;
};

// The lock of a manager, held.
class ManagerLock {
public:
    explicit ManagerLock(ManagerGuard& guard);
    // For a mutex that the caller has locked.
    ManagerLock(ManagerGuard& guard, std::adopt_lock_t) noexcept : mutex_(&guard.mutex()) {}
    ManagerLock(const ManagerLock&) = delete;
    ManagerLock& operator=(const ManagerLock&) = delete;
    ~ManagerLock() { mutex_->unlock(); }

private:
    std::mutex* mutex_;
};

// A cache's busy flag, taken; LogicError if another thread has it.
class BusyClaim {
public:
    explicit BusyClaim(std::atomic<std::uint32_t>& flag) : flag_(&flag) {
        if (flag.exchange(1, std::memory_order_acquire) != 0) {
            throw_busy();
        }
    }
    BusyClaim(const BusyClaim&) = delete;
    BusyClaim& operator=(const BusyClaim&) = delete;
    ~BusyClaim() { flag_->store(0, std::memory_order_release); }

    [[noreturn]] static void throw_busy();

private:
    std::atomic<std::uint32_t>* flag_;
};

}  // namespace kvpool
