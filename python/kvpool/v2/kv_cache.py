"""One request's KV cache: sugar over an integer handle of the manager's core."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from kvpool.errors import ArgumentError, OutOfPagesError
from kvpool.v2._backend import ACTIVE, ManagerCore
from kvpool.v2._checks import INT64_MAX, arg_bool, arg_index_mode, arg_int
from kvpool.v2._layout_index import LayoutIndex
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
    ReuseScope,
    ScratchDesc,
    _Status,
)

if TYPE_CHECKING:
    from kvpool.v2.manager import KVCacheManager


class KVCache:
    """Made by :meth:`KVCacheManager.create_kv_cache` only. Used by one thread at a time.

    ``num_committed_tokens <= history_length <= capacity`` and ``num_blocks == ceil(capacity / tokens_per_block)``.
    SUSPENDED → :meth:`resume` → ACTIVE → :meth:`suspend` …; :meth:`close` ends it and frees its pages; there is no
    finalizer. A method that fails leaves everything as it was. LogicError: the state does not allow the call, or two
    threads are inside one cache. After close the lengths keep their last values, but ``num_blocks`` is 0.
    """

    __slots__ = (
        "__weakref__",
        "_core",
        "_final_lengths",
        "_handle",
        "_layout",
        "_manager",
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
        reuse_scope: ReuseScope,
        cache_id: Any,
        text_only: bool,
    ) -> None:
        self._manager = manager
        self._core = core
        self._layout = layout
        self._reuse_scope = reuse_scope
        self._text_only = text_only
        self._final_lengths: tuple[int, int, int] | None = None
        self.id = cache_id
        self._handle = core.create()

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
        """The promise that no token is a digest; it can't be withdrawn when the manager's configuration gives it."""
        return self._text_only

    @text_only.setter
    def text_only(self, value: bool) -> None:
        promised = arg_bool("text_only", value)
        if not promised and self._manager.init_config.text_only:
            raise ArgumentError("text_only = False: the manager's configuration promises text only")
        self._text_only = promised

    @property
    def status(self) -> _Status:
        return _Status(self._core.status(self._handle))

    @property
    def is_active(self) -> bool:
        return self._core.status(self._handle) == ACTIVE

    # states

    def resume(self, cuda_stream: CudaStream | None = None) -> bool:
        """SUSPENDED → ACTIVE on a stream (None: the last one, else the device's own). False: not now, nothing changed.

        A new stream waits for what the last one has queued. Answers False when other caches hold more than
        ``max_util_for_resume`` of a pool group and one of them is active, or when slots lack.
        """
        if cuda_stream is not None:
            cuda_stream = arg_int("cuda_stream", cuda_stream, 0, INT64_MAX)
        return self._core.resume(self._handle, cuda_stream)

    def suspend(self) -> None:
        """ACTIVE → SUSPENDED: pages stay, scratch slots go, attached index buffers are detached."""
        self._core.suspend(self._handle)

    def close(self) -> None:
        """Free everything, in any state; idempotent."""
        if self._final_lengths is not None:
            return
        committed, history, capacity, _ = self._core.lengths(self._handle)
        self._core.close(self._handle)
        self._final_lengths = committed, history, capacity

    def stop_committing(self) -> None:
        """Promise that nothing will be committed any more, so that pages behind the window go at once; idempotent."""
        self._core.stop_committing(self._handle)

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
        return self._core.resize(self._handle, capacity, history_length)

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
        """Tokens that can be shared."""
        return self._lengths()[0]

    @property
    def num_blocks(self) -> int:
        return 0 if self._final_lengths is not None else self._core.lengths(self._handle)[3]

    def _lengths(self) -> tuple[int, int, int]:
        if self._final_lengths is not None:
            return self._final_lengths
        committed, history, capacity, _ = self._core.lengths(self._handle)
        return committed, history, capacity

    def _must_resize(self, capacity: int | None, history_length: int | None) -> None:
        if not self._core.resize(self._handle, capacity, history_length):
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
        self._core.set_beam_width(self._handle, arg_int("beam_width", value, 1))

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
