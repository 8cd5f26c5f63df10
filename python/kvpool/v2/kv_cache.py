"""One request's KV cache: sugar over an integer handle of the manager's core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from kvpool.errors import ArgumentError, OutOfPagesError, UnsupportedError
from kvpool.v2._backend import ACTIVE, ManagerCore
from kvpool.v2._checks import INT32_MAX, INT64_MAX, arg_bool, arg_index_mode, arg_int, is_integer
from kvpool.v2._layout_index import LayoutIndex
from kvpool.v2._priorities import BlockPriorities
from kvpool.v2._tokens import decode_tokens, encode_tokens
from kvpool.v2.keys import KEY_BYTES
from kvpool.v2.planned_drop import PlannedDropHandle
from kvpool.v2.types import (
    BAD_PAGE_INDEX,
    DEFAULT_BEAM_INDEX,
    GPU_LEVEL,
    BeamIndex,
    CudaStream,
    HalfOpenRange,
    IndexSeq,
    LayerGroupId,
    PageIndexMode,
    ReusePolicy,
    ReuseScope,
    ReuseStatus,
    ScratchDesc,
    TokenIdExt,
    _Status,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvpool.v2.manager import KVCacheManager


class KVCache:
    """Made by :meth:`KVCacheManager.create_kv_cache` only. Used by one thread at a time.

    ``num_committed_tokens <= history_length <= capacity`` and ``num_blocks == ceil(capacity / tokens_per_block)``.
    SUSPENDED → :meth:`resume` → ACTIVE → :meth:`suspend` …; :meth:`close` ends it and gives its pages up, committed ones
    to the prefix cache; there is no finalizer. A method that fails leaves everything as it was. LogicError: the state
    does not allow the call, or two threads are inside one cache. After close the lengths keep their last values, but
    ``num_blocks`` is 0.
    """

    __slots__ = (
        "__weakref__",
        "_core",
        "_drops",
        "_final_lengths",
        "_handle",
        "_layout",
        "_manager",
        "_priorities",
        "_reuse_scope",
        "_text_only",
        "id",
    )

    Status: ClassVar[type[_Status]] = _Status

    def __init__(
        self,
        manager: KVCacheManager,
        core: ManagerCore,
        layout: LayoutIndex,
        handle: int,
        reuse_scope: ReuseScope,
        cache_id: Any,
        text_only: bool,
        priorities: BlockPriorities | None,
    ) -> None:
        self._manager = manager
        self._core = core
        self._layout = layout
        self._handle = handle
        self._reuse_scope = reuse_scope
        self.id = cache_id
        self._text_only = text_only
        self._priorities = priorities
        self._drops = manager._drops
        self._final_lengths: tuple[int, int, int] | None = None

    def __repr__(self) -> str:
        committed, history, capacity = self._lengths()
        return (
            f"<KVCache id={self.id!r} handle={self._handle:#x} {self.status.name} committed={committed} "
            f"history={history} capacity={capacity}>"
        )

    def __enter__(self) -> KVCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # what it is

    @property
    def handle(self) -> int:
        """The integer that :attr:`KVCacheManager.step` takes: ``generation << 32 | index``. Never used twice."""
        return self._handle

    @property
    def manager(self) -> KVCacheManager:
        return self._manager

    @property
    def reuse_scope(self) -> ReuseScope:
        return self._reuse_scope

    @property
    def tokens_per_block(self) -> int:
        return self._manager.tokens_per_block

    @property
    def text_only(self) -> bool:
        """The promise that no token is a digest.

        ArgumentError: False when the manager's configuration gives it, True when a committed token is a digest.
        """
        return self._text_only

    @text_only.setter
    def text_only(self, value: bool) -> None:
        promised = self._manager._promise(value)
        if promised and not self._text_only:
            _, digests = self._core.committed_tokens(self._handle)
            if digests:
                raise ArgumentError(f"text_only = True: {len(digests)} of the committed tokens are digests")
        self._text_only = promised

    @property
    def status(self) -> _Status:
        return _Status(self._core.status(self._handle))

    @property
    def is_active(self) -> bool:
        return self._core.status(self._handle) == ACTIVE

    # states

    def resume(
        self, cuda_stream: CudaStream | None = None, optional_reuse_groups: Iterable[LayerGroupId] | None = None
    ) -> bool:
        """SUSPENDED → ACTIVE on a stream (None: the last one, else the device's own). False: not now, nothing changed.

        A new stream waits for what the last one has queued. Answers False when other caches hold more than
        ``max_util_for_resume`` of a pool group and one of them is active, or when slots lack.

        The first resume copies the unfinished block of a matched prefix (and recurrent state), so that the cache writes
        to pages of its own. ``optional_reuse_groups`` chooses at that time which OPTIONAL layer groups share the matched
        pages, the others get fresh ones: None is every one that is complete (:attr:`reuse_status`). ArgumentError for a
        group that is not OPTIONAL or not complete, and later for another choice than the first.
        """
        if cuda_stream is not None:
            cuda_stream = arg_int("cuda_stream", cuda_stream, 0, INT64_MAX)
        groups = None if optional_reuse_groups is None else _group_ids(optional_reuse_groups)
        if self._drops.posted:
            self._drops.apply_posted()
        return self._core.resume(self._handle, cuda_stream, groups)

    def suspend(self) -> None:
        """ACTIVE → SUSPENDED: pages stay, scratch slots go, attached index buffers are detached."""
        if self._drops.posted:
            self._drops.apply_posted()
        self._core.suspend(self._handle)

    def close(self) -> None:
        """Stop committing and give every page up, in any state; idempotent. Committed pages stay cached until evicted."""
        if self._final_lengths is not None:
            return
        if self._drops.posted:
            self._drops.apply_posted()
        committed, history, capacity, _ = self._core.lengths(self._handle)
        self._core.close(self._handle)
        self._final_lengths = committed, history, capacity

    # reuse

    def commit(
        self,
        accepted_input_tokens: Sequence[TokenIdExt] | npt.NDArray[np.int32],
        beam_search_indices: Sequence[int] | None = None,
        is_end: bool = False,
    ) -> None:
        """These tokens follow the committed ones, and their keys and values are written: others may share them.

        History advances to the committed length at least. A block that becomes full enters the prefix cache; if it is
        there already, the cache drops its own page and shares the other's, so **its page indices may change**. Tokens of
        an unfinished block follow with later ones, at :meth:`stop_committing` or :meth:`close`. With
        ``commit_min_snapshot`` copies of it, and of recurrent state, enter at once. ``is_end``: nothing will be written to
        this cache any more, so these pages need not be copied; committing stops. No tokens: nothing happens but that.

        ``accepted_input_tokens``: a list or tuple of token ids and 32-byte digests, or a C-contiguous int32 array.
        LogicError: not ACTIVE, committing has stopped, more than one beam. ArgumentError: beyond the capacity; a digest
        although text only was promised; with ``commit_min_snapshot`` a history that is neither the committed length
        before nor the one after. UnsupportedError for ``beam_search_indices``: tokens must be those of beam 0.
        """
        if beam_search_indices is not None:
            raise UnsupportedError("beam_search_indices: tokens must be converged and in beam 0; leave it None")
        if type(is_end) is not bool:
            is_end = arg_bool("is_end", is_end)
        ids, digests = encode_tokens("accepted_input_tokens", accepted_input_tokens, self._text_only)
        if self._drops.posted:
            self._drops.apply_posted()
        self._core.commit(self._handle, ids, digests, is_end)

    def stop_committing(self) -> None:
        """Nothing will be committed any more: the unfinished block is shared as it is, stale pages go; idempotent."""
        if self._drops.posted:
            self._drops.apply_posted()
        self._core.stop_committing(self._handle)

    @property
    def committed_tokens(self) -> list[TokenIdExt]:
        """Every committed token, reused ones included; a digest is ``bytes``, whatever it was given as."""
        return decode_tokens(*self._core.committed_tokens(self._handle))

    def block_keys(self) -> list[bytes]:
        """The chain keys (:func:`sequence_to_blockchain_keys`) of the full committed blocks, in order."""
        keys = self._core.block_keys(self._handle).tobytes()
        return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]

    @property
    def reuse_status(self) -> Sequence[ReuseStatus | None]:
        """What each layer group held of the matched prefix at creation. Index: layer group id; None for state groups."""
        by_group: list[ReuseStatus | None] = [None] * len(self._layout.life_cycles)
        for group, optional, complete, endpoint, coverage in self._core.reuse_status(self._handle):
            policy = ReusePolicy.OPTIONAL if optional else ReusePolicy.REQUIRED
            by_group[group] = ReuseStatus(group, policy, complete, endpoint, [(beg, end) for beg, end in coverage])
        return by_group

    def plan_committed_block_drop(self) -> PlannedDropHandle | None:
        """Plan to forget the end of the committed prefix: what the windows need behind it, and its recurrent state.

        Full-attention pages and sinks stay, and what another plan covers too. None when nothing is committed, or the
        prefix is not wholly cached any more. LogicError until committing has stopped.
        """
        if self._drops.posted:
            self._drops.apply_posted()
        plan = self._core.plan_drop(self._handle)
        return None if plan is None else PlannedDropHandle(self._drops, plan)

    def _get_num_reusable_tokens_before_pruning(self) -> int:
        """At creation: tokens that some cached sequence shares, whether its pages are still there or not."""
        return self._core.match_depths(self._handle)[0]

    def _get_num_reusable_tokens_before_hybrid_pruning(self) -> int:
        """At creation: what could have been reused if recurrent state did not count."""
        return self._core.match_depths(self._handle)[1]

    # lengths

    def resize(self, capacity: int | None, history_length: int | None = None) -> bool:
        """Set the two lengths (tokens, None: as it is); True when done. ACTIVE only.

        False: slots lack now, nothing changed. Raises NeverFitsError when the pool group is too small for this cache
        alone, ArgumentError when history would go back or exceed the capacity, or an attached index buffer is too
        short. ``resize(None, None)`` does nothing and answers True.
        """
        if capacity is not None:
            capacity = arg_int("capacity", capacity)
        if history_length is not None:
            history_length = arg_int("history_length", history_length)
        return self._resize(capacity, history_length)

    @property
    def capacity(self) -> int:
        """Tokens with space. Setting it resizes: OutOfPagesError when slots lack."""
        return self._lengths()[2]

    @capacity.setter
    def capacity(self, value: int) -> None:
        capacity = arg_int("capacity", value)
        if self.enable_swa_scratch_reuse:
            raise ArgumentError("capacity can not be set alone while scratch reuse is enabled: call resize")
        self._must_resize(capacity, None)

    @property
    def history_length(self) -> int:
        """Tokens whose queries are done; it never goes back."""
        return self._lengths()[1]

    @history_length.setter
    def history_length(self, value: int) -> None:
        self._must_resize(None, arg_int("history_length", value))

    @property
    def num_committed_tokens(self) -> int:
        """Tokens handed to :meth:`commit`; right after creation those that are reused."""
        return self._lengths()[0]

    @property
    def num_blocks(self) -> int:
        return 0 if self._final_lengths is not None else self._core.lengths(self._handle)[3]

    def _lengths(self) -> tuple[int, int, int]:
        if self._final_lengths is not None:
            return self._final_lengths
        committed, history, capacity, _ = self._core.lengths(self._handle)
        return committed, history, capacity

    def _resize(self, capacity: int | None, history_length: int | None) -> bool:
        if self._priorities is not None and capacity is not None:
            self._extend_priorities(self._priorities, capacity)
        if self._drops.posted:
            self._drops.apply_posted()
        return self._core.resize(self._handle, capacity, history_length)

    def _extend_priorities(self, priorities: BlockPriorities, capacity: int) -> None:
        answers = priorities.missing(capacity)
        if any(answers):
            self._core.extend_priorities(self._handle, answers)
            priorities.told(answers)

    def _must_resize(self, capacity: int | None, history_length: int | None) -> None:
        if not self._resize(capacity, history_length):
            raise OutOfPagesError(f"resize({capacity}, {history_length}): not enough free slots now")

    # stream and beams

    @property
    def cuda_stream(self) -> CudaStream | None:
        """The stream that its pages belong to. A new one waits for what the old one has queued; the host never does."""
        return self._core.stream(self._handle)

    @cuda_stream.setter
    def cuda_stream(self, value: CudaStream) -> None:
        self._core.set_stream(self._handle, arg_int("cuda_stream", value, 0, INT64_MAX))

    @property
    def beam_width(self) -> int:
        """1 to 65536. Growing copies the unfinished block and state of beam 0, shrinking drops beams. ACTIVE only."""
        return self._core.beam_width(self._handle)

    @beam_width.setter
    def beam_width(self, value: int) -> None:
        width = arg_int("beam_width", value, 1)
        if self._drops.posted:
            self._drops.apply_posted()
        self._core.set_beam_width(self._handle, width)

    # scratch

    @property
    def enable_swa_scratch_reuse(self) -> bool:
        """Whether windowed layers use scratch slots.

        ArgumentError: False while some are in use, True when the manager does not configure it or when the present
        lengths would need some now.
        """
        return self._core.scratch_enabled(self._handle)

    @enable_swa_scratch_reuse.setter
    def enable_swa_scratch_reuse(self, value: bool) -> None:
        wanted = arg_bool("enable_swa_scratch_reuse", value)
        if wanted and not self._manager.init_config.enable_swa_scratch_reuse:
            raise ArgumentError("enable_swa_scratch_reuse = True: the configuration has no swa_scratch_reuse")
        self._core.set_scratch_enabled(self._handle, wanted)

    @property
    def has_scratch_slots(self) -> bool:
        return any(self.get_scratch_desc(group) is not None for group in range(len(self._layout.life_cycles)))

    def get_scratch_desc(self, layer_group_id: LayerGroupId) -> ScratchDesc | None:
        """The scratch blocks of a group until the lengths change next; None without any."""
        desc = self._core.scratch_desc(self._handle, self._layout.group(layer_group_id))
        if desc is None:
            return None
        beg, end, slot_ids = desc
        return ScratchDesc(HalfOpenRange(beg, end), tuple(slot_ids))

    def supports_index_mode(self, mode: PageIndexMode) -> bool:
        """SHARED indices can not name scratch pages."""
        return arg_index_mode(mode) == PageIndexMode.PER_LAYER or not self.has_scratch_slots

    # indices

    def get_base_page_indices(self, layer_group_id: LayerGroupId, beam_id: BeamIndex = DEFAULT_BEAM_INDEX) -> IndexSeq:
        """Slot ids by block ordinal, int32, BAD_PAGE_INDEX without a usable page (always so while SUSPENDED).

        At least ``num_blocks`` entries: the whole row when a buffer is attached, else a copy.
        """
        group = self._layout.group(layer_group_id)
        return self._core.page_indices(self._handle, group, arg_int("beam_id", beam_id)).data

    def get_aggregated_page_indices(
        self, layer_group_id: LayerGroupId, beam_id: BeamIndex = DEFAULT_BEAM_INDEX, valid_only: bool = False
    ) -> Iterator[int]:
        """Slot ids by block ordinal of every page that the cache owns, in any state; for transfers.

        BAD_PAGE_INDEX without one; ``valid_only`` leaves those out. Pages behind the window count while they are held.
        """
        indices = self._held(layer_group_id, beam_id)
        if arg_bool("valid_only", valid_only):
            return iter([index for index in indices if index != BAD_PAGE_INDEX])
        return iter(indices)

    def get_page_levels(self, layer_group_id: LayerGroupId, beam_id: BeamIndex = DEFAULT_BEAM_INDEX) -> list[int]:
        """The cache level of each block's page, -1 without one."""
        return [-1 if index == BAD_PAGE_INDEX else GPU_LEVEL for index in self._held(layer_group_id, beam_id)]

    def get_ssm_block_base_index(self, layer_group_id: LayerGroupId, beam_id: BeamIndex = DEFAULT_BEAM_INDEX) -> int:
        """The slot id of the recurrent state, negative before the first resume. ArgumentError for other groups."""
        group = self._layout.group(layer_group_id)
        if not self._layout.life_cycles[group].is_ssm:
            raise ArgumentError(f"layer_group_id must be a state group, not the attention group {group}")
        return self._core.ssm_slot(self._handle, group, arg_int("beam_id", beam_id))

    def set_base_page_index_buf(
        self, beam_idx: BeamIndex, layer_group_id: LayerGroupId, buf: memoryview | Any | None
    ) -> None:
        """Let the manager keep slot ids in the caller's writable int32 row; None detaches it.

        The row is filled at once, BAD_PAGE_INDEX after ``num_blocks``, and held until it is detached (suspend does
        so too). Raises TypeError without the buffer protocol, ArgumentError for another format or a row that is too
        short.
        """
        group = self._layout.group(layer_group_id)
        beam = arg_int("beam_idx", beam_idx)
        self._core.attach_buffer(self._handle, beam, group, None if buf is None else _int32_row(buf))

    def _held(self, layer_group_id: LayerGroupId, beam_id: BeamIndex) -> list[int]:
        group = self._layout.group(layer_group_id)
        indices: list[int] = self._core.held_page_indices(self._handle, group, arg_int("beam_id", beam_id)).tolist()
        return indices


def _group_ids(groups: Iterable[LayerGroupId]) -> list[int]:
    """Ascending, each once; whether they exist and are optional is the core's question."""
    wanted: set[int] = set()
    for group in groups:
        if not is_integer(group):
            raise TypeError(f"optional_reuse_groups must be layer group ids, not {type(group).__name__}")
        if not 0 <= group <= INT32_MAX:
            raise ArgumentError(f"optional_reuse_groups: {group} is not an optional layer group")
        wanted.add(int(group))
    return sorted(wanted)


def _int32_row(buf: Any) -> memoryview:
    try:
        view = memoryview(buf)
    except TypeError:
        raise TypeError(f"buf must support the buffer protocol, {type(buf).__name__} does not") from None
    if view.format not in ("i", "=i", "@i", "<i", "l", "=l", "@l", "<l") or view.itemsize != 4:
        raise ArgumentError(f"buf must be int32, not format {view.format!r} of {view.itemsize} bytes")
    if view.ndim != 1 or not view.c_contiguous:
        raise ArgumentError(
            f"buf must be one-dimensional and C-contiguous, not of shape {view.shape}, strides {view.strides}"
        )
    if view.readonly:
        raise ArgumentError("buf must be writable, not read-only")
    return view
