#include "config.hpp"

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace py = pybind11;

namespace kvpool::bindings {
namespace {

constexpr int kSsmLayer = 1;       // kvpool.v2.types.LayerType.SSM
constexpr int kOptionalReuse = 1;  // kvpool.v2.types.ReusePolicy.OPTIONAL

template <class T>
T field(const py::handle& object, const char* name) {
    return py::cast<T>(object.attr(name));
}

LayerConfig read_layer(const py::handle& object) {
    LayerConfig layer;
    layer.layer_id = LayerId(field<std::int64_t>(object, "layer_id"));
    layer.is_ssm = field<int>(object, "layer_type") == kSsmLayer;
    if (!layer.is_ssm) {
        layer.window = field<std::optional<std::int64_t>>(object, "sliding_window_size");
        layer.sink_tokens = field<std::optional<std::int64_t>>(object, "num_sink_tokens").value_or(0);
        layer.optional = field<int>(object, "reuse_policy") == kOptionalReuse;
    }
    for (const py::handle buffer : object.attr("buffers")) {
        layer.buffers.push_back({field<std::string>(buffer, "role"), field<std::int64_t>(buffer, "size"),
                                 field<std::optional<std::int64_t>>(buffer, "tokens_per_block_override")});
    }
    return layer;
}

Batch read_batch(const py::handle& object) {
    Batch batch;
    batch.system_prompt_length = field<std::int64_t>(object, "system_prompt_length");
    for (const py::handle request : object.attr("kv_caches")) {
        batch.requests.push_back(
            {field<std::int64_t>(request, "capacity"), field<std::int64_t>(request, "history_length")});
    }
    return batch;
}

}  // namespace

ManagerConfig read_config(const py::object& object) {
    ManagerConfig config;
    config.tokens_per_block = field<std::int64_t>(object, "tokens_per_block");
    config.gpu_quota = field<std::int64_t>(object.attr("cache_tiers")[py::int_(0)], "quota");
    for (const py::handle layer : object.attr("layers")) {
        config.layers.push_back(read_layer(layer));
    }
    for (const py::handle batch : object.attr("constraints")) {
        config.constraints.push_back(read_batch(batch));
    }
    if (const py::object typical = object.attr("typical_step"); !typical.is_none()) {
        config.typical_step = read_batch(typical);
    }
    config.initial_pool_ratio = field<std::optional<std::vector<double>>>(object, "initial_pool_ratio");
    config.max_util_for_resume = field<double>(object, "max_util_for_resume");
    if (const py::object scratch = object.attr("swa_scratch_reuse"); !scratch.is_none()) {
        config.scratch_max_rewind_len = field<std::int64_t>(scratch, "max_rewind_len");
    }
    config.commit_min_snapshot = field<bool>(object, "commit_min_snapshot");
    config.merge_equal_pools = field<bool>(object, "merge_equal_pools");
    config.enable_partial_reuse = field<bool>(object, "enable_partial_reuse");
    config.reuse_match_backoff = field<std::int64_t>(object, "reuse_match_backoff");
    config.longest_match = field<std::string>(object, "match_policy") == "longest";
    config.retain_window_tails = field<bool>(object, "retain_window_tails");
    config.window_tail_slack = field<std::int64_t>(object, "window_tail_slack");
    config.window_tail_interval = field<std::optional<std::int64_t>>(object, "window_tail_interval");
    config.text_only = field<bool>(object, "text_only");
    config.enable_stats = field<bool>(object, "enable_stats");
    return config;
}

}  // namespace kvpool::bindings
