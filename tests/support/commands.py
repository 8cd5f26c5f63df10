"""Random commands as plain values, and a driver that runs one of them on a manager and tells what came out.

The same list of commands runs on any number of managers (both backends, or one backend and the model), so that the
outcomes can be compared one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.errors import CuError, CuOOMError
from kvpool.v2 import (
    AttentionLayerConfig,
    BufferConfig,
    KVCacheManagerConfig,
    ReusePolicy,
    ReuseScope,
    SsmLayerConfig,
    SwaScratchReuseConfig,
)
from kvpool.v2._tokens import encode_tokens
from tests.support.configs import MIB, batch, config
from tests.support.stepping import Stepper
from tests.support.texts import SCOPES, Library, Text, Token, as_argument

Command = tuple[Any, ...]
MAX_CACHES = 6
TABLE_ROWS = 8
TABLE_BLOCKS = 24
SIZES = [64 * 1024, 128 * 1024, 256 * 1024, 512 * 1024, 1024 * 1024]


def random_manager_config(
    rng: random.Random, *, bytes_matter: bool = False, reuse: bool = False
) -> KVCacheManagerConfig:
    """Layers, windows, sinks, states, overrides, quotas, ratios and constraints; may have floors above the quota."""
    tpb = rng.choice([4, 8, 16, 32])
    windows = rng.sample([None, 1, 5, 16, 33, 64, 100], rng.randint(1, 3))
    if reuse and rng.random() < 0.5:
        windows = [None, rng.choice([1, 2, tpb, tpb + 2, 2 * tpb + 1, 3 * tpb, 4 * tpb])]
    many = SIZES[:3] if bytes_matter else SIZES[: rng.choice([2, 3, 5])] if reuse else SIZES
    sizes = rng.sample(many, rng.randint(1, 2))
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
    if rng.random() < (0.2 if reuse else 0.4):
        fields["swa_scratch_reuse"] = SwaScratchReuseConfig(rng.choice([0, 3, tpb, 2 * tpb]))
    if rng.random() < 0.3:
        fields["typical_step"] = batch((rng.randint(1, 6) * tpb, rng.randint(0, tpb)), (tpb, tpb))
    if rng.random() < 0.3:
        fields["constraints"] = [batch((rng.randint(1, 4) * tpb, 0))]
    if reuse:
        fields.update(random_reuse_fields(rng, tpb))
        for layer in layers:
            if isinstance(layer, AttentionLayerConfig) and rng.random() < 0.15:
                layer.reuse_policy = ReusePolicy.OPTIONAL
    cfg = config(layers, rng.choice([6, 8, 16] if reuse else [8, 16, 24, 40]) * MIB, tpb, **fields)
    if rng.random() < 0.25 and layers:
        weights = [rng.randint(1, 5) for _ in cfg.life_cycles()]
        cfg = config(
            layers, cfg.cache_tiers[0].quota, tpb, **fields, initial_pool_ratio=[w / sum(weights) for w in weights]
        )
    return cfg


def random_reuse_fields(rng: random.Random, tpb: int) -> dict[str, Any]:
    return {
        "enable_partial_reuse": rng.random() < 0.75,
        "reuse_match_backoff": rng.choice([0, 0, 0, 1, 3, tpb, tpb + 1]),
        "match_policy": rng.choice(["longest", "longest", "reference"]),
        "retain_window_tails": rng.random() < 0.7,
        "window_tail_slack": rng.choice([0, 1, tpb, 512]),
        "window_tail_interval": rng.choice([None, 0, 0, 1, 3 * tpb + 1, 64]),
        "text_only": rng.random() < 0.2,
    }


PRIORITIES: list[Callable[[int, Any], int] | None] = [
    None,
    lambda ordinal, life_cycle: 10 + 20 * (ordinal % 3),
    lambda ordinal, life_cycle: 80 if ordinal < 2 else 20,
    lambda ordinal, life_cycle: 100 if getattr(life_cycle, "window_size", None) else 0,
]


class CommandMaker:
    """Draws the next command, knowing roughly what is open (from the answers of one of the managers)."""

    def __init__(
        self,
        rng: random.Random,
        config: KVCacheManagerConfig,
        groups: int,
        streams: int = 3,
        *,
        reuse: bool = False,
        exact: bool = False,
    ) -> None:
        """``exact``: only tokens are committed whose bytes an engine has written."""
        self.rng, self.tpb, self.groups, self.streams, self.reuse = rng, config.tokens_per_block, groups, streams, reuse
        self.top = TABLE_BLOCKS * self.tpb
        self.min_snapshot = config.commit_min_snapshot
        self.windowed = [getattr(lc, "window_size", None) is not None for lc in config.life_cycles()]
        self.library = Library(rng, self.tpb, self.top, digests=not config.text_only and rng.random() < 0.5)
        self.scopes = rng.sample(range(len(SCOPES)), rng.choice([1, 1, 2, 3]))
        self.priorities = rng.random() < 0.4
        self.next_command: Command | None = None
        kinds = {
            "resume": 2, "suspend": 4, "resize": 24, "history": 6, "step": 30, "beam": 3, "stop": 3, "scratch": 3,
            "attach": 4, "detach": 2, "close": 3, "stream": 3, "setter": 2, "stats": 1, "clamp": 1, "dead": 1,
        }  # fmt: skip
        if reuse:
            kinds.update(
                commit=14, close=14, probe=8, plan=4, drop=4, discard=1, clear=0.3, retext=3, raw=1, uncover=5, attach=2,
                detach=1, stream=2, scratch=2, keys=1, beam=1,
            )  # fmt: skip
        self.exact_rewind = config.swa_scratch_reuse.max_rewind_len if exact and config.swa_scratch_reuse else None
        if exact:
            kinds.pop("raw", None)
        self.kinds, self.weights = list(kinds), list(kinds.values())

    def next(self, driver: Driver) -> Command:
        rng = self.rng
        slots = len(driver.caches)
        live = [k for k, c in enumerate(driver.caches) if c is not None]
        if self.next_command is not None:
            command, self.next_command = self.next_command, None
            return command
        if not live or (len(live) < MAX_CACHES and rng.random() < (0.2 if self.reuse else 0.12)):
            return self._create()
        k = rng.choice(live)
        if not driver.active(k) and rng.random() < 0.6:
            return self._resume(k)
        if self.reuse and driver.active(k) and rng.random() < 0.35:
            return self._progress(driver, k)
        kind = rng.choices(self.kinds, self.weights)[0]
        top = self.top
        history, capacity = driver.lengths(k)
        if kind == "resume":
            return self._resume(k)
        if kind == "resize":
            moved = self._history(driver, k, min(capacity, history + rng.randint(0, 2 * self.tpb)))
            new_history = rng.choice([None, history, moved])
            if rng.random() < 0.03:
                new_history = history - 1
            move = rng.choice([0, 1, 1, self.tpb, 3 * self.tpb, -1, -self.tpb, rng.randint(-top, top), 9 * self.tpb])
            floor = -1 if rng.random() < 0.05 else max(history, new_history or 0)
            return ("resize", k, rng.choice([None, max(floor, min(top, capacity + move))]), new_history)
        if kind == "history":
            return ("history", k, self._history(driver, k, min(capacity, history + rng.randint(0, self.tpb))))
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
        if kind in ("stats", "clear"):
            return (kind,)
        if kind == "dead":
            return ("dead", rng.randrange(slots))
        if kind == "commit":
            return self._commit(driver, k)
        if kind == "probe":
            return ("probe", self._scope(), self.library.known(), self._part(), rng.random() < 0.5)
        if kind in ("drop", "discard"):
            return (kind, rng.randrange(8))
        if kind == "retext":
            return ("retext", k, rng.randint(history, top), self.library.fork(self.library.text(), 0))
        if kind == "uncover":
            return self._uncover(driver)
        if kind == "raw":
            return (
                "raw",
                k,
                tuple(rng.choice([0, 1, 2, -1, -2, -9]) for _ in range(rng.randint(0, 2))),
                rng.random() < 0.1,
            )
        return (kind, k)

    def _history(self, driver: Driver, k: int, history: int) -> int:
        """Scratch blocks keep no content: history must not stop among them, if bytes are to be right."""
        _, capacity = driver.lengths(k)
        if self.exact_rewind is not None and history < capacity - self.exact_rewind:
            return driver.lengths(k)[0]
        return history

    def _progress(self, driver: Driver, k: int) -> Command:
        """What a request usually does next: room for more tokens, or commit those it has."""
        committed, (_, capacity) = driver.committed(k), driver.lengths(k)
        if capacity > committed and driver.allowed(k) and driver.beams(k) == 1:
            return self._commit(driver, k)
        more = self.rng.choice([1, self.tpb, self.rng.randint(1, 8 * self.tpb)])
        return ("resize", k, min(self.top, capacity + more), None)

    def _uncover(self, driver: Driver) -> Command:
        """A cached page that leaves the tree on its own: scope, path, life cycle."""
        path: list[Any] = []
        found = []
        for scope, depth, tokens, _, pages, _ in driver.manager.snapshot()["tree"]:
            if depth < 0:
                continue
            del path[depth:]
            path.append([bytes.fromhex(token) if isinstance(token, str) else token for token in tokens])
            text = Text(token for block in path for token in block)
            found += [("uncover", tuple(scope), text, i) for i, page in enumerate(pages) if page and not page[2]]
        windowed = [c for c in found if self.windowed[c[3]]]
        found = windowed if windowed and self.rng.random() < 0.8 else found
        if not found:
            return ("stats",)
        _, scope, text, _ = command = self.rng.choice(found)
        longer = [known for known in self.library.texts if known[: len(text)] == text] or [text]
        query = self.rng.choice(longer)
        count = min(len(query), len(text) + self.rng.randint(0, 2 * self.tpb))
        self.next_command = ("probe", SCOPES.index(ReuseScope(*scope)), query, count, True)
        return command

    def _scope(self) -> int:
        return self.rng.choice(self.scopes)

    def _part(self) -> int:
        """How much of a text a query names."""
        blocks = self.rng.randint(0, TABLE_BLOCKS if self.rng.random() < 0.3 else 8) * self.tpb
        return min(self.top, blocks + self.rng.choice([0, 0, -1, 1, self.tpb // 2]) if blocks else 0)

    def _create(self) -> Command:
        rng = self.rng
        if not self.reuse:
            return ("create", rng.random() < 0.6)
        count = None if rng.random() < 0.15 else self._part()
        expected = None if rng.random() < 0.8 else rng.randint(0, self.top)
        return (
            "create", rng.random() < 0.08, self._scope(), self.library.text(), count,
            rng.randrange(len(PRIORITIES)) if self.priorities else 0, expected, rng.random() < 0.5,
            rng.choice([None, None, None, None, True, False]),
        )  # fmt: skip

    def _resume(self, k: int) -> Command:
        rng = self.rng
        stream = rng.choice([None, None, *range(self.streams)])
        if not self.reuse or rng.random() < 0.85:
            return ("resume", k, stream)
        chosen = rng.sample(range(self.groups + 1), rng.randint(0, min(2, self.groups + 1)))
        return ("resume", k, stream, tuple(chosen))

    def countable(self, driver: Driver, k: int) -> list[int]:
        """How many tokens may be committed now: the smallest and the largest legal number."""
        committed, (history, capacity) = driver.committed(k), driver.lengths(k)
        if not driver.allowed(k) or driver.beams(k) != 1:
            return [0]
        if self.min_snapshot and history > committed:
            return [0, history - committed]
        return [0, capacity - committed]

    def _commit(self, driver: Driver, k: int) -> Command:
        rng = self.rng
        committed, (history, capacity) = driver.committed(k), driver.lengths(k)
        most = self.countable(driver, k)[-1]
        if most and not (self.min_snapshot and history > committed):
            to_boundary = self.tpb - committed % self.tpb
            most = min(most, rng.choice([most, most, to_boundary, 1, history - committed, rng.randint(0, most)]))
        if self._history(driver, k, max(history, committed + most)) < committed + most:
            most = history - committed
        if rng.random() < 0.03:
            most = rng.choice([0, capacity - committed, capacity - committed + 1])
        return ("commit", k, max(0, min(most, self.top - committed)), rng.random() < 0.06)

    def _step(self, driver: Driver, live: list[int]) -> Command:
        rng = self.rng
        active = [k for k in live if driver.active(k) and driver.beams(k) == 1]
        pool = active if rng.random() < 0.95 else live
        chosen = [k for k in pool if rng.random() < 0.8]
        rng.shuffle(chosen)
        rows = rng.sample(range(TABLE_ROWS), len(chosen)) if rng.random() < 0.15 else [k % TABLE_ROWS for k in chosen]
        capacities, histories, counts = [], [], []
        decode = rng.random() < 0.6
        commits = self.reuse and rng.random() < 0.6
        for k in chosen:
            history, capacity = driver.lengths(k)
            count = 0
            if commits:
                count = self.countable(driver, k)[-1]
                whole = self.min_snapshot and history > driver.committed(k)
                if count and not decode and not whole:
                    count = rng.randint(0, count)
                plain = [isinstance(token, bytes) for token in driver.following(k, count)]
                if any(plain) and rng.random() < 0.98:  # a step takes no digests
                    count = 0 if whole else plain.index(True)
                committed = driver.committed(k)
                if self._history(driver, k, max(history, committed + count)) < committed + count:
                    count = history - committed
                if rng.random() < 0.01:
                    count += rng.choice([1, -1]) if count else 1
            history = max(history, driver.committed(k) + count)
            if decode:
                new_history = max(history, capacity)
                new_capacity = max(new_history, min(capacity + 1, TABLE_BLOCKS * self.tpb))
            else:
                new_history = max(
                    history, self._history(driver, k, min(capacity, history + rng.choice([0, 1, self.tpb])))
                )
                new_capacity = max(new_history, min(TABLE_BLOCKS * self.tpb, capacity + rng.randint(-self.tpb, 60)))
            if rng.random() < 0.01:
                new_history = history - 1 if self.exact_rewind is not None else new_history - rng.choice([1, 2])
            histories.append(new_history)
            capacities.append(new_capacity)
            counts.append(count)
        stream = rng.choice([None, None, None, *range(self.streams)])
        command = ("step", rng.random() < 0.1, tuple(chosen), tuple(rows), tuple(capacities), tuple(histories), stream)
        return (*command, tuple(counts)) if commits else command


@dataclass
class Driver:
    """Runs commands on one manager and answers with plain values."""

    manager: Any
    streams: list[int] = field(default_factory=lambda: [0, 1, 2])
    caches: list[Any] = field(default_factory=list)
    texts: list[list[Token]] = field(default_factory=list)
    closed: list[Any] = field(default_factory=list)
    plans: list[Any] = field(default_factory=lambda: [None] * 8)
    buffers: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    steppers: list[Stepper] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = len(self.manager.layer_grouping)
        self.top = TABLE_BLOCKS * self.manager.tokens_per_block
        self.has_scratch = self.manager.init_config.swa_scratch_reuse is not None
        self.steppers = [Stepper(self.manager, TABLE_ROWS, TABLE_BLOCKS, fill=-50 - i) for i in range(2)]

    def lengths(self, k: int) -> tuple[int, int]:
        return self.caches[k].history_length, self.caches[k].capacity

    def committed(self, k: int) -> int:
        return self.caches[k].num_committed_tokens

    def active(self, k: int) -> bool:
        return self.caches[k].is_active

    def beams(self, k: int) -> int:
        return self.caches[k].beam_width

    def allowed(self, k: int) -> bool:
        return self.manager._core.commit_allowed(self.caches[k].handle)

    def run(self, command: Command) -> tuple[Any, ...]:
        """("ok", value) or ("error", class name, words)."""
        try:
            return ("ok", self._run(command))
        except Exception as error:
            if isinstance(error, AssertionError) and type(error) is AssertionError:
                raise
            words = "" if isinstance(error, (CuError, CuOOMError)) else str(error)  # those are the device's
            return ("error", type(error).__name__, words)

    def _run(self, command: Command) -> Any:
        name, *args = command
        return getattr(self, f"do_{name}")(*args)

    def do_create(
        self,
        stop: bool,
        scope: int = 0,
        text: Text | None = None,
        count: int | None = None,
        priority: int = 0,
        expected: int | None = None,
        as_array: bool = False,
        text_only: bool | None = None,
    ) -> tuple[int, int]:
        """Handle and tokens reused."""
        tokens = None if text is None or count is None else as_argument(text[:count], as_array)
        fields: dict[str, Any] = {}
        if PRIORITIES[priority] is not None:
            fields["custom_priority_callback"] = PRIORITIES[priority]
        cache = self.manager.create_kv_cache(
            SCOPES[scope], tokens, expected_prompt_length=expected, text_only=text_only, **fields
        )
        if stop:
            cache.stop_committing()
        own_text = [position % 5 for position in range(self.top)] if text is None else list(text)
        k = self.caches.index(None) if None in self.caches else len(self.caches)
        if k == len(self.caches):
            self.caches.append(cache)
            self.texts.append(own_text)
        self.caches[k], self.texts[k] = cache, own_text
        return cache.handle, cache.num_committed_tokens

    def do_resume(self, k: int, stream: int | None, optional: tuple[int, ...] | None = None) -> bool:
        where = None if stream is None else self.streams[stream]
        if optional is None:
            return self.caches[k].resume(where)
        return self.caches[k].resume(where, optional_reuse_groups=list(optional))

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
        return self.statistics()

    def statistics(self) -> list[tuple[int, ...]]:
        return [
            (s.total, s.free, s.evictable, s.available, s.unavailable) for s in self.manager.get_storage_statistics()
        ]

    def do_clamp(self, batch_size: int, bound: int) -> int:
        return self.manager.clamp_max_seq_len_for_mem(batch_size, bound)

    def do_dead(self, pick: int) -> None:
        if self.closed:
            self.closed[pick % len(self.closed)].resize(1)

    def do_step(
        self, second_table, chosen, rows, capacities, histories, stream, counts: tuple[int, ...] | None = None
    ) -> tuple[Any, ...]:
        stepper = self.steppers[int(second_table)]
        tokens = None if counts is None else [self.following(k, n) for k, n in zip(chosen, counts, strict=True)]
        ok = stepper.step(
            [self.caches[k] for k in chosen],
            list(rows),
            list(capacities),
            list(histories),
            None if stream is None else self.streams[stream],
            tokens=tokens,
        )
        for k, row, fine in zip(chosen, rows, ok, strict=True):
            if fine:
                stepper.check_row(self.caches[k], row)
        return ok, stepper.last_dirty, stepper.last_event

    # reuse
    def following(self, k: int, count: int) -> list[Token]:
        """The next ``count`` tokens of the cache's text that are not committed yet."""
        committed = self.committed(k)
        return self.texts[k][committed : committed + count]

    def do_retext(self, k: int, position: int, text: Text) -> None:
        """From ``position`` on the cache will read otherwise (a draft was wrong); no call of the manager."""
        self.texts[k][position:] = text[position:]

    def do_commit(self, k: int, count: int, is_end: bool) -> int:
        self.caches[k].commit(self.following(k, count), is_end=is_end)
        return self.committed(k)

    def do_raw(self, k: int, ids: tuple[int, ...], is_end: bool) -> int:
        """Straight to the core, which knows one digest."""
        self.manager._core.commit(self.caches[k].handle, np.array(ids, np.int32), [bytes([9] * 32)], is_end)
        self.texts[k][self.committed(k) - len(ids) : self.committed(k)] = [
            bytes([9] * 32) if token < 0 else token for token in ids
        ]
        return self.committed(k)

    def do_probe(self, scope: int, text: Text, count: int, as_array: bool) -> tuple[int, bytes | None]:
        tokens = as_argument(text[:count], as_array)
        found = self.manager.probe_reuse(SCOPES[scope], tokens)
        return found, self.manager.probe_first_new_block_key(SCOPES[scope], tokens)

    def do_keys(self, k: int) -> tuple[Any, ...]:
        core, handle = self.manager._core, self.caches[k].handle
        ids, digests = core.committed_tokens(handle)
        status = [tuple(entry) for entry in core.reuse_status(handle)]
        return core.block_keys(handle).tolist(), ids.tolist(), digests, tuple(core.match_depths(handle)), status

    def do_plan(self, k: int) -> bool:
        plan = self.caches[k].plan_committed_block_drop()
        if plan is None:
            return False
        self.plans[self.plans.index(None) if None in self.plans else 0] = plan  # the one replaced is discarded
        return True

    def do_drop(self, j: int) -> bool:
        plan, self.plans[j] = self.plans[j], None
        if plan is None:
            return False
        plan.drop()
        return True

    def do_discard(self, j: int) -> bool:
        had, self.plans[j] = self.plans[j] is not None, None
        return had

    def do_uncover(self, scope: tuple[int | None, int | None], path: Text, life_cycle: int) -> None:
        ids, digests = encode_tokens("path", list(path), False)
        self.manager._core.debug_set_coverage(scope, ids, digests, life_cycle, 0)

    def do_clear(self) -> None:
        self.manager.clear_reusable_blocks()

    def forget_buffers(self, k: int) -> None:
        for key in [b for b in self.buffers if b[0] == k]:
            del self.buffers[key]

    def observe(self) -> dict[str, Any]:
        """All that a caller can see, as plain values; straight from the core, for it is asked after every command."""
        core = self.manager._core
        caches = []
        for k, cache in enumerate(self.caches):
            if cache is None:
                continue
            handle = cache.handle
            beams = core.beam_width(handle)
            places = [(g, b) for g in range(self.groups) for b in range(beams)]
            shown = [core.page_indices(handle, g, b).tolist() for g, b in places]
            held = [core.held_page_indices(handle, g, b).tolist() for g, b in places]
            scratch = [core.scratch_desc(handle, g) for g in range(self.groups)] if self.has_scratch else None
            state = (core.status(handle), beams, core.stream(handle), core.scratch_enabled(handle))
            caches.append((k, handle, *core.lengths(handle), *state, shown, held, scratch))
        return {
            "snapshot": self.manager.snapshot(),
            "statistics": core.statistics(),
            "tables": [s.table.tobytes() for s in self.steppers],
            "caches": caches,
            "buffers": {key: b.tolist() for key, b in sorted(self.buffers.items())},
        }

    def finish(self) -> None:
        """Close all: what stays taken is the tree's, and nothing once it is cleared."""
        for cache in self.caches:
            if cache is not None:
                cache.close()
        self.plans.clear()
        self.manager.audit()
        for stats in self.manager.get_storage_statistics():
            assert stats.free + stats.evictable == stats.total
        self.manager.clear_reusable_blocks()
        self.manager.audit()
        snapshot = self.manager.snapshot()
        assert all(g["used"] == [] and g["free"] == g["total"] for g in snapshot["pool_groups"])
        self.manager.shutdown()
