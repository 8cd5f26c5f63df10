#include "kvpool/sequence/commit_plan.hpp"

namespace kvpool {

CommitPlan plan_commit(std::int64_t committed, std::int64_t num_tokens, std::int64_t prompt_length,
                       std::int64_t tokens_per_block) noexcept {
    CommitPlan plan;
    plan.before = committed;
    plan.after = committed + num_tokens;
    plan.first = plan.before / tokens_per_block;
    plan.end = plan.after / tokens_per_block;
    plan.old_tail = plan.before % tokens_per_block;
    plan.tail = plan.after % tokens_per_block;
    const std::int64_t prompt = prompt_block(prompt_length, tokens_per_block);
    if (plan.first <= prompt && prompt < plan.end) {
        plan.prompt = prompt;
    }
    return plan;
}

}  // namespace kvpool
