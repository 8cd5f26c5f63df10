#include "kvpool/manager/guard.hpp"

#include <pthread.h>

namespace kvpool {
namespace {

std::atomic<std::uint32_t> forks{0};
std::atomic<LockWaiter> lock_waiter{nullptr};

struct ForkHook {
    ForkHook() noexcept {
        pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    }
};
const ForkHook fork_hook;

}  // namespace

std::uint32_t fork_generation() noexcept { return forks.load(std::memory_order_relaxed); }

void set_lock_waiter(LockWaiter waiter) noexcept { lock_waiter.store(waiter, std::memory_order_release); }

void ManagerGuard::throw_forked() {
    throw LogicError("this KV cache manager was created in another process (fork); make a new one in this process");
}

void ManagerGuard::latch(const char* reason) noexcept {
    if (corrupted_) {
        return;
    }
    corrupted_ = true;
    try {
        reason_ = reason;
    } catch (...) {
        reason_.clear();  // no memory for the reason: the latch holds all the same
    }
}

ManagerLock::ManagerLock(ManagerGuard& guard) : mutex_(&guard.mutex()) {
    if (mutex_->try_lock()) {
        return;
    }
    const LockWaiter waiter = lock_waiter.load(std::memory_order_acquire);
    if (waiter != nullptr) {
        waiter(*mutex_);
    } else {
        mutex_->lock();
    }
}

void BusyClaim::throw_busy() { throw LogicError("the KV cache is in use by another thread"); }

}  // namespace kvpool
