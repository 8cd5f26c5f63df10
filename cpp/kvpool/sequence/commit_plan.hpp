// What committing tokens means for one request: pure arithmetic on lengths, no state.
//
// Words
//   full      a block all of whose tokens are committed; those before `first` were so before the call
//   tail      committed tokens behind the last full block
//   prompt    the block that ends at the last block boundary of the prompt
// Invariant: end * tpb + tail == after == before + (tokens of the call)
#pragma once

#include <cstdint>

namespace kvpool {

struct CommitPlan {
    std::int64_t before = 0;  // tokens committed
    std::int64_t after = 0;
    std::int64_t first = 0;  // blocks [first, end) become full
    std::int64_t end = 0;
    std::int64_t tail = 0;        // tokens, afterwards
    std::int64_t old_tail = 0;    // tokens, before
    std::int64_t prompt = kNone;  // block, if the call passes its end
    static constexpr std::int64_t kNone = -1;

    [[nodiscard]] bool fills_blocks() const noexcept { return end > first; }
};

// `prompt_length`: tokens; 0 if unknown.
[[nodiscard]] CommitPlan plan_commit(std::int64_t committed, std::int64_t num_tokens, std::int64_t prompt_length,
                                     std::int64_t tokens_per_block) noexcept;

// Block that ends at the last block boundary of the prompt; CommitPlan::kNone for prompts below a block.
[[nodiscard]] constexpr std::int64_t prompt_block(std::int64_t prompt_length, std::int64_t tokens_per_block) noexcept {
    return prompt_length / tokens_per_block - 1;  // kNone is -1
}

}  // namespace kvpool
