"""Prefix reuse under limited memory: a request trace through the manager, by the protocol of the peers' benchmark.

The protocol, in full at the head of `trace_common.py` in the folder that `KVPOOL_PEERS` names: requests in trace order, one
at a time; look up the prompt without its last token; room for prompt and output, at once or in steps; all of it is computed
and committed; a request stays open until 16 later ones have been opened; without room the oldest is closed early, and when
none is left the request is refused.  No request may match more than an oracle that forgets nothing.  Partial reuse is off,
so that whole blocks compare with that oracle.  "Full alone" is the depth of the tree's walk, which is what the full-attention
layers had; the match falls short of it by what the windows lost.

Division of the memory where layer groups have slots of different sizes (`typical_batch`), from lengths alone: the longest
request that takes at most half of the memory while it is admitted, all of its blocks at once or in steps, and for the rest
requests of the trace's mean lengths that have been computed: all blocks of full attention, and of a window what a request
needs that goes on from the end of the prompt (less the slack) or from the end of the output.

    KVPOOL_PEERS=… python -m benchmarks.reuse_trace --layout gpt-oss-120b --memory 60GiB [--step 8192] [--backend python]
    KVPOOL_PEERS=… python -m benchmarks.reuse_trace --table [--markdown OUT.md]      (a quarter of an hour)

`--help` lists the options of both.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import machine
from kvpool import __version__
from kvpool.errors import NeverFitsError
from kvpool.sim.layer_groups import GroupSize, group_sizes
from kvpool.v2 import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    GpuCacheTierConfig,
    KVCache,
    KVCacheDesc,
    KVCacheManager,
    KVCacheManagerConfig,
)

Ids = npt.NDArray[np.int32]
Rows = list[dict[str, Any]]
ARMS = {"cpp": "v2cpp", "python": "v2py"}
SLACK = 512  # the manager's own default
BARS = [("gpt-oss-120b", 60), ("gpt-oss-120b", 240), ("gpt-oss-120b", 480), ("gemma-3-27b", 60), ("gemma-3-27b", 480)]
"""Layout and GiB of the table."""
PEERS_BEST = {
    ("gpt-oss-120b", 60, 0): "5.83 % (vLLM, r 512)",
    ("gpt-oss-120b", 60, 8192): "5.91 % (vLLM, r 512)",
    ("gpt-oss-120b", 240, 0): "22.06 % (vLLM, r 512)",
    ("gpt-oss-120b", 480, 0): "30.12 % (vLLM, r 512)",
    ("gemma-3-27b", 60, 0): "4.25 % (SGLang)",
    ("gemma-3-27b", 60, 8192): "4.28 % (SGLang)",
    ("gemma-3-27b", 480, 0): "8.35 % (vLLM, r 0)",
}
"""The best setting of vLLM 0.33 and SGLang 0.5.23 on the whole trace, as the peers' README gives it."""


def protocol() -> ModuleType:
    """The peers' `trace_common`."""
    home = os.environ.get("KVPOOL_PEERS")
    if not home:
        sys.exit("KVPOOL_PEERS is not set: it names the folder with the peers' trace_common.py")
    sys.path.insert(0, home)
    import trace_common  # type: ignore[import-not-found]

    module: ModuleType = trace_common
    return module


class Request:
    """What the protocol hands from call to call."""

    __slots__ = ("cache", "done", "full", "prompt", "tokens")

    def __init__(self, prompt: Ids) -> None:
        self.tokens = prompt
        self.prompt = len(prompt)
        self.done = 0
        self.full = 0
        self.cache: KVCache | None = None


class Kvpool:
    """The eight methods of the protocol over `kvpool.v2`."""

    def __init__(self, config: KVCacheManagerConfig, backend: str, step: int, windows: bool) -> None:
        self._manager = KVCacheManager(config, backend=backend, device="virtual")
        self._step = step
        self._windows = windows
        self.name = f"kvpool {__version__} {ARMS[backend]}"
        self.plan: dict[str, Any] = {
            "slots": [desc.num_slots for desc in self._manager.pool_group_descs],
            "groups": [len(layers) for layers in self._manager.layer_grouping],
            "match_policy": config.match_policy,
            "retain": config.retain_window_tails,
        }

    def convert(self, prompt: Ids) -> Ids:
        return np.ascontiguousarray(prompt, np.int32)

    def prepare(self, prompt: Ids) -> Request:
        return Request(prompt)

    def lookup(self, request: Request) -> int:
        prompt = request.tokens
        request.cache = self._manager.create_kv_cache(None, prompt[:-1], expected_prompt_length=len(prompt))
        request.full = request.cache._get_num_reusable_tokens_before_pruning()
        request.done = request.cache.num_committed_tokens
        return request.done

    def probe(self, request: Request) -> dict[str, int]:
        return {"full": request.full} if self._windows else {}

    def extend(self, request: Request, output: list[int]) -> None:
        request.tokens = np.concatenate((request.tokens, np.asarray(output, np.int32)))

    def admit(self, request: Request) -> bool:
        cache, total = request.cache, len(request.tokens)
        assert cache is not None
        try:
            if not (cache.is_active or cache.resume(None)):
                return False
            if not self._step:
                if not cache.resize(total):
                    return False
                cache.commit(request.tokens[request.done : request.prompt])
                cache.commit(request.tokens[request.prompt :])
                return True
            block = cache.tokens_per_block
            while request.done < total:
                done = request.done
                end = (
                    min(done + self._step, request.prompt)
                    if done < request.prompt
                    else min(done - done % block + block, total)
                )
                if not cache.resize(end):
                    return False
                cache.commit(request.tokens[done:end])
                request.done = end
        except NeverFitsError:
            return False
        return True

    def close(self, request: Request) -> None:
        assert request.cache is not None
        request.cache.close()

    drop = close


def layers_of(windows: list[int | None], token_bytes: int, block: int) -> list[AttentionLayerConfig]:
    """One buffer a layer for keys and one for values."""
    page = token_bytes * block // 2
    return [
        AttentionLayerConfig(i, [BufferConfig("key", page), BufferConfig("value", page)], window)
        for i, window in enumerate(windows)
    ]


def make_config(
    layers: list[AttentionLayerConfig], block: int, memory: int, typical: BatchDesc | None, **options: Any
) -> KVCacheManagerConfig:
    """Whole blocks, text only, and a gate that is always open: the protocol itself decides who may come in."""
    return KVCacheManagerConfig(
        block,
        [GpuCacheTierConfig(memory)],
        list(layers),
        typical_step=typical,
        max_util_for_resume=1.0,
        enable_partial_reuse=False,
        text_only=True,
        **options,
    )


def typical_batch(groups: list[GroupSize], memory: int, rows: Rows, step: int, slack: int) -> BatchDesc:
    """What the memory holds when it is full; see the head of the file."""

    def size(capacity: int, history: int) -> int:
        return sum(group.slot_bytes * group.blocks(capacity, history) for group in groups)

    def admission(length: int) -> tuple[int, int]:
        return length, max(0, length - step) if step else 0

    prompt = sum(row["input_length"] for row in rows) // len(rows)
    output = sum(row["output_length"] for row in rows) // len(rows)
    computed = prompt + output, max(0, prompt - slack)
    fits, fails = 1, max(row["input_length"] + row["output_length"] for row in rows) + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if 2 * size(*admission(middle)) <= memory else (fits, middle)
    count = max(1, (memory - size(*admission(fits))) // size(*computed))
    return BatchDesc([KVCacheDesc(*admission(fits)), *[KVCacheDesc(*computed)] * count])


def peer(
    windows: list[int | None], token_bytes: int, memory: int | None, rows: Rows, options: argparse.Namespace
) -> Kvpool:
    """A manager with `memory` bytes; None: with room for everything."""
    layers = layers_of(windows, token_bytes, options.block)
    switches: dict[str, Any] = {"retain_window_tails": not options.no_retain, "window_tail_slack": options.slack}
    switches["match_policy"] = options.match_policy
    groups = group_sizes(make_config(layers, options.block, 2**40, None))
    if memory is None:
        blocks = sum(-(-(row["input_length"] + row["output_length"]) // options.block) for row in rows) + 64
        memory = blocks * sum(group.slot_bytes for group in groups) + 2**32
        typical = BatchDesc([KVCacheDesc(blocks * options.block, 0)])
    else:
        typical = typical_batch(groups, memory, rows, options.step, options.slack)
    config = make_config(layers, options.block, memory, typical, **switches)
    return Kvpool(config, options.backend, options.step, any(window is not None for window in windows))


def table(common: ModuleType, options: argparse.Namespace) -> list[str]:
    """Markdown: the rows of the bars, and unlimited memory against the oracle."""
    rows = common.load(options.trace, options.limit)
    best = common.oracle(rows, options.block)
    prompts = sum(row["input_length"] for row in rows)
    share = 100 * sum(best) / prompts
    head = ("layout", "GiB", "step", "window tails", "slots", "matched", "full alone", "refused", "closed early")
    lines = [
        f"{machine.describe()}",
        "",
        f"kvpool {__version__}, block {options.block}, K {options.k}, {len(rows):,} requests, {prompts:,} prompt tokens.  ",
        f"An oracle that forgets nothing: {sum(best):,} ({share:.2f} %).",
        "",
        "| " + " | ".join((*head, "manager s", "best of others")) + " |",
        "|---" * (len(head) + 2) + "|",
    ]
    for layout, gib in BARS:
        for step in (0, 8192):
            for retain in (True, False):
                case = argparse.Namespace(**{**vars(options), "step": step, "no_retain": not retain})
                kind = common.LAYOUTS[layout]
                ours = peer(kind["windows"], common.token_bytes(layout), gib << 30, rows, case)
                result, _ = common.replay(ours, rows, options.k, best)
                matched, full = result["matched_tokens"], result["hits_by_kind"]["full"]
                lines.append(
                    f"| {layout} | {gib} | {step or 'whole'} | {'kept' if retain else 'as any page'} "
                    f"| {' + '.join(f'{slots:,}' for slots in ours.plan['slots'])} "
                    f"| {matched:,} ({100 * matched / prompts:.2f} %) | {full:,} ({100 * full / prompts:.2f} %) "
                    f"| {result['refused']} | {result['closed_early']} | {result['manager_s']:.1f} "
                    f"| {PEERS_BEST.get((layout, gib, step), '')} |"
                )
                print(lines[-1], flush=True)
    lines += [
        "",
        "| unlimited memory | arm | requests | matched | equal to the oracle, request by request | manager s |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for layout in ("gpt-oss-120b", "gemma-3-27b", "llama-3.1-8b"):
        for backend, limit in (("cpp", None), ("python", 2000)):
            some, most = rows[:limit], best[:limit]
            case = argparse.Namespace(**{**vars(options), "backend": backend, "step": 0, "no_retain": False})
            kind = common.LAYOUTS[layout]
            ours = peer(kind["windows"], common.token_bytes(layout), None, some, case)
            result, matches = common.replay(ours, some, options.k, most)
            lines.append(
                f"| {layout} | {ARMS[backend]} | {len(some):,} | {result['matched_tokens']:,} "
                f"| {'yes' if matches == most else '**no**'} | {result['manager_s']:.1f} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    common = protocol()
    parser = common.arguments(__doc__)
    parser.add_argument("--backend", choices=tuple(ARMS), default="cpp")
    parser.add_argument("--match-policy", choices=("longest", "reference"), default="longest")
    parser.add_argument("--no-retain", action="store_true", help="retain_window_tails=False")
    parser.add_argument("--slack", type=int, default=SLACK, help="window_tail_slack, tokens")
    parser.add_argument("--table", action="store_true", help="the rows of the bars instead of one case")
    parser.add_argument("--markdown", type=Path, help="where the table goes too")
    options = parser.parse_args()
    gc.disable()  # nothing here makes cycles, and the Python backend has millions of records to look through
    if options.table:
        lines = table(common, options)
        if options.markdown:
            options.markdown.write_text("\n".join(lines) + "\n")
        sys.exit("differs from the oracle" if any("**no**" in line for line in lines) else 0)
    kind = common.LAYOUTS[options.layout]

    def make(memory: int | None, rows: Rows) -> Kvpool:
        return peer(kind["windows"], common.token_bytes(options.layout), memory, rows, options)

    common.run(make, options, backend=options.backend)


if __name__ == "__main__":
    main()
