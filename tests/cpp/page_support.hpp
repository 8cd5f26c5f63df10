// A prefix cache with its tier on a device without bytes, and requests reduced to what the cache sees of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/device/factory.hpp"
#include "kvpool/page/prefix_cache.hpp"
#include "storage_configs.hpp"

namespace kvpool::testing_pages {

using Tokens = std::vector<Token>;

// tokens_per_block `tpb`; every life cycle has a pool group of its own.
inline ManagerConfig config_of(std::vector<LayerConfig> layers, std::int64_t tpb = 4) {
    ManagerConfig config = testing_configs::config_of(std::move(layers));
    config.tokens_per_block = tpb;
    config.merge_equal_pools = false;
    config.window_tail_interval = 0;
    return config;
}

inline LayerConfig layer(std::int64_t id, std::optional<std::int64_t> window = std::nullopt, std::int64_t sinks = 0,
                         bool optional = false) {
    LayerConfig config = testing_configs::attention(id, {4096}, window, sinks);
    config.optional = optional;
    return config;
}

// first, first + 1, ...
inline Tokens range(Token first, std::int64_t n) {
    Tokens tokens(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = first + static_cast<Token>(i);
    }
    return tokens;
}

inline Tokens operator+(Tokens a, const Tokens& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

struct Bed {
    explicit Bed(const ManagerConfig& config, std::int64_t slots = 64)
        : device(make_device("virtual")),
          layout(build_layout(config)),
          tier(*device, journal, layout, std::vector<std::int64_t>(layout.pool_groups.size(), slots),
               std::int64_t{2} << 20),
          cache(layout, ReuseRules::make(layout, config), tier, journal) {
        journal.begin();
    }

    std::shared_ptr<Device> device;
    Journal journal;
    Layout layout;
    Tier tier;
    PrefixCache cache;
    // Pages that somebody owns, and held nodes, for audits.
    std::map<std::pair<LifeCycleId, SlotId>, std::int32_t> owned;
    std::vector<NodeId> held;

    [[nodiscard]] std::size_t num_life_cycles() const { return layout.life_cycles.size(); }
    [[nodiscard]] static LifeCycleId lc(std::size_t i) { return make_id<LifeCycleId>(i); }
    [[nodiscard]] PoolGroupId group(LifeCycleId id) const { return layout.life_cycle(id).pool_group; }

    // Ends one call and begins the next.
    void next_call() {
        journal.commit();
        journal.begin();
    }
    SlotId take(LifeCycleId id, std::int32_t priority = 35) {
        cache.make_room(group(id), 1);
        const SlotId slot = tier.allocate(group(id));
        cache.new_page(id, slot, priority);
        ++owned[{id, slot}];
        return slot;
    }
    void drop(LifeCycleId id, SlotId slot) {
        if (--owned[{id, slot}] == 0) {
            owned.erase({id, slot});
        }
        cache.release(id, slot);
    }
    // Puts tokens into the tree block by block, with pages of all life cycles that are owned by nobody; the state, if there
    // is one, only for the last block. `wanted(life cycle, ordinal)` says which pages. The node of the last block.
    template <class F>
    NodeId commit(const Tokens& tokens, F&& wanted, const ReuseScope& scope = {}, std::int32_t priority = 35) {
        const auto tpb = static_cast<std::size_t>(cache.tokens_per_block());
        NodeId node = cache.make_root(scope);
        cache.hold_node(node);
        for (std::size_t i = 0; i < tokens.size(); i += tpb) {
            const TokenSpan block = TokenSpan(tokens).subspan(i, std::min(tpb, tokens.size() - i));
            const NodeId parent = node;
            std::vector<SlotId> slots(num_life_cycles(), kBadSlot);
            const bool is_last = i + tpb >= tokens.size();
            for (std::size_t l = 0; l < num_life_cycles(); ++l) {
                const bool is_state = layout.life_cycles[l].key.is_ssm;
                if ((!is_state || is_last) && wanted(l, i / tpb)) {
                    slots[l] = take(lc(l), priority);
                }
            }
            node = (block.size() == tpb ? cache.insert_full(parent, block) : cache.insert_tail(parent, block)).node;
            for (std::size_t l = 0; l < num_life_cycles(); ++l) {
                if (slots[l] != kBadSlot) {
                    cache.install(node, lc(l), slots[l], static_cast<std::int64_t>(block.size()));
                }
            }
            if (block.size() == tpb) {
                cache.hold_node(node);
                for (std::size_t l = 0; l < num_life_cycles(); ++l) {
                    if (slots[l] != kBadSlot) {
                        drop(lc(l), slots[l]);
                    }
                }
                cache.let_go(parent);
            } else {
                for (std::size_t l = 0; l < num_life_cycles(); ++l) {
                    if (slots[l] != kBadSlot) {
                        drop(lc(l), slots[l]);
                    }
                }
                cache.let_go(parent);
            }
        }
        if (tokens.size() % tpb == 0) {
            cache.let_go(node);
        }
        return node;
    }
    NodeId commit(const Tokens& tokens, const ReuseScope& scope = {}) {
        return commit(tokens, [](std::size_t, std::size_t) { return true; }, scope);
    }

    [[nodiscard]] MatchResult match(const Tokens& tokens, const ReuseScope& scope = {}) {
        MatchResult result;
        cache.match(scope, {.tokens = tokens, .raw = true, .unknown = {}, .name = "input_tokens"}, result);
        return result;
    }
    [[nodiscard]] std::int64_t end(const Tokens& tokens, const ReuseScope& scope = {}) {
        return match(tokens, scope).end;
    }
    // The node of the full blocks, and the partial one, that spell exactly these tokens; kNoNode without.
    [[nodiscard]] NodeId find(const Tokens& tokens, const ReuseScope& scope = {}) {
        const auto tpb = static_cast<std::size_t>(cache.tokens_per_block());
        NodeId node = cache.find_root(scope);
        for (std::size_t i = 0; i < tokens.size() && node != kNoNode; i += tpb) {
            node = cache.child(node, TokenSpan(tokens).subspan(i, std::min(tpb, tokens.size() - i)));
        }
        return node;
    }

    void audit() const {
        PrefixCache::Owners owners;
        for (std::size_t g = 0; g < layout.pool_groups.size(); ++g) {
            owners.refs.emplace_back(static_cast<std::size_t>(tier.total(make_id<PoolGroupId>(g))));
        }
        for (const auto& [page, refs] : owned) {
            owners.refs[group(page.first).index()][page.second.index()] = refs;
        }
        owners.last_nodes = held;
        cache.audit(owners);
        tier.audit();
    }

    // Everything that can be seen, for comparisons.
    [[nodiscard]] std::string dump() const {
        std::string text;
        const auto add = [&](std::int64_t number) { text += std::to_string(number) + " "; };
        for (const NodeId node : cache.nodes_in_order()) {
            add(cache.ordinal(node));
            for (const Token token : cache.tokens(node)) {
                add(token);
            }
            text += "| ";
            add(cache.marks(node));
            for (std::size_t l = 0; l < num_life_cycles(); ++l) {
                const SlotId slot = cache.page(node, lc(l));
                add(slot.value());
                if (slot != kBadSlot) {
                    add(cache.coverage(node, lc(l)));
                    add(cache.refs(lc(l), slot));
                    add(cache.priority(lc(l), slot));
                    add(cache.plans(lc(l), slot));
                }
                add(cache.tails(node, lc(l)));
            }
            text += "\n";
        }
        for (std::size_t g = 0; g < layout.pool_groups.size(); ++g) {
            text += "queue ";
            for (const PrefixCache::Queued& page : cache.queue_in_order(make_id<PoolGroupId>(g))) {
                add(page.priority);
                add(page.victim_class);
                add(page.slot.value());
            }
            text += "free ";
            add(tier.free(make_id<PoolGroupId>(g)));
            text += "\n";
        }
        return text;
    }
};

}  // namespace kvpool::testing_pages
