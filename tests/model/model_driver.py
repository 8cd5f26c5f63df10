"""Runs the commands of ``tests.support.commands`` on the oracle's model; an answer of None means "the rules leave it open"."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from tests.support import oracle
from tests.support.commands import TABLE_BLOCKS


def model_of(manager: Any) -> oracle.Model:
    """A model with the life cycles and slot counts of a manager, derived from its configuration alone."""
    config = manager.init_config
    tpb = manager.tokens_per_block
    lcs = []
    for group in manager.layer_grouping:
        layers = [layer for layer in config.layers if layer.layer_id in set(group)]
        sizes: dict[int, list[int]] = {}  # expanded size → layer of each buffer
        for layer in layers:
            for buffer in layer.buffers:
                own = buffer.tokens_per_block_override or tpb
                sizes.setdefault(buffer.size * (tpb // own), []).append(layer.layer_id)
        fraction = max(
            Fraction(members.count(layer.layer_id), len(members)) for members in sizes.values() for layer in layers
        )
        first = layers[0]
        if hasattr(first, "window_size"):
            sinks = -(-(first.num_sink_tokens or 0) // tpb)
            lcs.append(oracle.LC(first.window_size, sinks, False, fraction))
        else:
            lcs.append(oracle.LC(is_ssm=True, fraction=fraction))
    return oracle.Model(
        lcs,
        list(manager.get_life_cycle_pool_group_indices()),
        [g.num_slots for g in manager.pool_group_descs],
        tpb,
        config.max_util_for_resume,
        None if config.swa_scratch_reuse is None else config.swa_scratch_reuse.max_rewind_len,
        keep_stale=not config.commit_min_snapshot,
    )


class ModelDriver:
    def __init__(self, model: oracle.Model) -> None:
        self.model = model
        self.caches: list[oracle.Cache | None] = []

    def run(self, command: tuple[Any, ...], answer: tuple[Any, ...]) -> tuple[Any, ...] | None:
        name, *args = command
        method = getattr(self, f"do_{name}", None)
        if method is None:
            return None
        if name == "create":
            return method(*args, answer[1][0])
        return oracle.answer_of(method, *args)

    def active(self, k: int) -> oracle.Cache:
        cache = self.caches[k]
        assert cache is not None
        if cache.status != oracle.ACTIVE:
            raise oracle.Misuse("LogicError")
        return cache

    def do_create(self, stop: bool, handle: int) -> tuple[Any, ...]:
        self.model.create(handle)
        cache = self.model.caches[handle]
        cache.commit_allowed = not stop
        if None in self.caches:
            self.caches[self.caches.index(None)] = cache
        else:
            self.caches.append(cache)
        return ("ok", handle)

    def do_resume(self, k: int, stream: int | None) -> bool:
        if self.caches[k].status != oracle.SUSPENDED:
            raise oracle.Misuse("LogicError")
        return self.model.resume(self.caches[k])

    def do_suspend(self, k: int) -> None:
        self.model.suspend(self.active(k))

    def do_stop(self, k: int) -> None:
        self.model.stop_committing(self.caches[k])

    def do_close(self, k: int) -> None:
        self.model.close(self.caches[k])
        self.caches[k] = None

    def do_resize(self, k: int, capacity: int | None, history: int | None) -> bool:
        if (capacity is not None and capacity < 0) or (history is not None and history < 0):
            raise oracle.Misuse("ArgumentError")
        cache = self.active(k)
        self.check(cache, capacity, history)
        return self.model.resize(cache, capacity, history)

    def check(self, cache: oracle.Cache, capacity: int | None, history: int | None) -> None:
        new_history = cache.history if history is None else history
        new_capacity = cache.capacity if capacity is None else capacity
        if new_history < cache.history or new_capacity < new_history:
            raise oracle.Misuse("ArgumentError")

    def do_history(self, k: int, history: int) -> None:
        if not self.do_resize(k, None, history):
            raise oracle.Shortage

    def do_capacity(self, k: int, capacity: int) -> None:
        if self.caches[k].scratch_on:
            raise oracle.Misuse("ArgumentError")
        if not self.do_resize(k, capacity, None):
            raise oracle.Shortage

    def do_beam(self, k: int, width: int) -> None:
        if width < 1:
            raise oracle.Misuse("ArgumentError")
        cache = self.active(k)
        try:
            self.model.set_beams(cache, width)
        except oracle.Misuse:
            raise oracle.Misuse("LogicError") from None

    def do_scratch(self, k: int, value: bool) -> None:
        cache = self.caches[k]
        if not value:
            if any(cache.scratch.values()):
                raise oracle.Misuse("any")
            cache.scratch_on = False
            return
        if self.model.rewind is None:
            raise oracle.Misuse("any")
        if not cache.scratch_on:
            cache.scratch_on = True
            needs = any(
                self.model.wanted(cache, lc, cache.capacity, cache.history)[1] for lc in range(len(self.model.lcs))
            )
            if needs:
                cache.scratch_on = False
                raise oracle.Misuse("any")

    def do_step(self, second, chosen, rows, capacities, histories, stream) -> list[bool]:
        caches = [self.caches[k] for k in chosen]
        for cache, capacity, history in zip(caches, capacities, histories, strict=True):
            if cache.status != oracle.ACTIVE or cache.beams != 1:
                raise oracle.Misuse("any")
            if capacity < 0 or history < 0 or oracle.blocks(capacity, self.model.tpb) > TABLE_BLOCKS:
                raise oracle.Misuse("any")
            try:
                self.check(cache, capacity, history)
            except oracle.Misuse:
                raise oracle.Misuse("any") from None
        self.never(caches, capacities, histories)
        return [
            self.model.resize(cache, capacity, history)
            for cache, capacity, history in zip(caches, capacities, histories, strict=True)
        ]

    def never(self, caches, capacities, histories) -> None:
        """Would any one never fit, alone in the pools?"""
        for cache, capacity, history in zip(caches, capacities, histories, strict=True):
            totals = [0] * len(self.model.totals)
            for lc, rule in enumerate(self.model.lcs):
                if rule.is_ssm:
                    totals[self.model.group_of[lc]] += 1
                    continue
                own, shared = self.model.wanted(cache, lc, capacity, history)
                totals[self.model.group_of[lc]] += len(own) + oracle.ceil_fraction(len(shared) * rule.fraction)
            if any(n > t for n, t in zip(totals, self.model.totals, strict=True)):
                raise oracle.Never
