"""How long one sequence may get beside others of one token."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool._py.core.math import div_up, largest_that_fits
from kvpool._py.storage.demand import pool_group_demand, requests_demand
from kvpool._py.storage.layout import StorageLayout


def clamp_max_seq_len(
    layout: StorageLayout, slot_counts: Sequence[int], batch_size: int, token_num_upper_bound: int
) -> int:
    """Longest whole-block sequence (at most the bound) that fits beside ``batch_size - 1`` sequences of one token.

    0 when not even one block does.  A request takes one slot per state life cycle, whatever its length.  Lengths are
    taken as done (history = capacity), so scratch and the resume limit play no part.
    """
    tpb = layout.tokens_per_block
    one_token = pool_group_demand(layout, requests_demand(layout, [(1, 1)], 0, None))
    room = [count - max(0, batch_size - 1) * n for count, n in zip(slot_counts, one_token, strict=True)]

    def fits(num_blocks: int) -> bool:
        length = num_blocks * tpb
        demand = pool_group_demand(layout, requests_demand(layout, [(length, length)], 0, None))
        return all(n <= free for n, free in zip(demand, room, strict=True))

    blocks = largest_that_fits(div_up(max(0, token_num_upper_bound), tpb), fits)
    return max(0, min(blocks * tpb, token_num_upper_bound))
