"""An oracle of prefix reuse that shares no code with the product.

Three parts. :class:`Tree` reads the tree from a snapshot and says, by trying every end point, what a query must match;
:func:`check_structure` checks tree, queues and owners against each other; :class:`Ledger` and :class:`Scribe` know which
tokens were committed and what bytes each slot must hold. A record names the whole prefix (scope, every token up to its
own), so a page that serves another prefix is always found out.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.v2 import AttentionLayerConfig, KVCacheManagerConfig, ReusePolicy, ReuseScope
from tests.support import oracle
from tests.support.commands import Driver
from tests.support.texts import SCOPES, Token

MASK = (1 << 64) - 1


# rules ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rule:
    """One life cycle as the oracle sees it."""

    window: int | None
    sink_blocks: int
    is_ssm: bool
    optional: bool

    @property
    def required(self) -> bool:
        return self.is_ssm or not self.optional


@dataclass
class Rules:
    """What of a configuration decides matches."""

    tpb: int
    life_cycles: list[Rule]
    partial: bool
    backoff: int
    policy: str
    retain: bool = True
    slack: int = 512
    interval: int = 0

    @staticmethod
    def of(config: KVCacheManagerConfig) -> Rules:
        """The life cycles are derived here once more, in order of first mention."""
        found: dict[tuple[Any, ...], Rule] = {}
        for layer in config.layers:
            if isinstance(layer, AttentionLayerConfig):
                sinks = oracle.blocks(layer.num_sink_tokens or 0, config.tokens_per_block)
                optional = layer.reuse_policy == ReusePolicy.OPTIONAL
                rule = Rule(layer.sliding_window_size, sinks, False, optional)
            else:
                rule = Rule(None, 0, True, False)
            found[rule.window, rule.sink_blocks, rule.is_ssm, rule.optional] = rule
        windows = [rule.window for rule in found.values() if rule.window is not None and rule.required]
        interval = config.window_tail_interval
        if interval is None:
            interval = 16 * max(windows, default=0)
        return Rules(
            config.tokens_per_block,
            list(found.values()),
            config.enable_partial_reuse,
            config.reuse_match_backoff,
            config.match_policy,
            config.retain_window_tails,
            config.window_tail_slack,
            oracle.blocks(interval, config.tokens_per_block) * config.tokens_per_block,
        )

    def live(self, rule: Rule, length: int) -> Iterator[int]:
        """Ordinals of the blocks that a sequence of ``length`` tokens still needs."""
        gone = self.gone(rule, length)
        return (ordinal for ordinal in range(oracle.blocks(length, self.tpb)) if ordinal not in gone)

    def gone(self, rule: Rule, length: int) -> set[int]:
        key = (rule.window, rule.sink_blocks, length)
        if key not in self._gone:
            self._gone[key] = oracle.stale(length, self.tpb, rule.window, rule.sink_blocks)
        return self._gone[key]

    _gone: dict[Any, set[int]] = field(default_factory=dict, repr=False)


# the tree of a snapshot ----------------------------------------------------------------------------------------
@dataclass
class Page:
    slot: int
    coverage: int
    refs: int
    priority: int
    plans: int


@dataclass
class Node:
    scope: tuple[int | None, int | None]
    depth: int  # block ordinal
    tokens: tuple[Token, ...]
    marks: int
    pages: list[Page | None]
    tails: list[int]
    parent: Node | None
    children: list[Node] = field(default_factory=list)

    def path(self) -> list[Node]:
        """From the first block to this one."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def coverage(self, life_cycle: int) -> int:
        page = self.pages[life_cycle]
        return 0 if page is None else page.coverage


def token_order(token: Token) -> tuple[int, Token]:
    return (int(isinstance(token, bytes)), token)


def order(tokens: Sequence[Token]) -> list[tuple[int, Token]]:
    return [token_order(token) for token in tokens]


def common(a: Sequence[Token], b: Sequence[Token]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


class Tree:
    """What ``snapshot()["tree"]`` says."""

    def __init__(self, dump: Iterable[Any], rules: Rules) -> None:
        self.rules = rules
        self.nodes: list[Node] = []
        self.tops: dict[tuple[int | None, int | None], list[Node]] = {}
        stack: list[Node] = []
        for scope, depth, tokens, marks, pages, tails in dump:
            scope = tuple(scope)
            self.tops.setdefault(scope, [])
            if depth < 0:
                continue  # a root
            plain = tuple(bytes.fromhex(token) if isinstance(token, str) else token for token in tokens)
            del stack[depth:]
            parent = stack[-1] if stack else None
            node = Node(
                scope, depth, plain, marks, [None if p is None else Page(*p) for p in pages], list(tails), parent
            )
            (self.tops[scope] if parent is None else parent.children).append(node)
            stack.append(node)
            self.nodes.append(node)

    def children(self, scope: tuple[int | None, int | None], parent: Node | None) -> list[Node]:
        return self.tops.get(scope, []) if parent is None else parent.children

    def walk(self, scope: tuple[int | None, int | None], query: Sequence[Token]) -> tuple[list[Node], int]:
        """The full blocks that match, and how many tokens match in all ("divergence")."""
        tpb = self.rules.tpb
        chain: list[Node] = []
        parent = None
        while True:
            chunk = tuple(query[len(chain) * tpb : (len(chain) + 1) * tpb])
            equal = [c for c in self.children(scope, parent) if len(chunk) == tpb and c.tokens == chunk]
            if not equal:
                break
            assert len(equal) == 1, "two equal siblings"
            parent = equal[0]
            chain.append(parent)
        best = 0
        if chunk:
            for child in self.children(scope, parent):
                shared = common(child.tokens, chunk)
                if self.rules.partial or (len(chunk) < tpb and child.tokens == chunk):
                    best = max(best, shared)
        return chain, len(chain) * tpb + best

    # legality: every live block of every required group is covered
    def legal(self, chain: Sequence[Node], last: Node, m: int, *, ssm: bool) -> bool:
        """May a cache start after the chain's full blocks and ``m`` tokens of ``last``?"""
        end = len(chain) * self.rules.tpb + m
        nodes = [*chain, last]
        for index, rule in enumerate(self.rules.life_cycles):
            if rule.is_ssm:
                if ssm and last.coverage(index) != m:
                    return False
            elif not rule.optional:
                for ordinal in self.rules.live(rule, end):
                    wanted = m if ordinal == len(chain) else self.rules.tpb
                    if nodes[ordinal].coverage(index) < wanted:
                        return False
        return True

    def longest(self, scope: tuple[int | None, int | None], query: Sequence[Token], *, ssm: bool = True) -> int:
        """The longest legal end point, every one tried."""
        tpb, backoff = self.rules.tpb, self.rules.backoff
        chain, divergence = self.walk(scope, query)
        for i in range(len(chain), -1, -1):
            chunk = tuple(query[i * tpb : (i + 1) * tpb])
            best = 0
            for child in self.children(scope, chain[i - 1] if i else None):
                shared = common(child.tokens, chunk)
                on_chain = i < len(chain) and child is chain[i]
                exact = len(chunk) < tpb and child.tokens == chunk
                limit = min(tpb, divergence - backoff - i * tpb) if on_chain else shared - backoff
                for m in range(min(shared, limit), best, -1):
                    if not (self.rules.partial or self.stands_alone(child, m, limit, on_chain or exact)):
                        continue
                    if self.legal(chain[:i], child, m, ssm=ssm):
                        best = m
                        break
            if best:
                return i * tpb + best
        return 0

    def stands_alone(self, child: Node, m: int, limit: int, allowed: bool) -> bool:
        """Without partial reuse: may the match end after ``m`` tokens of this block?"""
        if not allowed:
            return False
        return m in (self.rules.tpb, len(child.tokens), limit) or any(
            page is not None and page.coverage == m for page in child.pages
        )

    def reference(self, scope: tuple[int | None, int | None], query: Sequence[Token], *, ssm: bool = True) -> int:
        """The reference system's way: the nearest text, back-off, then shorten until legal."""
        tpb = self.rules.tpb
        chain, _ = self.walk(scope, query)
        found = [(node, tpb) for node in chain]
        chunk = tuple(query[len(chain) * tpb : (len(chain) + 1) * tpb])
        child = self.nearest(self.children(scope, chain[-1] if chain else None), chunk)
        if child is not None:
            found.append((child, common(child.tokens, chunk)))
        total = max(0, sum(n for _, n in found) - self.rules.backoff)
        found = [(node, min(tpb, total - i * tpb)) for i, (node, _) in enumerate(found) if i * tpb < total]
        while True:
            cut = self.prune_once(found, ssm)
            if cut is None:
                return sum(n for _, n in found)
            found = cut

    def nearest(self, children: list[Node], chunk: tuple[Token, ...]) -> Node | None:
        """The child with most of the text in common; then the one before the query's place in order, then the near one."""
        if not chunk:
            return None
        if not self.rules.partial:
            return next((c for c in children if len(chunk) < self.rules.tpb and c.tokens == chunk), None)
        place = bisect.bisect_left([order(c.tokens) for c in children], order(chunk))
        sides = [*children[:place][::-1][:1], *children[place:][:1]]
        best = max(sides, key=lambda c: common(c.tokens, chunk), default=None)
        return best if best is not None and common(best.tokens, chunk) else None

    def prune_once(self, found: list[tuple[Node, int]], ssm: bool) -> list[tuple[Node, int]] | None:
        """The match after one cut; None when it is legal."""
        for index, rule in enumerate(self.rules.life_cycles):
            if rule.is_ssm and ssm and found:
                ends = [i for i, (node, n) in enumerate(found) if 0 < node.coverage(index) <= n]
                if not ends:
                    return []
                i = ends[-1]
                if (i, found[i][0].coverage(index)) != (len(found) - 1, found[-1][1]):
                    return [*found[:i], (found[i][0], found[i][0].coverage(index))]
        end = sum(n for _, n in found)
        for index, rule in enumerate(self.rules.life_cycles):
            if rule.is_ssm or rule.optional:
                continue
            for i in self.rules.live(rule, end):
                node, n = found[i]
                covered = node.coverage(index)
                if covered < n:
                    return [*found[:i], (node, covered)] if covered else found[:i]
        return None

    def expected(self, scope: tuple[int | None, int | None], query: Sequence[Token]) -> tuple[int, int, int]:
        """(reused, hybrid, divergence)"""
        search = self.reference if self.rules.policy == "reference" else self.longest
        _, divergence = self.walk(scope, query)
        reused, hybrid = search(scope, query), search(scope, query, ssm=False)
        assert reused <= hybrid <= divergence <= len(query)
        if self.rules.policy == "longest":
            assert self.reference(scope, query) <= reused, "shorter than the reference's match"
        return reused, hybrid, divergence


# one snapshot in itself ----------------------------------------------------------------------------------------
def check_structure(snapshot: dict[str, Any], rules: Rules, group_of: Sequence[int], statistics: Any) -> None:
    """Tree, queues, owners and free slots agree (I1 to I3, I7, I8 of the specification)."""
    tree = Tree(snapshot["tree"], rules)
    for scope, tops in tree.tops.items():
        check_siblings(tops, rules)
        assert all(node.scope == scope for node in tops)
    for node in tree.nodes:
        check_siblings(node.children, rules)
        assert len(node.tokens) == rules.tpb or not node.children, "a partial block has children"
    owners = owner_counts(snapshot, rules, group_of)
    seen: set[tuple[int, int]] = set()
    cached: list[dict[int, tuple[int, int]]] = [{} for _ in statistics]
    tails = expected_tails(tree)
    for number, node in enumerate(tree.nodes):
        for index, page in enumerate(node.pages):
            if page is None:
                continue
            key = (group_of[index], page.slot)
            assert key not in seen, f"slot {key} serves two blocks"
            seen.add(key)
            assert 0 < page.coverage <= len(node.tokens)
            assert page.refs == owners[key], f"slot {key} has {owners[key]} owners, not {page.refs}"
            if not page.refs:
                cached[group_of[index]][page.slot] = (page.priority, queue_class(rules, index, node))
        if tails is not None:
            assert node.tails == tails[number], f"tails of node {number}: {node.tails}, not {tails[number]}"
    for group, (queue, stats) in enumerate(zip(snapshot["queues"], statistics, strict=True)):
        total, free, evictable = stats[:3]
        assert [entry[:2] for entry in queue] == sorted(entry[:2] for entry in queue), "victims out of order"
        assert {slot: (priority, kind) for priority, kind, slot in queue} == cached[group], f"queue of group {group}"
        held = {slot for g, slot in owners if g == group}
        assert evictable == len(queue)
        assert free + evictable + len(held) == total, f"group {group}: free + cached + held is not total"
        assert len(snapshot["pool_groups"][group]["used"]) == total - free


def check_siblings(nodes: Sequence[Node], rules: Rules) -> None:
    for left, right in itertools.pairwise(nodes):
        assert order(left.tokens) < order(right.tokens), "children out of order"
        assert right.tokens[: len(left.tokens)] != left.tokens, "a block is a prefix of its sibling"
    for node in nodes:
        assert 0 < len(node.tokens) <= rules.tpb


def owner_counts(snapshot: dict[str, Any], rules: Rules, group_of: Sequence[int]) -> collections.Counter[Any]:
    """How many caches own each (pool group, slot)."""
    owners: collections.Counter[Any] = collections.Counter()
    states = [i for i, rule in enumerate(rules.life_cycles) if rule.is_ssm]
    for cache in snapshot["caches"]:
        for index, beams in enumerate(cache["slots"]):
            owners.update((group_of[index], slot) for beam in beams for slot in beam if slot >= 0)
        for index, slots in enumerate(cache["scratch"]):
            owners.update((group_of[index], slot) for slot in slots)
        for index, slots in zip(states, cache["ssm"], strict=True):
            owners.update((group_of[index], slot) for slot in slots if slot >= 0)
        owners.update((group_of[i], slot) for i, slot in zip(states, cache["ssm_source"], strict=True) if slot >= 0)
    return +owners


def queue_class(rules: Rules, index: int, node: Node) -> int:
    """0 goes first: window pages that nobody is likely to need."""
    rule = rules.life_cycles[index]
    window_only = rule.window is not None and (rule.optional or node.depth >= rule.sink_blocks)
    if not rules.retain or not window_only or node.tails[index]:
        return 1
    if not rules.interval or node.depth < rule.sink_blocks:
        return 0
    point = (node.depth + 1) * rules.tpb
    point += -point % rules.interval  # the first grid point that a sequence with this block can stand at
    return int(node.depth not in rules.gone(rule, point))


MARK_BITS: dict[str, int] = {"sequence": 1, "prompt": 2, "fork": 4}


def expected_tails(tree: Tree) -> list[list[int]] | None:
    """Per node and life cycle: how many marks need its page; and FORK exactly where a path forks."""
    rules = tree.rules
    index_of = {id(node): i for i, node in enumerate(tree.nodes)}
    counts = [[0] * len(rules.life_cycles) for _ in tree.nodes]
    for node in tree.nodes:
        if rules.retain:
            assert bool(node.marks & MARK_BITS["fork"]) == (len(node.children) > 1), "FORK where no path forks"
        end = node.depth * rules.tpb + len(node.tokens)
        path = node.path()
        for name, bit in MARK_BITS.items():
            if not node.marks & bit:
                continue
            start = max(0, end - rules.slack) if name == "prompt" else end
            for index, rule in enumerate(rules.life_cycles):
                if rule.is_ssm or rule.window is None:
                    continue
                gone = rules.gone(rule, start)
                first = max([rule.sink_blocks, *(o + 1 for o in gone)])
                for ordinal in range(first, node.depth + 1):
                    counts[index_of[id(path[ordinal])]][index] += 1
    return counts


# what was committed --------------------------------------------------------------------------------------------
def mix(value: int, token: Token) -> int:
    word = (
        int.from_bytes(token[:8], "little") ^ int.from_bytes(token[-8:], "little")
        if isinstance(token, bytes)
        else token
    )
    value = ((value ^ (word + 1)) * 0x9E3779B97F4A7C15) & MASK
    return value ^ (value >> 29)


def scope_seed(scope: ReuseScope | tuple[int | None, int | None]) -> int:
    value = 1
    for part in scope:
        value = mix(value, 2**32 if part is None else part)
    return value


class Chains:
    """Names of prefixes: ``chain(scope, tokens)[n]`` stands for the first ``n`` tokens in that scope."""

    def __init__(self) -> None:
        self._known: dict[Any, list[int]] = {}

    def chain(self, scope: Any, tokens: Sequence[Token]) -> list[int]:
        key = (tuple(scope), tuple(tokens))
        found = self._known.get(key)
        if found is None:
            if len(self._known) > 400:
                self._known.clear()
            found = self.extend(scope_seed(scope), key[1])
            self._known[key] = found
        return found

    def extend(self, value: int, tokens: Sequence[Token]) -> list[int]:
        values = [value]
        for token in tokens:
            value = mix(value, token)
            values.append(value)
        return values


class Ledger:
    """Everything ever committed, and by whom; what a match may reach at most."""

    def __init__(self, chains: Chains) -> None:
        self.chains = chains
        self.known: set[int] = set()

    def commit(self, scope: Any, tokens: Sequence[Token], before: int) -> None:
        self.known.update(self.chains.chain(scope, tokens)[before + 1 :])

    def reach(self, scope: Any, query: Sequence[Token]) -> int:
        """Tokens of ``query`` that somebody has committed in that scope."""
        n = 0
        for value in self.chains.chain(scope, query)[1:]:
            if value not in self.known:
                break
            n += 1
        return n


class ReuseWatch:
    """Follows one driver's commands and judges every match, probe and snapshot."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.rules = Rules.of(driver.manager.init_config)
        self.group_of = list(driver.manager.get_life_cycle_pool_group_indices())
        self.chains = Chains()
        self.ledger = Ledger(self.chains)
        self.scopes: dict[int, Any] = {}
        self.committed: dict[int, int] = {}
        self.hits = 0
        self.partial_hits = 0
        self.longer = 0
        self.evictions = 0
        self._before: dict[str, Any] | None = None

    def before(self, snapshot: dict[str, Any] | None) -> None:
        """The state that the next command meets."""
        self._before = snapshot

    def after(
        self, command: tuple[Any, ...], answer: tuple[Any, ...], seen: dict[str, Any], *, discarded: bool = False
    ) -> None:
        """``discarded``: the command may also have carried out a plan whose handle is gone."""
        name = command[0]
        if answer[0] == "ok" and name == "create" and len(command) > 3:
            self.created(command, answer[1], seen["snapshot"])
        elif answer[0] == "ok" and name == "probe":
            _, scope, text, count, _ = command
            want = self.judge(SCOPES[scope], text[:count])[0]
            assert answer[1][0] == want, f"probe says {answer[1][0]}, every end point tried says {want}"
        elif answer[0] == "ok" and name == "uncover" and self.rules.policy == "longest":
            self.uncovered(command, seen["snapshot"])
        elif name in ("close", "stop") and self.rules.policy == "longest" and self.rules.partial and not discarded:
            self.kept(seen["snapshot"])
        self.commits(seen)
        if seen["snapshot"] != self._before:
            check_structure(seen["snapshot"], self.rules, self.group_of, seen["statistics"])
            self.count_evictions("" if discarded else name, seen)

    def judge(self, scope: Any, query: Sequence[Token]) -> tuple[int, int, int]:
        assert self._before is not None
        want = Tree(self._before["tree"], self.rules).expected(tuple(scope), query)
        reach = self.ledger.reach(scope, query)
        assert want[2] <= reach, f"the tree matches {want[2]} tokens, but only {reach} were ever committed"
        return want

    def created(self, command: tuple[Any, ...], answer: tuple[int, int], snapshot: dict[str, Any]) -> None:
        _, _, scope, text, count, *_ = command
        handle, reused = answer
        cache = next(c for c in snapshot["caches"] if c["handle"] == handle)
        self.scopes[handle] = SCOPES[scope]
        self.committed[handle] = reused
        if count is None:
            assert reused == 0
            return
        want = self.judge(SCOPES[scope], text[:count])
        got = (reused, cache["match"][1], cache["match"][0])
        assert got == want, f"(reused, hybrid, divergence) = {got}, every end point tried says {want}"
        assert cache["committed"] == cache["history"] == cache["capacity"] == reused
        self.check_adopted(cache, snapshot, SCOPES[scope], text[:reused], stopped=command[1])
        self.hits += reused > 0
        self.partial_hits += reused % self.rules.tpb > 0

    def check_adopted(self, cache: Any, snapshot: Any, scope: Any, tokens: Sequence[Token], *, stopped: bool) -> None:
        """Every live block of every required group has a page, no stale one has, and it is a page of that very prefix."""
        holders: dict[tuple[int, int], tuple[Node, Page]] = {}
        tree = Tree(snapshot["tree"], self.rules)
        for node in tree.nodes:
            for index, page in enumerate(node.pages):
                if page is not None:
                    holders[self.group_of[index], page.slot] = (node, page)
        tpb = self.rules.tpb
        for index, rule in enumerate(self.rules.life_cycles):
            if rule.is_ssm:
                continue
            live = set(self.rules.live(rule, len(tokens)))
            for ordinal, slot in enumerate(cache["slots"][index][0]):
                if slot < 0:
                    assert ordinal not in live or rule.optional, f"group {index}: block {ordinal} is live, no page"
                    continue
                assert ordinal in live, f"group {index}: block {ordinal} is stale, but owned"
                node, page = holders[self.group_of[index], slot]
                part = tuple(tokens[ordinal * tpb : (ordinal + 1) * tpb])
                assert tuple(node.scope) == tuple(scope)
                assert page.coverage >= len(part) or rule.optional
                assert node.depth == ordinal
                assert node.tokens[: len(part)] == part
                before = [token for above in node.path()[:-1] for token in above.tokens]
                assert before == list(tokens[: ordinal * tpb])

    def uncovered(self, command: tuple[Any, ...], snapshot: Any) -> None:
        """One page went, and whatever is useless without it: nothing else that could be matched is lost."""
        _, scope, path, life_cycle = command
        assert self._before is not None
        before, after = Tree(self._before["tree"], self.rules), Tree(snapshot["tree"], self.rules)
        for node in before.nodes:
            tokens = [token for above in node.path() for token in above.tokens]
            if node.scope == scope and tokens == list(path):
                break
        else:
            raise AssertionError("no such node")
        rule = self.rules.life_cycles[life_cycle]
        node.pages[life_cycle] = None
        if not rule.is_ssm and rule.required and (rule.window is None or node.depth < rule.sink_blocks):
            siblings = before.children(scope, node.parent)
            del siblings[[child is node for child in siblings].index(True)]
        for where, query in self.queries(self._before):
            want, got = before.longest(where, query), after.longest(where, query)
            assert got == want, f"{got} tokens are left of {len(query)}, without that one page {want}"

    def kept(self, snapshot: Any) -> None:
        """Nothing had to make way: what could be matched before can be matched still."""
        assert self._before is not None
        before, after = Tree(self._before["tree"], self.rules), Tree(snapshot["tree"], self.rules)
        for where, query in self.queries(self._before):
            want, got = before.longest(where, query), after.longest(where, query)
            assert got >= want, f"{got} tokens are left of {len(query)}, it were {want}"

    def queries(self, snapshot: dict[str, Any]) -> Iterator[tuple[Any, list[Token]]]:
        """Paths of the tree as they are, a little shorter and a little longer; some of them where they are many."""
        nodes = Tree(snapshot["tree"], self.rules).nodes
        for node in nodes[:: 1 + len(nodes) // 40]:
            path = [token for above in node.path() for token in above.tokens]
            yield from ((node.scope, query) for query in (path, [*path, 0], path[:-1]))

    def commits(self, seen: dict[str, Any]) -> None:
        """Whatever the lengths say is committed now."""
        for k, handle, committed, *_ in seen["caches"]:
            before = self.committed.get(handle, 0)
            if committed > before:
                scope = self.scopes.get(handle, ReuseScope())
                self.ledger.commit(scope, self.driver.texts[k][:committed], before)
            self.committed[handle] = committed

    def count_evictions(self, name: str, seen: dict[str, Any]) -> None:
        """Pages make way in the order of the queues: where one had to, the head of some queue is gone."""
        if self._before is None or name not in ("resize", "history", "capacity", "beam", "step", "resume"):
            return
        if name not in ("step", "resume"):
            for before, now in zip(self._before["queues"], seen["snapshot"]["queues"], strict=True):
                check_oldest_first(before, now)
        after = {key for key, _ in self.linked(seen["snapshot"])}
        gone = [(key, refs) for key, refs in self.linked(self._before) if key not in after]
        self.evictions += bool(gone)
        if not gone or name in ("step", "resume"):  # commits replace pages, a first resume may take one out
            return
        if any(refs for _, refs in gone):
            return  # the request let go of it in this very call, and it was the next victim
        queues = self._before["queues"]
        heads = {(group, queue[0][2]) for group, queue in enumerate(queues) if queue}
        assert not heads or heads & {key for key, _ in gone}, "the next victims stay, others went"

    def linked(self, snapshot: dict[str, Any]) -> Iterator[tuple[tuple[int, int], int]]:
        """((pool group, slot), owners) of every page of the tree."""
        for *_, pages, _ in snapshot["tree"]:
            for index, page in enumerate(pages):
                if page is not None:
                    yield (self.group_of[index], page[0]), page[2]


def check_oldest_first(before: list[list[int]], now: list[list[int]]) -> None:
    """Who waited already stays in order, and before those that came now."""
    waited = {tuple(entry): place for place, entry in enumerate(before)}
    buckets: dict[tuple[int, int], list[int]] = {}
    for priority, kind, slot in now:
        buckets.setdefault((priority, kind), []).append(waited.get((priority, kind, slot), len(before)))
    for places in buckets.values():
        assert places == sorted(places), "a page waits before one that has waited longer"


# bytes ---------------------------------------------------------------------------------------------------------
@dataclass
class Buffer:
    order: int
    window: int | None
    sinks: int
    records: np.ndarray  # uint64[slot, token, 2]; a state: [slot, 1, 2]


class Scribe:
    """An engine over host memory: writes the record of every token that a cache computes, and reads all it may use."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.manager = driver, driver.manager
        self.rules = Rules.of(self.manager.init_config)
        self.tpb = self.manager.tokens_per_block
        self.chains = Chains()
        self.buffers: list[list[Buffer]] = [[] for _ in self.rules.life_cycles]
        self.optional = [i for i, rule in enumerate(self.rules.life_cycles) if rule.optional]
        layers = {layer.layer_id: layer for layer in self.manager.init_config.layers}
        for number, buffer in enumerate(self.manager.all_buffer_ids):
            self._add(number, buffer, layers[buffer.layer_id])
        self.written: dict[int, int] = {}  # handle → positions below it hold their records, where a page is
        self.state: dict[int, int | None] = {}  # handle → the prefix that its recurrent state stands for
        self.opened: set[int] = set()
        self.compared = 0

    def _add(self, number: int, buffer: Any, layer: Any) -> None:
        from kvpool.v2 import PageIndexMode

        base = self.manager.get_mem_pool_base_address(buffer.layer_id, buffer.role, PageIndexMode.SHARED)
        group = self.manager.get_layer_group_id(buffer.layer_id)
        for pools in self.manager.pool_group_descs:
            for pool in pools.pools:
                if not pool.base_address <= base < pool.base_address + pool.slot_bytes:
                    continue
                size = pool.slot_bytes * pools.num_slots
                memory = np.frombuffer((ctypes.c_uint8 * size).from_address(pool.base_address), np.uint64)
                attention = isinstance(layer, AttentionLayerConfig)
                tokens = self.tpb if attention else 1
                expansion = self.manager.get_page_index_converter(buffer.layer_id, buffer.role).expansion
                bytes_per_token = self.manager.get_page_stride(buffer.layer_id, buffer.role) * expansion // tokens
                assert bytes_per_token >= 16
                assert bytes_per_token % 8 == 0
                records = np.lib.stride_tricks.as_strided(
                    memory[(base - pool.base_address) // 8 :],
                    (pools.num_slots, tokens, 2),
                    (pool.slot_bytes, bytes_per_token, 8),
                )
                window = layer.sliding_window_size if attention else None
                sinks = (layer.num_sink_tokens or 0) if attention else 0
                self.buffers[group].append(Buffer(number, window, sinks, records))
                return
        raise AssertionError(f"buffer {buffer} lies in no pool")

    # what a prefix's record is
    def names(self, k: int) -> np.ndarray:
        cache = self.driver.caches[k]
        return np.array(self.chains.chain(cache.reuse_scope, self.driver.texts[k]), np.uint64)

    @staticmethod
    def record(names: np.ndarray, positions: np.ndarray, number: int) -> np.ndarray:
        words = np.empty((positions.size, 2), np.uint64)
        words[:, 0] = names[positions + 1]
        words[:, 1] = positions + (number << 40)
        return words

    # before and after a command
    def before(self, command: tuple[Any, ...]) -> None:
        """The states have to stand where a commit will take their snapshot."""
        if command[0] == "commit":
            self._advance_state(command[1], command[2])
        elif command[0] == "step" and len(command) > 7:
            for k, count in zip(command[2], command[7], strict=True):
                self._advance_state(k, count)

    def _advance_state(self, k: int, count: int) -> None:
        cache = self.driver.caches[k]
        if not self.driver.active(k) or not count:
            return
        target = min(cache.num_committed_tokens + count, len(self.driver.texts[k]))
        value = self.chains.chain(cache.reuse_scope, self.driver.texts[k])[target]
        self._write_state(k, value, target)

    def _write_state(self, k: int, value: int, position: int) -> None:
        cache = self.driver.caches[k]
        for index, rule in enumerate(self.rules.life_cycles):
            if not rule.is_ssm:
                continue
            for beam in range(cache.beam_width):
                slot = cache.get_ssm_block_base_index(index, beam)
                if slot >= 0:
                    for buffer in self.buffers[index]:
                        buffer.records[slot, 0] = value, position + (buffer.order << 40)
        self.state[cache.handle] = value

    def after(
        self, command: tuple[Any, ...], answer: tuple[Any, ...], snapshot: dict[str, Any], *, whole: bool
    ) -> None:
        name = command[0]
        touched: set[int] = set()
        if name == "step":
            touched.update(command[2])
        elif name == "create" and answer[0] == "ok":
            handle = answer[1][0]
            k = next(i for i, c in enumerate(self.driver.caches) if c is not None and c.handle == handle)
            self.written[handle] = answer[1][1]
            self._check_held(k)
        elif len(command) > 1 and name not in ("create", "probe", "clamp", "dead", "drop", "discard", "uncover"):
            touched.add(command[1])
        for k in touched:
            cache = self.driver.caches[k]
            if cache is None:
                continue
            if name == "retext":
                self.written[cache.handle] = min(self.written[cache.handle], command[2])
            if cache.is_active:
                if name == "resume" and cache.handle not in self.opened:
                    self._opened(k, command)
                self._check(k)
                self._write(k)
        if whole:
            for k, cache in enumerate(self.driver.caches):
                if cache is not None and cache.is_active:
                    self._check(k)
            self.check_tree(snapshot)

    def _opened(self, k: int, command: tuple[Any, ...]) -> None:
        """The first resume: states are copies, optional groups without the prefix are computed anew."""
        cache = self.driver.caches[k]
        self.opened.add(cache.handle)
        matched = cache.num_committed_tokens
        names = self.names(k)
        for index, rule in enumerate(self.rules.life_cycles):
            if rule.is_ssm:
                slot = cache.get_ssm_block_base_index(index, 0)
                for buffer in self.buffers[index]:
                    if matched:
                        want = (int(names[matched]), matched + (buffer.order << 40))
                        got = tuple(int(word) for word in buffer.records[slot, 0])
                        assert got == want, f"state of cache {k} is not the one after {matched} tokens"
                    else:
                        self._write_state(k, 0, 0)
        if matched:
            chosen = set(command[3]) if len(command) > 3 else None
            status = {entry.group_id: entry for entry in self._status(cache)}
            for index in self.optional:
                shared = status[index].complete if chosen is None else index in chosen
                if not shared:
                    self._fill(k, index, 0, matched)

    def _status(self, cache: Any) -> Any:
        return self.manager._core.reuse_status(cache.handle)

    def _slots(self, k: int, index: int, beam: int = 0) -> np.ndarray:
        cache = self.driver.caches[k]
        return np.array([int(i) for i in cache.get_base_page_indices(index, beam)][: cache.num_blocks], np.int64)

    def _fill(self, k: int, index: int, begin: int, end: int, beam: int = 0) -> None:
        slots = self._slots(k, index, beam)
        positions = np.arange(begin, end)
        positions = positions[slots[positions // self.tpb] >= 0]
        names = self.names(k)
        for buffer in self.buffers[index]:
            buffer.records[slots[positions // self.tpb], positions % self.tpb] = self.record(
                names, positions, buffer.order
            )

    def _write(self, k: int) -> None:
        """All positions that are not written yet, and again those that the next step computes."""
        cache = self.driver.caches[k]
        capacity, history = cache.capacity, cache.history_length
        begin = min(history, self.written.get(cache.handle, 0))
        for index, rule in enumerate(self.rules.life_cycles):
            if rule.is_ssm:
                continue
            for beam in range(cache.beam_width):
                self._fill(k, index, begin, capacity, beam)
            desc = cache.get_scratch_desc(index)
            if desc is not None:
                for buffer in self.buffers[index]:
                    buffer.records[list(desc.slot_ids)] = 0xEEEE
        self.written[cache.handle] = capacity

    def _check(self, k: int) -> None:
        """Everything that the next step will read."""
        cache = self.driver.caches[k]
        self.written[cache.handle] = min(self.written.get(cache.handle, 0), cache.capacity)
        history = min(cache.history_length, self.written[cache.handle])
        names = self.names(k)
        for index, buffers in enumerate(self.buffers):
            if self.rules.life_cycles[index].is_ssm:
                self._check_state(k, index)
                continue
            slots = self._slots(k, index)
            for buffer in buffers:
                begin = 0 if buffer.window is None else max(0, cache.history_length - buffer.window + 1)
                positions = np.unique(
                    np.concatenate([np.arange(min(buffer.sinks, history)), np.arange(min(begin, history), history)])
                ).astype(np.int64)
                pages = slots[positions // self.tpb]
                assert (pages >= 0).all(), f"cache {k}, group {index}: a position that is needed has no page"
                self._compare(buffer, pages, positions, names, f"cache {k}, group {index}")

    def _check_state(self, k: int, index: int) -> None:
        cache = self.driver.caches[k]
        slot = cache.get_ssm_block_base_index(index, 0)
        value = self.state.get(cache.handle)
        if slot >= 0 and value is not None:
            for buffer in self.buffers[index]:
                assert int(buffer.records[slot, 0, 0]) == value, f"cache {k}: its state was overwritten"

    def _check_held(self, k: int) -> None:
        """A new cache: every page that it owns holds its very prefix, before anything is copied."""
        cache = self.driver.caches[k]
        matched = cache.num_committed_tokens
        names = self.names(k)
        status = {entry.group_id: entry for entry in self._status(cache)} if matched and self.optional else {}
        for index, buffers in enumerate(self.buffers):
            if self.rules.life_cycles[index].is_ssm:
                continue
            held = np.array(list(cache.get_aggregated_page_indices(index)), np.int64)
            positions = np.arange(matched)
            if index in status:
                covered = np.zeros(matched, bool)
                for begin, end in status[index].coverage:
                    covered[begin:end] = True
                positions = positions[covered]
                assert (held[positions // self.tpb] >= 0).all()
            pages = held[positions // self.tpb] if matched else positions
            for buffer in buffers:
                there = pages >= 0
                self._compare(buffer, pages[there], positions[there], names, f"new cache {k}, group {index}")

    def _compare(self, buffer: Buffer, pages: np.ndarray, positions: np.ndarray, names: np.ndarray, where: str) -> None:
        if not positions.size:
            return
        got = buffer.records[pages, positions % self.tpb]
        wrong = positions[(got != self.record(names, positions, buffer.order)).any(axis=1)]
        assert not wrong.size, f"{where}, buffer {buffer.order}: wrong bytes at positions {wrong[:5]}"
        self.compared += positions.size

    def check_tree(self, snapshot: dict[str, Any]) -> None:
        """Every page of the tree holds the tokens that its place in the tree stands for."""
        names: dict[int, list[int]] = {}
        tree = Tree(snapshot["tree"], self.rules)
        for node in tree.nodes:
            start = scope_seed(node.scope) if node.parent is None else names[id(node.parent)][-1]
            names[id(node)] = self.chains.extend(start, node.tokens)
            chain = np.array(names[id(node)], np.uint64)
            for index, page in enumerate(node.pages):
                if page is None:
                    continue
                for buffer in self.buffers[index]:
                    where = f"tree: block {node.depth}, group {index}, slot {page.slot}, buffer {buffer.order}"
                    if self.rules.life_cycles[index].is_ssm:
                        position = node.depth * self.tpb + page.coverage
                        want = (int(chain[page.coverage]), position + (buffer.order << 40))
                        assert tuple(int(word) for word in buffer.records[page.slot, 0]) == want, where
                        continue
                    positions = np.arange(page.coverage)
                    want_words = self.record(chain, positions, buffer.order)
                    want_words[:, 1] += np.uint64(node.depth * self.tpb)
                    got = buffer.records[page.slot, : page.coverage]
                    assert np.array_equal(got, want_words), where
                    self.compared += page.coverage
