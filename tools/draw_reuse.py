"""Draws docs/prefix_reuse.svg: where a reused prefix may end when a layer has a sliding window.

Run it after a change: ``python tools/draw_reuse.py`` (with kvpool importable). Which ends are legal is worked out with the
life cycle's own stale range, so the picture can not say anything else than the code.
"""

from __future__ import annotations

from pathlib import Path

from kvpool.v2 import AttnLifeCycle

FILE = Path(__file__).resolve().parent.parent / "docs/prefix_reuse.svg"

BLOCK, WINDOW, BLOCKS = 32, 64, 10
KEPT = {2, 3, 8, 9}  # blocks whose window page is still cached
SHARED = {"A": 320, "B": 272}  # tokens that each new prompt has in common with the cached sequence

LEFT, TOP, CELL, GAP = 168, 46, 58, 4
INK, FAINT, OWN, PAGE, NEEDED = "#24292f", "#8c959f", "#f0b429", "#a8d5ba", "#1a7f37"


def needed(end: int, window: int | None) -> set[int]:
    """The blocks that the tokens from ``end`` on read."""
    stale = AttnLifeCycle.make(window, None, BLOCK).get_stale_range(end, BLOCK)
    return set(range(-(-end // BLOCK))) - set(range(stale.beg, stale.end))


def ends_legally(end: int) -> bool:
    """Whether the windowed layer has all of them; the full layer does."""
    return needed(end, WINDOW) <= KEPT


def longest(shared: int) -> int:
    return max((end for end in range(1, shared + 1) if ends_legally(end)), default=0)


def x_of(token: float) -> float:
    return LEFT + token / BLOCK * CELL


def text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = INK, size: int = 14) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" {more}/>'


def pages(y: float, label: str, kept: set[int], window: int | None) -> list[str]:
    """A row of pages, those that are gone as outlines; thick what prompt B needs of it."""
    thick = needed(longest(SHARED["B"]), window)
    lines = [text(LEFT - 14, y + 20, label, anchor="end")]
    for block in range(BLOCKS):
        edge = f'stroke="{NEEDED}" stroke-width="2.5"' if block in thick else ""
        if block not in kept:
            edge = f'stroke="{FAINT}" stroke-dasharray="4 3"'
        lines.append(box(x_of(block * BLOCK) + GAP / 2, y, CELL - GAP, 30, PAGE if block in kept else "none", edge))
    return lines


def prompt(y: float, name: str) -> list[str]:
    """A new prompt: what it reuses, what it knows but must compute, what is its own."""
    shared, end = SHARED[name], longest(SHARED[name])
    stop = BLOCKS * BLOCK + 24
    lines = [text(LEFT - 14, y + 16, f"new prompt {name}", anchor="end")]
    lines.append(box(x_of(0), y, x_of(end) - x_of(0), 22, NEEDED))
    if shared > end:
        lines.append(box(x_of(end), y, x_of(shared) - x_of(end), 22, "#d8dee4"))
        middle = (x_of(end) + x_of(shared)) / 2
        lines.append(text(middle, y + 16, f"{shared - end} equal tokens, computed again", anchor="middle", size=13))
    lines.append(box(x_of(shared), y, x_of(stop) - x_of(shared), 22, OWN))
    lines.append(text(x_of(end / 2), y + 16, f"reuses {end}", anchor="middle", colour="#ffffff", size=13))
    return lines


def draw() -> str:
    width, height = x_of(BLOCKS * BLOCK + 24) + 16, 296
    size = f'viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}"'
    font = 'font-family="Helvetica, Arial, sans-serif"'
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img" aria-labelledby="title">',
        '<title id="title">Where a reused prefix may end</title>',
        box(0, 0, width, height, "#ffffff"),
        text(LEFT - 14, TOP - 16, "tokens", anchor="end", colour=FAINT),
    ]
    for end in range(0, BLOCKS * BLOCK + 1, BLOCK):
        body.append(text(x_of(end), TOP - 16, str(end), anchor="middle", colour=FAINT, size=13))
        body.append(f'<path d="M{x_of(end):g} {TOP - 8} V{TOP + 128}" stroke="#d8dee4"/>')
    body += pages(TOP, "full attention", set(range(BLOCKS)), None)
    body += pages(TOP + 44, f"window of {WINDOW}", KEPT, WINDOW)
    body.append(text(LEFT - 14, TOP + 110, "may end here", anchor="end"))
    for end in range(BLOCK, BLOCKS * BLOCK + 1, BLOCK):
        mark, colour = ("✓", NEEDED) if ends_legally(end) else ("✗", FAINT)
        body.append(box(x_of(end) - 11, TOP + 92, 22, 24, "#ffffff"))
        body.append(text(x_of(end), TOP + 111, mark, anchor="middle", colour=colour, size=18))
    body += prompt(TOP + 148, "A")
    body += prompt(TOP + 184, "B")
    body.append(
        text(
            LEFT,
            TOP + 232,
            "green: page in the cache, thick where B goes on from it · dashed: evicted · yellow: other tokens",
            colour=FAINT,
            size=13,
        )
    )
    return "\n".join([*body, "</svg>"]) + "\n"


def main() -> None:
    FILE.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
