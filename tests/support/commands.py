"""Random commands as plain values, and a driver that runs one of them on a manager and tells what came out.

The same list of commands runs on any number of managers (both backends, or one backend and the model), so that the
outcomes can be compared one by one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.v2 import AttentionLayerConfig, BufferConfig, KVCacheManagerConfig, SsmLayerConfig, SwaScratchReuseConfig
from tests.support.configs import MIB, batch, config
from tests.support.stepping import Stepper

Command = tuple[Any, ...]
MAX_CACHES = 6
TABLE_ROWS = 8
TABLE_BLOCKS = 24
SIZES = [64 * 1024, 128 * 1024, 256 * 1024, 512 * 1024, 1024 * 1024]


def random_manager_config(rng: random.Random, *, bytes_matter: bool = False) -> KVCacheManagerConfig:
    """Layers, windows, sinks, states, overrides, quotas, ratios and constraints; may have floors above the quota."""
    tpb = rng.choice([4, 8, 16, 32])
    windows = rng.sample([None, 1, 5, 16, 33, 64, 100], rng.randint(1, 3))
    sizes = rng.sample(SIZES if not bytes_matter else SIZES[:3], rng.randint(1, 2))
    layers: list[Any] = []
    for i in range(rng.choice([0, 1, 1, 2, 2, 3, 4, 6]) if not bytes_matter else rng.randint(1, 4)):
        if rng.random() < 0.2:
            layers.append(SsmLayerConfig(i, [BufferConfig("state", rng.choice(sizes))]))
            continue
        window = rng.choice(windows)
        buffers = []
        for role in ("key", "value", "scale")[: rng.choice([1, 2, 2, 3])]:
            override = rng.choice([None, None, None, tpb, tpb // 2, tpb // 4])
            size = rng.choice(sizes)
            buffers.append(BufferConfig(role, size if override is None else size * override // tpb, override))
        layers.append(AttentionLayerConfig(i, buffers, window, rng.choice([None, 1, 9, 40]) if window else None))
    fields: dict[str, Any] = {
        "max_util_for_resume": rng.choice([0.97, 1.0, 0.5, 0.29]),
        "merge_equal_pools": rng.random() < 0.7,
        "commit_min_snapshot": rng.random() < 0.3 or any(isinstance(layer, SsmLayerConfig) for layer in layers),
    }
    if rng.random() < 0.4:
        fields["swa_scratch_reuse"] = SwaScratchReuseConfig(rng.choice([0, 3, tpb, 2 * tpb]))
    if rng.random() < 0.3:
        fields["typical_step"] = batch((rng.randint(1, 6) * tpb, rng.randint(0, tpb)), (tpb, tpb))
    if rng.random() < 0.3:
        fields["constraints"] = [batch((rng.randint(1, 4) * tpb, 0))]
    cfg = config(layers, rng.choice([8, 16, 24, 40]) * MIB, tpb, **fields)
    if rng.random() < 0.25 and layers:
        weights = [rng.randint(1, 5) for _ in cfg.life_cycles()]
        cfg = config(
            layers, cfg.cache_tiers[0].quota, tpb, **fields, initial_pool_ratio=[w / sum(weights) for w in weights]
        )
    return cfg


class CommandMaker:
    """Draws the next command, knowing roughly what is open (from the answers of one of the managers)."""

    def __init__(self, rng: random.Random, tpb: int, groups: int, streams: int = 3) -> None:
        self.rng, self.tpb, self.groups, self.streams = rng, tpb, groups, streams

    def next(self, driver: Driver) -> Command:
        rng = self.rng
        slots = len(driver.caches)
        live = [k for k, c in enumerate(driver.caches) if c is not None]
        if not live or (len(live) < MAX_CACHES and rng.random() < 0.12):
            return ("create", rng.random() < 0.6)
        k = rng.choice(live)
        if not driver.active(k) and rng.random() < 0.6:
            return ("resume", k, rng.choice([None, None, *range(self.streams)]))
        kind = rng.choices(
            [
                "resume", "suspend", "resize", "history", "step", "beam", "stop", "scratch", "attach", "detach",
                "close", "stream", "setter", "stats", "clamp", "dead",
            ],
            [2, 4, 24, 6, 30, 3, 3, 3, 4, 2, 3, 3, 2, 1, 1, 1],
        )[0]  # fmt: skip
        top = TABLE_BLOCKS * self.tpb
        history, capacity = driver.lengths(k)
        if kind == "resume":
            return ("resume", k, rng.choice([None, None, *range(self.streams)]))
        if kind == "resize":
            new_history = rng.choice([None, history, min(capacity, history + rng.randint(0, 2 * self.tpb))])
            if rng.random() < 0.03:
                new_history = history - 1
            move = rng.choice([0, 1, 1, self.tpb, 3 * self.tpb, -1, -self.tpb, rng.randint(-top, top), 9 * self.tpb])
            floor = -1 if rng.random() < 0.05 else max(history, new_history or 0)
            return ("resize", k, rng.choice([None, max(floor, min(top, capacity + move))]), new_history)
        if kind == "history":
            return ("history", k, min(capacity, history + rng.randint(0, self.tpb)))
        if kind == "setter":
            return ("capacity", k, max(0, min(top, capacity + rng.randint(-self.tpb, self.tpb))))
        if kind == "step":
            return self._step(driver, live)
        if kind == "beam":
            return ("beam", k, rng.choice([0, 1, 1, 2, 3]))
        if kind == "scratch":
            return ("scratch", k, rng.random() < 0.5)
        if kind == "attach":
            return ("attach", k, rng.randrange(2), rng.randrange(self.groups + 1), rng.choice([TABLE_BLOCKS, 6, 1]))
        if kind == "detach":
            return ("detach", k, rng.randrange(self.groups + 1))
        if kind == "stream":
            return ("stream", k, rng.randrange(self.streams))
        if kind == "clamp":
            return ("clamp", rng.randint(1, 5), rng.randint(0, 2 * top))
        if kind == "stats":
            return ("stats",)
        if kind == "dead":
            return ("dead", rng.randrange(slots))
        return (kind, k)

    def _step(self, driver: Driver, live: list[int]) -> Command:
        rng = self.rng
        active = [k for k in live if driver.active(k) and driver.beams(k) == 1]
        pool = active if rng.random() < 0.95 else live
        chosen = [k for k in pool if rng.random() < 0.8]
        rng.shuffle(chosen)
        rows = rng.sample(range(TABLE_ROWS), len(chosen)) if rng.random() < 0.15 else [k % TABLE_ROWS for k in chosen]
        capacities, histories = [], []
        decode = rng.random() < 0.6
        for k in chosen:
            history, capacity = driver.lengths(k)
            if decode:
                new_history = capacity
                new_capacity = min(capacity + 1, TABLE_BLOCKS * self.tpb)
            else:
                new_history = min(capacity, history + rng.choice([0, 1, self.tpb]))
                new_capacity = max(new_history, min(TABLE_BLOCKS * self.tpb, capacity + rng.randint(-self.tpb, 60)))
            if rng.random() < 0.01:
                new_history -= rng.choice([1, 2])
            histories.append(new_history)
            capacities.append(new_capacity)
        stream = rng.choice([None, None, None, *range(self.streams)])
        return ("step", rng.random() < 0.1, tuple(chosen), tuple(rows), tuple(capacities), tuple(histories), stream)


@dataclass
class Driver:
    """Runs commands on one manager and answers with plain values."""

    manager: Any
    streams: list[int] = field(default_factory=lambda: [0, 1, 2])
    caches: list[Any] = field(default_factory=list)
    closed: list[Any] = field(default_factory=list)
    buffers: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    steppers: list[Stepper] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = len(self.manager.layer_grouping)
        self.steppers = [Stepper(self.manager, TABLE_ROWS, TABLE_BLOCKS, fill=-50 - i) for i in range(2)]

    def lengths(self, k: int) -> tuple[int, int]:
        return self.caches[k].history_length, self.caches[k].capacity

    def active(self, k: int) -> bool:
        return self.caches[k].is_active

    def beams(self, k: int) -> int:
        return self.caches[k].beam_width

    def run(self, command: Command) -> tuple[Any, ...]:
        """("ok", value) or ("error", class name). The message is each backend's own."""
        try:
            return ("ok", self._run(command))
        except Exception as error:
            if isinstance(error, AssertionError) and type(error) is AssertionError:
                raise
            return ("error", type(error).__name__)

    def _run(self, command: Command) -> Any:
        name, *args = command
        return getattr(self, f"do_{name}")(*args)

    def do_create(self, stop: bool) -> int:
        cache = self.manager.create_kv_cache()
        if stop:
            cache.stop_committing()
        for k, old in enumerate(self.caches):
            if old is None:
                self.caches[k] = cache
                return cache.handle
        self.caches.append(cache)
        return cache.handle

    def do_resume(self, k: int, stream: int | None) -> bool:
        return self.caches[k].resume(None if stream is None else self.streams[stream])

    def do_suspend(self, k: int) -> None:
        self.caches[k].suspend()
        self.forget_buffers(k)

    def do_resize(self, k: int, capacity: int | None, history: int | None) -> bool:
        return self.caches[k].resize(capacity, history)

    def do_history(self, k: int, history: int) -> None:
        self.caches[k].history_length = history

    def do_capacity(self, k: int, capacity: int) -> None:
        self.caches[k].capacity = capacity

    def do_beam(self, k: int, width: int) -> None:
        self.caches[k].beam_width = width
        for key in [b for b in self.buffers if b[0] == k and b[1] >= width]:
            del self.buffers[key]

    def do_stop(self, k: int) -> None:
        self.caches[k].stop_committing()

    def do_scratch(self, k: int, value: bool) -> None:
        self.caches[k].enable_swa_scratch_reuse = value

    def do_attach(self, k: int, beam: int, group: int, length: int) -> list[int]:
        buffer = np.full(length, 12345, np.int32)
        self.caches[k].set_base_page_index_buf(beam, group, memoryview(buffer))
        self.buffers[k, beam, group] = buffer
        return buffer.tolist()

    def do_detach(self, k: int, group: int) -> None:
        self.caches[k].set_base_page_index_buf(0, group, None)
        self.buffers.pop((k, 0, group), None)

    def do_close(self, k: int) -> None:
        self.caches[k].close()
        self.forget_buffers(k)
        self.closed.append(self.caches[k])
        self.caches[k] = None

    def do_stream(self, k: int, stream: int) -> None:
        self.caches[k].cuda_stream = self.streams[stream]

    def do_stats(self) -> list[tuple[int, ...]]:
        return [
            (s.total, s.free, s.evictable, s.available, s.unavailable) for s in self.manager.get_storage_statistics()
        ]

    def do_clamp(self, batch_size: int, bound: int) -> int:
        return self.manager.clamp_max_seq_len_for_mem(batch_size, bound)

    def do_dead(self, pick: int) -> None:
        if self.closed:
            self.closed[pick % len(self.closed)].resize(1)

    def do_step(self, second_table, chosen, rows, capacities, histories, stream) -> tuple[Any, ...]:
        stepper = self.steppers[int(second_table)]
        ok = stepper.step(
            [self.caches[k] for k in chosen],
            list(rows),
            list(capacities),
            list(histories),
            None if stream is None else self.streams[stream],
        )
        for k, row, fine in zip(chosen, rows, ok, strict=True):
            if fine:
                stepper.check_row(self.caches[k], row)
        return ok, stepper.last_dirty, stepper.last_event

    def forget_buffers(self, k: int) -> None:
        for key in [b for b in self.buffers if b[0] == k]:
            del self.buffers[key]

    def observe(self) -> dict[str, Any]:
        """All that a caller can see, as plain values."""
        seen: dict[str, Any] = {
            "snapshot": self.manager.snapshot(),
            "tables": [s.table.tolist() for s in self.steppers],
        }
        caches = []
        for k, cache in enumerate(self.caches):
            if cache is None:
                continue
            rows = [
                (
                    [int(i) for i in cache.get_base_page_indices(g, b)],
                    list(cache.get_aggregated_page_indices(g, b)),
                )
                for g in range(self.groups)
                for b in range(cache.beam_width)
            ]
            scratch = []
            for g in range(self.groups):
                desc = cache.get_scratch_desc(g)
                scratch.append(None if desc is None else (desc.range.beg, desc.range.end, list(desc.slot_ids)))
            caches.append(
                (
                    k, cache.handle, cache.status.name, cache.num_committed_tokens, cache.history_length, cache.capacity,
                    cache.num_blocks, cache.beam_width, cache.cuda_stream, cache.enable_swa_scratch_reuse, rows, scratch,
                )
            )  # fmt: skip
        seen["caches"] = caches
        seen["buffers"] = {key: b.tolist() for key, b in sorted(self.buffers.items())}
        return seen

    def finish(self) -> None:
        for cache in self.caches:
            if cache is not None:
                cache.close()
        self.manager.audit()
        snapshot = self.manager.snapshot()
        assert all(g["used"] == [] and g["free"] == g["total"] for g in snapshot["pool_groups"])
        self.manager.shutdown()
