"""``kvpool plan``: what a memory holds, and what other ways to divide it would hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvpool.sim.plan import PlanResult

Help = typer.Option


def plan(
    model: Annotated[str, Help(help="Preset name, Hugging Face id, or the path of a config.json.")] = "gpt-oss-120b",
    memory: Annotated[str, Help(help="KV quota of one rank, without weights.")] = "80GiB",
    max_seq_len: Annotated[int | None, Help(help="Longest sequence. Default: --length, else the model's.")] = None,
    length: Annotated[int | None, Help(help="Length to plan for. Default: --max-seq-len.")] = None,
    max_num_tokens: Annotated[int | None, Help(help="Tokens of one prompt chunk that must always fit too.")] = None,
    tokens_per_block: Annotated[int | None, Help(help="Default: the model's own, mostly 32.")] = None,
    tp: Annotated[int, Help(help="Tensor-parallel ranks; the plan is one rank's.")] = 1,
    dtype: Annotated[str, Help(help="Type of the stored keys and values.")] = "bfloat16",
    json: Annotated[Path | None, Help(help="Write the plan as JSON.")] = None,
) -> None:
    """Show layer groups, pools and bytes per token, and how many requests of one length fit."""
    from kvpool.cli.output import check_writable, write_text
    from kvpool.sim.plan import PlanOptions, make_plan

    check_writable("--json", json)
    result = make_plan(
        PlanOptions(
            model=model,
            memory=memory,
            length=length,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
            tokens_per_block=tokens_per_block,
            tp=tp,
            dtype=dtype,
        )
    )
    _print(result)
    write_text("--json", json, result.model_dump_json(by_alias=True, indent=1) + "\n")


def _print(result: PlanResult) -> None:
    from rich.table import Table

    from kvpool.cli.output import console
    from kvpool.sim.sizes import format_size

    settings, out = result.settings, console()
    out.print(
        f"{settings.model}: {format_size(settings.memory)} for requests of {settings.length:,} tokens "
        f"(tokens per block {settings.tokens_per_block}, tp {settings.tp}, {settings.dtype})"
    )
    out.print(f"{result.bytes_per_token:,} bytes per token, {format_size(result.request_bytes)} per request")
    groups = Table("layer group", "kind", "window", "layers", "slot", "slots per request")
    for group in result.layer_groups:
        window = "-" if group.window is None else f"{group.window:,}"
        slot, count = format_size(group.slot_bytes), str(group.slots_per_request)
        groups.add_row(str(group.group), group.kind, window, str(len(group.layers)), slot, count)
    out.print(groups)
    pools = Table("pool group", "layer groups", "slots", "slot", "pool", "slots per request")
    for pool in result.pools:
        members = ", ".join(map(str, pool.layer_groups))
        slot, size, count = format_size(pool.slot_bytes), format_size(pool.pool_bytes), str(pool.slots_per_request)
        pools.add_row(str(pool.pool_group), members, f"{pool.slots:,}", slot, size, count)
    if result.pools:
        out.print(pools)
    fits = Table("split", "slots per layer group", "requests that fit")
    ours = ", ".join(f"{pool.slots:,} (pool group {pool.pool_group})" for pool in result.pools)
    fits.add_row("kvpool", ours, f"{result.fits:,}")
    for name, split in (("equal", result.splits.equal), ("by maximum length", result.splits.max_length)):
        fits.add_row(name, ", ".join(f"{slots:,}" for slots in split.slots), f"{split.fits:,}")
    fits.add_row("ideal", "", f"{result.ideal:,}")
    out.print(fits)
    if result.longest_fitting is not None:
        out.print(
            f"no request of {settings.length:,} tokens fits; the longest that does has {result.longest_fitting:,}"
        )
