// Decode steps of 256 requests on the GPT-OSS-120B layout, for counting instructions.
//
// usage: step_instructions CONTEXT SLOTS STEPS      (tokens a request has at the start; slots of the pool group)
// Run under `valgrind --tool=callgrind --collect-atstart=no --toggle-collect='timed_steps*'`: only the steps are counted.
// The `virtual` device is used, so memory is not a limit.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <numeric>
#include <vector>

#include "gpt_oss_layout.hpp"
#include "kvpool/manager/manager.hpp"

namespace {

using kvpool_benchmarks::gpt_oss_120b;
using kvpool_benchmarks::kBlock;

constexpr std::size_t kRequests = 256;

struct Batch {
    std::vector<kvpool::CacheHandle> handles;
    std::vector<std::int32_t> rows, capacities, histories;
    std::shared_ptr<std::vector<std::int32_t>> table;
    kvpool::TableView view;
};

Batch open_batch(kvpool::Manager& manager, std::int64_t context, std::int64_t steps) {
    Batch batch;
    const std::int64_t blocks = (context + kBlock + steps) / kBlock + 2;
    batch.table = std::make_shared<std::vector<std::int32_t>>(2 * kRequests * static_cast<std::size_t>(blocks), -1);
    batch.view = {batch.table->data(), 2, kRequests, blocks};
    for (std::size_t i = 0; i < kRequests; ++i) {
        const auto length = static_cast<std::int32_t>(context + static_cast<std::int64_t>(i) % kBlock);
        const kvpool::CacheHandle handle = manager.create();
        manager.stop_committing(handle);
        if (!manager.resume(handle, std::nullopt) || !manager.resize(handle, length, length - 1)) {
            std::fprintf(stderr, "%zu requests of %lld tokens do not fit\n", i + 1, static_cast<long long>(context));
            std::exit(2);
        }
        batch.handles.push_back(handle);
        batch.rows.push_back(static_cast<std::int32_t>(i));
        batch.capacities.push_back(length + 1);
        batch.histories.push_back(length);
    }
    return batch;
}

void one_step(kvpool::Manager& manager, Batch& batch) {
    const auto output = manager.step(
        {batch.handles, batch.rows, batch.capacities, batch.histories, batch.view, batch.table, std::nullopt});
    if (std::accumulate(output.ok.begin(), output.ok.end(), std::size_t{0}) != kRequests) {
        std::fprintf(stderr, "a step was refused\n");
        std::exit(2);
    }
    for (std::size_t i = 0; i < kRequests; ++i) {
        ++batch.capacities[i];
        ++batch.histories[i];
    }
}

}  // namespace

extern "C" __attribute__((noinline)) void timed_steps(kvpool::Manager& manager, Batch& batch, std::int64_t steps) {
    for (std::int64_t i = 0; i < steps; ++i) {
        one_step(manager, batch);
    }
}

int main(int argc, char** argv) try {
    if (argc != 4) {
        std::fprintf(stderr, "usage: %s CONTEXT SLOTS STEPS\n", argv[0]);
        return 2;
    }
    const std::int64_t context = std::atoll(argv[1]);
    const std::int64_t slots = std::atoll(argv[2]);
    const std::int64_t steps = std::atoll(argv[3]);
    kvpool::Manager manager(gpt_oss_120b(slots), "virtual");
    Batch batch = open_batch(manager, context, steps);
    one_step(manager, batch);  // binds the rows
    timed_steps(manager, batch, steps);
    for (const kvpool::CacheHandle handle : batch.handles) {
        manager.close(handle);
    }
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
