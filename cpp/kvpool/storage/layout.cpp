#include "kvpool/storage/layout.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "kvpool/core/errors.hpp"
#include "kvpool/core/math.hpp"

namespace kvpool {

namespace {

std::string name_of(LayerId layer) { return "layer " + std::to_string(layer.value()); }

std::string name_of(LayerId layer, const std::string& role) { return name_of(layer) + ", role \"" + role + "\""; }

void check_size(const std::string& field, std::int64_t value) {
    if (value < 1 || value > kHuge) {
        throw ConfigError(field + " must be in [1, 2^62], got " + std::to_string(value));
    }
}

LifeCycleKey key_of(const LayerConfig& layer, std::int64_t tokens_per_block) {
    const std::string who = name_of(layer.layer_id);
    if (layer.is_ssm) {
        if (layer.window || layer.sink_tokens != 0) {
            throw ConfigError(who + ": a state (SSM) layer has neither sliding_window_size nor num_sink_tokens");
        }
        return {.is_ssm = true, .window = LifeCycleKey::kFull, .sink_blocks = 0, .optional = false};
    }
    if (layer.window) {
        check_size(who + ": sliding_window_size", *layer.window);
    }
    if (layer.sink_tokens < 0 || layer.sink_tokens > kHuge || (layer.sink_tokens > 0 && !layer.window)) {
        throw ConfigError(who + ": num_sink_tokens must be in [0, 2^62], and 0 without sliding_window_size, got " +
                          std::to_string(layer.sink_tokens));
    }
    return {.is_ssm = false,
            .window = layer.window.value_or(LifeCycleKey::kFull),
            .sink_blocks = div_up(layer.sink_tokens, tokens_per_block),
            .optional = layer.optional};
}

std::int64_t expansion_of(const LayerConfig& layer, const BufferConfig& buffer, std::int64_t tokens_per_block) {
    if (!buffer.tokens_per_block) {
        return 1;
    }
    const std::string who = name_of(layer.layer_id, buffer.role) + ": tokens_per_block_override";
    if (layer.is_ssm) {
        throw ConfigError(who + " is not legal for a state (SSM) layer");
    }
    if (*buffer.tokens_per_block < 1 || tokens_per_block % *buffer.tokens_per_block != 0) {
        throw ConfigError(who + " must divide tokens_per_block " + std::to_string(tokens_per_block) + ", got " +
                          std::to_string(*buffer.tokens_per_block));
    }
    return tokens_per_block / *buffer.tokens_per_block;
}

LifeCycleId find_or_add(std::vector<LifeCycle>& life_cycles, const LifeCycleKey& key) {
    const auto it =
        std::find_if(life_cycles.begin(), life_cycles.end(), [&](const LifeCycle& l) { return l.key == key; });
    if (it == life_cycles.end()) {
        life_cycles.push_back(
            LifeCycle{.key = key, .layers = {}, .pool_group = {}, .scratch_fraction = {}, .coalesced = {}});
        return make_id<LifeCycleId>(life_cycles.size() - 1);
    }
    return make_id<LifeCycleId>(static_cast<std::size_t>(it - life_cycles.begin()));
}

void add_to_coalesced(LifeCycle& life_cycle, std::int64_t expanded, BufferId buffer) {
    auto& all = life_cycle.coalesced;
    auto it = std::find_if(all.begin(), all.end(), [&](const CoalescedBuffer& c) { return c.single_size == expanded; });
    if (it == all.end()) {
        all.push_back(CoalescedBuffer{.single_size = expanded, .buffers = {}});
        it = all.end() - 1;
    }
    it->buffers.push_back(std::move(buffer));
}

// Layers to life cycles and their coalesced buffers in order of first mention; attributes get life cycle, size and
// expansion.
void read_layers(const ManagerConfig& config, Layout& layout) {
    std::set<LayerId> seen;
    Int128 total = 0;
    for (const LayerConfig& layer : config.layers) {
        if (!seen.insert(layer.layer_id).second) {
            throw ConfigError(name_of(layer.layer_id) + ": layer_id must be unique");
        }
        const LifeCycleId id = find_or_add(layout.life_cycles, key_of(layer, layout.tokens_per_block));
        LifeCycle& life_cycle = layout.life_cycles[id.index()];
        life_cycle.layers.push_back(layer.layer_id);
        for (const BufferConfig& buffer : layer.buffers) {
            check_size(name_of(layer.layer_id, buffer.role) + ": size", buffer.size);
            const std::int64_t expansion = expansion_of(layer, buffer, layout.tokens_per_block);
            const Int128 expanded = Int128{buffer.size} * Int128{expansion};
            total += expanded;
            if (total > Int128{kHuge}) {
                throw ConfigError(name_of(layer.layer_id, buffer.role) + ": size brings one block above 2^62 bytes");
            }
            const BufferId buffer_id{layer.layer_id, buffer.role};
            BufferAttr attr;
            attr.life_cycle = id;
            attr.size = static_cast<std::int64_t>(expanded);
            attr.expansion = expansion;
            if (!layout.buffers.emplace(buffer_id, attr).second) {
                throw ConfigError(name_of(layer.layer_id, buffer.role) + ": role must be unique within the layer");
            }
            add_to_coalesced(life_cycle, attr.size, buffer_id);
        }
    }
    for (const LifeCycle& life_cycle : layout.life_cycles) {
        if (life_cycle.coalesced.empty()) {
            throw ConfigError(name_of(life_cycle.layers.front()) +
                              ": buffers must not be empty: no layer of its layer group (" + describe(life_cycle.key) +
                              ") has any");
        }
    }
}

// Sorts the coalesced buffers into pool order and fills in what follows from it.
void place_buffers(Layout& layout) {
    for (LifeCycle& life_cycle : layout.life_cycles) {
        std::stable_sort(life_cycle.coalesced.begin(), life_cycle.coalesced.end(),
                         [](const CoalescedBuffer& a, const CoalescedBuffer& b) { return a.size() > b.size(); });
        for (std::size_t pool = 0; pool < life_cycle.coalesced.size(); ++pool) {
            const CoalescedBuffer& coalesced = life_cycle.coalesced[pool];
            const auto scale = static_cast<std::int64_t>(coalesced.buffers.size());
            std::map<LayerId, std::int64_t> util;
            for (const BufferId& buffer : coalesced.buffers) {
                ++util[buffer.layer];
            }
            std::int64_t offset = 0;
            for (const BufferId& buffer : coalesced.buffers) {
                BufferAttr& attr = layout.buffers.at(buffer);
                attr.pool = make_id<PoolId>(pool);
                attr.offset = offset;
                attr.scale = scale;
                attr.layer_util = util[buffer.layer];
                offset += coalesced.single_size;
                Fraction& largest = life_cycle.scratch_fraction;
                if (ratio_less(largest.num, largest.den, attr.layer_util, scale)) {
                    const std::int64_t common = std::gcd(attr.layer_util, scale);
                    largest = {attr.layer_util / common, scale / common};
                }
            }
        }
    }
}

void group_pools(Layout& layout, bool merge_equal_pools) {
    for (std::size_t i = 0; i < layout.life_cycles.size(); ++i) {
        LifeCycle& life_cycle = layout.life_cycles[i];
        std::vector<std::int64_t> sizes;
        sizes.reserve(life_cycle.coalesced.size());
        for (const CoalescedBuffer& coalesced : life_cycle.coalesced) {
            sizes.push_back(coalesced.size());
        }
        auto& groups = layout.pool_groups;
        auto it = groups.end();
        if (merge_equal_pools) {
            it = std::find_if(groups.begin(), groups.end(), [&](const PoolGroup& g) { return g.slot_sizes == sizes; });
        }
        if (it == groups.end()) {
            PoolGroup group;
            group.slot_bytes = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
            group.slot_sizes = std::move(sizes);
            group.ssm_only = true;
            group.key = life_cycle.key;
            groups.push_back(std::move(group));
            it = groups.end() - 1;
        }
        it->life_cycles.push_back(make_id<LifeCycleId>(i));
        it->ssm_only = it->ssm_only && life_cycle.key.is_ssm;
        it->key = std::min(it->key, life_cycle.key);
        life_cycle.pool_group = make_id<PoolGroupId>(static_cast<std::size_t>(it - groups.begin()));
    }
}

// Scratch blocks of one layer stay apart only where the layer's share divides the slot.
void check_scratch_aliases(const Layout& layout) {
    for (const auto& [id, attr] : layout.buffers) {
        if (layout.life_cycle(attr.life_cycle).key.is_windowed() && attr.scale % attr.layer_util != 0) {
            throw ConfigError("swa_scratch_reuse: " + name_of(id.layer) + " has " + std::to_string(attr.layer_util) +
                              " of the " + std::to_string(attr.scale) + " buffers of pool " +
                              std::to_string(attr.pool.value()) + " of layer group " +
                              std::to_string(attr.life_cycle.value()) + "; the scratch mapping would alias");
        }
    }
}

}  // namespace

std::int64_t ceil_times(std::int64_t n, const Fraction& fraction) noexcept {
    return saturate(div_up(Int128{n} * Int128{fraction.num}, Int128{fraction.den}));
}

Layout build_layout(const ManagerConfig& config) {
    constexpr std::int64_t kMaxTokensPerBlock = std::numeric_limits<std::int32_t>::max();
    if (config.tokens_per_block < 1 || config.tokens_per_block > kMaxTokensPerBlock) {
        throw ConfigError("tokens_per_block must be in [1, 2^31 - 1], got " + std::to_string(config.tokens_per_block));
    }
    Layout layout;
    layout.tokens_per_block = config.tokens_per_block;
    read_layers(config, layout);
    place_buffers(layout);
    group_pools(layout, config.merge_equal_pools);
    if (config.scratch_max_rewind_len) {
        check_scratch_aliases(layout);
    }
    return layout;
}

void check_index_range(const Layout& layout, std::span<const std::int64_t> slot_counts) {
    constexpr Int128 kMaxProduct = Int128{1} << 31;  // the largest index is one less
    for (const auto& [id, attr] : layout.buffers) {
        const std::int64_t slots = slot_counts[layout.life_cycle(attr.life_cycle).pool_group.index()];
        const Int128 sub_pages = Int128{attr.scale} * Int128{attr.expansion};
        // Cap each factor's product at 2^62 before the next: enough to tell, and free of overflow.
        const Int128 product = Int128{slots} * Int128{saturate(sub_pages)};
        if (product > kMaxProduct) {
            throw ConfigError(name_of(id.layer, id.role) + ": page indices do not fit int32: " + std::to_string(slots) +
                              " slots * scale " + std::to_string(attr.scale) + " * expansion " +
                              std::to_string(attr.expansion) + " = " + std::to_string(saturate(product)) +
                              ", at most 2147483648 is legal");
        }
    }
}

std::string describe(const LifeCycleKey& key) {
    if (key.is_ssm) {
        return "ssm";
    }
    if (!key.is_windowed()) {
        return "full attention";
    }
    std::string text = "window " + std::to_string(key.window);
    if (key.sink_blocks > 0) {
        text += " + " + std::to_string(key.sink_blocks) + " sink block(s)";
    }
    return text;
}

}  // namespace kvpool
