// Look-ups and commits in trees of different sizes on the GPT-OSS-120B layout, for counting instructions.
//
// usage: prefix_instructions nodes COUNT       about COUNT nodes, at most two children each; queries of 80 blocks and 8 tokens
//        prefix_instructions children COUNT    COUNT children behind a shared chain of 64 blocks; queries of 65 blocks and 8 tokens
// Run under callgrind with --collect-atstart=no and a --toggle-collect for each timed_*: only those are counted.
// The `virtual` device is used, so memory is not a limit, and the pool has room for everything.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string_view>
#include <vector>

#include "gpt_oss_layout.hpp"
#include "kvpool/manager/manager.hpp"

namespace {

using kvpool_benchmarks::gpt_oss_120b;
using kvpool_benchmarks::kBlock;

using Tokens = std::vector<kvpool::Token>;

constexpr std::size_t kPath = 80;    // blocks of a sequence, nodes
constexpr std::size_t kShared = 64;  // blocks before the fork, children
constexpr std::size_t kQueries = 64;

// 30 bits that depend on all of x.
kvpool::Token scrambled(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return static_cast<kvpool::Token>((x ^ (x >> 31)) >> 34);
}

void append_block(Tokens& tokens, std::uint64_t name) {
    for (std::size_t j = 0; j < kBlock; ++j) {
        tokens.push_back(scrambled(name * kBlock + j + 1));
    }
}

// Sequence i of `count`: at depth l it takes the branch that bit l of i names, until it is alone.
Tokens binary_sequence(std::size_t i, std::size_t count) {
    Tokens tokens;
    std::size_t levels = 0;
    while ((std::size_t{1} << levels) < count) {
        ++levels;
    }
    for (std::size_t l = 0; l < levels; ++l) {
        append_block(tokens, (std::uint64_t{1} << 40) + (std::uint64_t{l} << 32) + (i & ((std::size_t{2} << l) - 1)));
    }
    for (std::size_t l = levels; l < kPath; ++l) {
        append_block(tokens, std::uint64_t{i} * kPath + l);
    }
    return tokens;
}

Tokens child_sequence(std::size_t i) {
    Tokens tokens;
    for (std::size_t l = 0; l < kShared; ++l) {
        append_block(tokens, (std::uint64_t{1} << 40) + l);
    }
    append_block(tokens, i);
    return tokens;
}

void compute(kvpool::Manager& manager, const Tokens& tokens) {
    kvpool::CreateInput input;
    input.ids = kvpool::TokenSpan(tokens).first(tokens.size() - 1);
    const kvpool::CacheHandle handle = manager.create(std::move(input));
    const auto size = static_cast<std::int64_t>(tokens.size());
    if (!manager.resume(handle, std::nullopt) || !manager.resize(handle, size, std::nullopt)) {
        std::fprintf(stderr, "the pool is too small\n");
        std::exit(2);
    }
    const auto committed = static_cast<std::size_t>(manager.lengths(handle).committed);
    manager.commit(handle, kvpool::TokenSpan(tokens).subspan(committed), {}, false);
    manager.close(handle);
}

}  // namespace

// The query is cached but for its last 8 tokens.
extern "C" __attribute__((noinline)) void timed_probe(kvpool::Manager& manager, const Tokens& query,
                                                      std::int64_t expected) {
    if (manager.probe_reuse({}, query, {}) != expected) {
        std::fprintf(stderr, "the probe found something else\n");
        std::exit(2);
    }
}

extern "C" __attribute__((noinline)) void timed_create(kvpool::Manager& manager, const Tokens& query) {
    kvpool::CreateInput input;
    input.ids = kvpool::TokenSpan(query);
    manager.close(manager.create(std::move(input)));
}

// A new request that goes on from the middle of a cached block: match, private copies, commit of two blocks, close.
extern "C" __attribute__((noinline)) void timed_branch(kvpool::Manager& manager, const Tokens& tokens) {
    compute(manager, tokens);
}

int main(int argc, char** argv) try {
    if (argc != 3) {
        std::fprintf(stderr, "usage: %s nodes|children COUNT\n", argv[0]);
        return 2;
    }
    const bool by_nodes = std::string_view(argv[1]) == "nodes";
    const auto count = static_cast<std::size_t>(std::atoll(argv[2]));
    const std::size_t sequences = by_nodes ? count / (kPath - 8) + 1 : count;
    const std::size_t blocks = by_nodes ? sequences * kPath : kShared + sequences;
    kvpool::Manager manager(gpt_oss_120b(static_cast<std::int64_t>(2 * blocks + 4096)), "virtual");
    for (std::size_t i = 0; i < sequences; ++i) {
        compute(manager, by_nodes ? binary_sequence(i, sequences) : child_sequence(i));
    }
    for (std::size_t q = 0; q < kQueries; ++q) {
        const std::size_t i = (q * 7919 + 1) % sequences;
        Tokens query = by_nodes ? binary_sequence(i, sequences) : child_sequence(i);
        const auto cached = static_cast<std::int64_t>(query.size());
        for (std::size_t j = 0; j < 8; ++j) {
            query.push_back(scrambled((std::uint64_t{3} << 40) + q * 8 + j));
        }
        timed_probe(manager, query, cached);
        timed_create(manager, query);
    }
    for (std::size_t q = 0; q < kQueries; ++q) {
        const std::size_t i = (q * 7907 + 1) % sequences;
        Tokens tokens = by_nodes ? binary_sequence(i, sequences) : child_sequence(i);
        tokens.resize(tokens.size() - kBlock + 20);
        append_block(tokens, (std::uint64_t{5} << 40) + q);
        append_block(tokens, (std::uint64_t{6} << 40) + q);
        tokens.resize(tokens.size() - 20);
        timed_branch(manager, tokens);
    }
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
