"""One request at a time: states, lengths, windows, states of SSM layers, buffers, threads, forks."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from kvpool._py.manager.manager import Manager
from kvpool.errors import (
    ArgumentError,
    CorruptedError,
    LogicError,
    NeverFitsError,
    OutOfPagesError,
    UnknownBufferError,
    UnsupportedError,
)
from kvpool.v2._backend import ACTIVE, CLOSED, SUSPENDED
from tests.unit.py_cases import MIB, active, attention, config, free, i32, one_full, pages, slots_config, ssm


def test_life_of_a_cache() -> None:
    manager = Manager(one_full(4), "host")
    handle = manager.create()
    assert (handle, manager.status(handle), manager.lengths(handle)) == (1 << 32, SUSPENDED, (0, 0, 0, 0))
    assert manager.stream(handle) is None
    with pytest.raises(LogicError):
        manager.resize(handle, 32, 0)
    assert manager.resize(handle, None, None)
    assert manager.resume(handle, None)
    with pytest.raises(LogicError):
        manager.resume(handle, None)
    assert (manager.status(handle), manager.stream(handle)) == (ACTIVE, 0)
    assert manager.resize(handle, 33, 5)
    assert manager.lengths(handle) == (0, 5, 33, 2)
    assert pages(manager, handle) == [0, 1]
    manager.suspend(handle)
    assert pages(manager, handle) == [-1, -1]
    assert manager.held_page_indices(handle, 0, 0).tolist() == [0, 1]
    with pytest.raises(LogicError):
        manager.suspend(handle)
    assert manager.resume(handle, 5)
    assert manager.stream(handle) == 5
    assert pages(manager, handle) == [0, 1]
    manager.close(handle)
    assert (manager.status(handle), free(manager), manager.num_open()) == (CLOSED, [4], 0)
    for call in (manager.close, manager.suspend, manager.lengths):
        with pytest.raises(LogicError, match="closed or unknown"):
            call(handle)


def test_handles_are_reused_last_in_first_out_with_a_new_generation() -> None:
    manager = Manager(one_full(4), "virtual")
    first = [manager.create() for _ in range(3)]
    assert first == [1 << 32, 1 << 32 | 1, 1 << 32 | 2]
    manager.close(first[0])
    manager.close(first[1])
    assert [manager.create() for _ in range(3)] == [2 << 32 | 1, 2 << 32, 1 << 32 | 3]


def test_lengths_out_of_order_change_nothing() -> None:
    manager = Manager(one_full(4), "virtual")
    (handle,) = active(manager, (64, 40))
    before = manager.snapshot()
    with pytest.raises(ArgumentError, match="History length cannot be decreased: 39 is below 40"):
        manager.resize(handle, None, 39)
    with pytest.raises(ArgumentError, match="capacity 39: must be at least"):
        manager.resize(handle, 39, None)
    with pytest.raises(ArgumentError, match="at most 2147483647"):
        manager.resize(handle, 1 << 31, None)
    with pytest.raises(NeverFitsError):
        manager.resize(handle, 129, None)
    assert manager.snapshot() == before
    manager.audit()


def test_not_now_and_never() -> None:  # B121, B122
    manager = Manager(one_full(10), "virtual")
    first, second = active(manager, (9 * 32, 0), (0, 0))
    before = manager.snapshot()
    assert not manager.resize(second, 64, 0)
    assert manager.snapshot() == before
    with pytest.raises(NeverFitsError):
        manager.resize(second, 20 * 32, 0)
    manager.close(first)
    assert manager.resize(second, 64, 0)
    manager.audit()


def test_block_counts_at_the_edges() -> None:  # B196, B022
    manager = Manager(one_full(32), "virtual")
    (handle,) = active(manager, (0, 0))
    for capacity, blocks in ((1, 1), (32, 1), (33, 2), (31, 1), (1024, 32)):
        assert manager.resize(handle, capacity, None)
        assert len(pages(manager, handle)) == blocks
    with pytest.raises(NeverFitsError):
        manager.resize(handle, 1025, None)
    assert manager.lengths(handle)[2] == 1024


def test_shrink_gives_the_tail_back() -> None:  # scenario 22
    manager = Manager(one_full(8, tpb=4), "virtual")
    (handle,) = active(manager, (8, 0))
    assert len(pages(manager, handle)) == 2
    assert manager.resize(handle, 4, 0)
    assert pages(manager, handle) == [0]
    assert free(manager) == [7]
    assert manager.resize(handle, 12, 0)
    assert pages(manager, handle) == [0, 1, 2]


def test_slots_released_by_a_call_may_be_handed_out_by_it() -> None:
    manager = Manager(slots_config([attention(0, 8, MIB)], 5, tpb=4), "virtual")
    (handle,) = active(manager, (16, 0))
    assert manager.resize(handle, 28, 16)
    assert pages(manager, handle) == [-1, -1, 2, 3, 0, 1, 4]
    manager.audit()


def test_windowed_pages_come_and_go() -> None:  # B032
    manager = Manager(slots_config([attention(0, 64, MIB)], 32, tpb=16), "virtual")
    (handle,) = active(manager, (304, 0))
    assert manager.resize(handle, None, 300)
    assert pages(manager, handle) == [-1] * 14 + [14, 15, 16, 17, 18]
    (late,) = active(manager, (300, 300))  # never allocates what is out of the window
    assert pages(manager, late) == [-1] * 14 + [0, 1, 2, 3, 4]
    manager.audit()


def test_stale_pages_are_held_until_committing_stops() -> None:
    manager = Manager(slots_config([attention(0, 8, MIB)], 8, tpb=4), "virtual")
    (handle,) = active(manager, (20, 0), keep=True)
    assert manager.commit_allowed(handle)
    assert manager.resize(handle, None, 16)
    assert pages(manager, handle) == [-1, -1, 2, 3, 4]
    assert manager.held_page_indices(handle, 0, 0).tolist() == [0, 1, 2, 3, 4]
    assert free(manager) == [3]
    manager.audit()
    manager.suspend(handle)
    manager.stop_committing(handle)  # C3: legal while suspended, and again
    manager.stop_committing(handle)
    assert free(manager) == [5]
    assert not manager.commit_allowed(handle)
    assert manager.held_page_indices(handle, 0, 0).tolist() == [-1, -1, 2, 3, 4]
    manager.audit()


def test_min_snapshot_does_not_hold() -> None:
    layers = [attention(0, 8, MIB)]
    manager = Manager(slots_config(layers, 8, tpb=4, commit_min_snapshot=True), "virtual")
    (handle,) = active(manager, (20, 0), keep=True)
    assert manager.resize(handle, None, 16)
    assert free(manager) == [5]
    manager.audit()


def test_held_pages_do_not_count_towards_never() -> None:
    manager = Manager(slots_config([attention(0, 8, MIB)], 4, tpb=4), "virtual")
    (handle,) = active(manager, (16, 0), keep=True)
    assert manager.resize(handle, 16, 16)
    assert not manager.resize(handle, 20, 16)  # the held ones are in the way now, but need not be
    manager.stop_committing(handle)
    assert manager.resize(handle, 20, 16)


def test_window_pool_full_while_full_pool_has_room() -> None:  # B042
    layers = [attention(0, None, MIB // 2), attention(1, 128, MIB)]
    manager = Manager(config(layers, 118 * MIB, initial_pool_ratio=[0.84, 0.16]), "virtual")
    assert manager.slot_counts()[1] == 9
    first, second = active(manager, (256, 0), (0, 0))
    assert manager.resize(first, 300, 256)
    before = manager.snapshot()
    assert not manager.resize(second, 256, 0)
    assert manager.snapshot() == before
    assert manager.resize(second, 96, 0)
    manager.audit()


def test_one_chunk_or_small_ones() -> None:  # B212
    manager = Manager(slots_config([attention(0, 48, MIB)], 4, tpb=16), "virtual")
    (handle,) = active(manager, (0, 0))
    with pytest.raises(NeverFitsError):
        manager.resize(handle, 80, 0)
    for done in range(0, 80, 16):
        assert manager.resize(handle, done + 16, done)
    manager.audit()


def test_lazy_and_whole_reservation_end_alike() -> None:  # B217
    def run(chunk: int) -> list[list[int]]:
        manager = Manager(config([attention(0), attention(1, 128)]), "virtual")
        (handle,) = active(manager, (0, 0))
        for end in range(chunk, 1001, chunk):
            assert manager.resize(handle, end, None)
        assert manager.resize(handle, 1000, 1000)
        return [[page >= 0 for page in pages(manager, handle, group)] for group in range(2)]

    assert run(1) == run(1000)


def test_gate_counts_what_others_hold() -> None:
    manager = Manager(one_full(20, max_util_for_resume=0.5), "virtual")
    first, second = active(manager, (10 * 32, 0), (32, 0))
    manager.suspend(second)
    assert manager.resume(second, None)  # 10 of 20 is not above one half
    assert manager.resize(first, 11 * 32, 0)
    manager.suspend(second)
    assert not manager.resume(second, None)
    manager.suspend(first)
    assert manager.resume(second, None)  # nobody else is active: open
    assert not manager.resize(second, 320, 0)
    third = manager.create()
    assert not manager.resume(third, None)


def test_state_slots() -> None:  # scenario 38, B016, B021
    manager = Manager(config([attention(0), ssm(1), attention(2), ssm(3)]), "host")
    handle = manager.create()
    assert manager.ssm_slot(handle, 1, 0) == -1
    assert manager.resume(handle, None)
    assert manager.resize(handle, 12, 0)
    slot = manager.ssm_slot(handle, 1, 0)
    assert slot == 0
    assert pages(manager, handle, 1) == [-1]
    assert manager.ssm_slot(handle, 0, 0) == -1
    manager.suspend(handle)
    assert manager.resume(handle, None)
    assert manager.ssm_slot(handle, 1, 0) == slot
    totals = manager.slot_counts()
    assert [total - left for total, left in zip(totals, free(manager), strict=True)] == [1, 1]
    manager.audit()
    manager.close(handle)
    assert free(manager) == totals


def test_states_are_not_gated_but_can_be_short() -> None:
    layers = [attention(0), ssm(1, 2 * MIB)]
    manager = Manager(config(layers, 6 * MIB), "virtual")
    states = manager.slot_counts()[1]
    handles = [manager.create() for _ in range(states + 1)]
    assert [manager.resume(handle, None) for handle in handles] == [True] * states + [False]
    assert manager.status(handles[-1]) == SUSPENDED
    assert manager.stream(handles[-1]) is None
    manager.audit()


# -------------------------------------------------------------------------------------------------------- buffers


def test_attached_buffer_follows() -> None:  # scenario 20
    manager = Manager(slots_config([attention(0, 8, MIB)], 8, tpb=4), "host")
    (handle,) = active(manager, (8, 0))
    with pytest.raises(ArgumentError):
        manager.attach_buffer(handle, 0, 0, i32(0))
    row = np.full(4, 123, np.int32)
    manager.attach_buffer(handle, 0, 0, row)
    assert row.tolist() == [0, 1, -1, -1]
    assert pages(manager, handle) == [0, 1, -1, -1]
    assert manager.resize(handle, 16, 15)  # 0 and 1 went stale
    assert row.tolist() == [-1, -1, 0, 1]
    with pytest.raises(ArgumentError, match="attached"):
        manager.resize(handle, 17, None)
    assert manager.resize(handle, 15, None)
    manager.audit()
    with pytest.raises(ValueError, match="cannot resize"):
        row.resize(8)
    manager.suspend(handle)
    assert row.tolist() == [-1] * 4
    manager.attach_buffer(handle, 0, 0, row.data)
    assert row.tolist() == [-1] * 4
    assert manager.resume(handle, None)
    assert max(row.tolist()) >= 0
    manager.attach_buffer(handle, 0, 0, None)
    assert len(pages(manager, handle)) == 4
    manager.attach_buffer(handle, 0, 0, row)
    manager.close(handle)
    assert row.tolist() == [-1] * 4


def test_buffers_of_every_group_and_wrong_ones() -> None:  # C9
    manager = Manager(config([attention(0), ssm(1)]), "host")
    handle = manager.create()
    rows = [np.full(3, 9, np.int32) for _ in range(2)]
    for group, row in enumerate(rows):
        manager.attach_buffer(handle, 0, group, row)
    assert manager.resume(handle, None)
    assert manager.resize(handle, 40, 0)
    assert [row.tolist() for row in rows] == [[0, 1, -1], [-1, -1, -1]]
    manager.audit()
    read_only = np.zeros(3, np.int32)
    read_only.flags.writeable = False
    for wrong in (np.zeros(3, np.int64), np.zeros((3, 1), np.int32), np.zeros(6, np.int32)[::2], read_only):
        with pytest.raises(ArgumentError):
            manager.attach_buffer(handle, 0, 0, wrong)
    with pytest.raises(ArgumentError):
        manager.attach_buffer(handle, 1, 0, rows[0])
    with pytest.raises(UnknownBufferError):
        manager.attach_buffer(handle, 0, 2, rows[0])
    manager.attach_buffer(handle, 0, 0, None)
    manager.attach_buffer(handle, 0, 0, None)


def test_pool_memory() -> None:
    manager = Manager(one_full(3), "host")
    memory = manager.pool_memory(0, 0)
    assert (memory.nbytes, memory.ctypes.data) == (6 * MIB, manager.pool_addresses()[0][0])
    memory[:] = 1
    with pytest.raises(ArgumentError):
        manager.pool_memory(0, 1)
    manager.shutdown()
    assert int(memory[-1]) == 1
    with pytest.raises(UnsupportedError):
        Manager(one_full(3), "virtual").pool_memory(0, 0)


# ---------------------------------------------------------------------------------------------------------- beams


def test_beams_share_the_past_and_copy_the_tail() -> None:  # B162
    manager = Manager(slots_config([attention(0, None, MIB)], 8), "host")
    (handle,) = active(manager, (41, 40))
    memory = manager.pool_memory(0, 0).reshape(8, -1)
    memory[1] = 77
    manager.set_beam_width(handle, 4)
    assert [pages(manager, handle, 0, beam) for beam in range(4)] == [[0, 1], [-1, 2], [-1, 3], [-1, 4]]
    assert (memory[2:5] == 77).all()
    assert free(manager) == [3]
    manager.audit()
    (other,) = active(manager, (64, 0))
    with pytest.raises(OutOfPagesError):
        manager.set_beam_width(other, 2)
    manager.close(other)
    manager.audit()
    manager.set_beam_width(handle, 2)
    assert manager.beam_width(handle) == 2
    with pytest.raises(ArgumentError):
        pages(manager, handle, 0, 2)
    manager.close(handle)
    assert free(manager) == [8]


def test_beams_at_a_block_boundary() -> None:  # scenario 106
    manager = Manager(one_full(16, tpb=4), "virtual")
    (handle,) = active(manager, (5, 4))
    manager.set_beam_width(handle, 2)
    first, second = pages(manager, handle, 0, 1)
    assert first == -1
    assert second >= 0
    assert manager.resize(handle, 12, 8)  # new blocks per beam, ordinals then beams
    assert [pages(manager, handle, 0, beam) for beam in range(2)] == [[0, 1, 3], [-1, 2, 4]]
    manager.set_beam_width(handle, 3)  # a later beam shares more
    assert pages(manager, handle, 0, 2) == [-1, -1, 5]
    manager.audit()
    with pytest.raises(NeverFitsError):
        manager.set_beam_width(handle, 40)
    with pytest.raises(ArgumentError):
        manager.set_beam_width(handle, 0)
    manager.suspend(handle)
    with pytest.raises(LogicError):
        manager.set_beam_width(handle, 1)
    manager.audit()


def test_beams_copy_states_and_windows() -> None:
    manager = Manager(config([attention(0, 4), ssm(1), attention(2)], tpb=4), "host")
    handle = manager.create()
    assert manager.resume(handle, None)
    assert manager.resize(handle, 15, 14)
    state_group = manager.layout().life_cycles[1].pool_group
    states = manager.pool_memory(state_group, 0).reshape(manager.slot_counts()[state_group], -1)
    states[manager.ssm_slot(handle, 1, 0)] = 5
    manager.set_beam_width(handle, 3)
    copies = [manager.ssm_slot(handle, 1, beam) for beam in range(3)]
    assert len(set(copies)) == 3
    assert all((states[slot] == 5).all() for slot in copies)
    assert [page >= 0 for page in pages(manager, handle, 0, 2)] == [False, False, False, True]
    manager.audit()
    manager.set_beam_width(handle, 1)
    manager.audit()


# ----------------------------------------------------------------------------------------------- manager, threads


def test_shutdown_needs_closed_caches() -> None:  # scenarios 28, 29
    manager = Manager(one_full(4), "host")
    handles = [manager.create() for _ in range(3)]
    with pytest.raises(LogicError, match=r"shutdown.*3 KV cache\(s\) still open"):
        manager.shutdown()
    manager.close(handles.pop())
    with pytest.raises(LogicError, match=r"2 KV cache\(s\)"):
        manager.shutdown()
    handles.append(manager.create())  # the refusal changed nothing
    assert manager.resume(handles[-1], None)
    for handle in handles:
        manager.close(handle)
    manager.shutdown()
    manager.shutdown()
    for call in (manager.create, manager.statistics, manager.snapshot, manager.pool_addresses):
        with pytest.raises(LogicError, match="shut down"):
            call()
    assert manager.layout().grain == 2 * MIB
    assert manager.num_open() == 0


def test_second_thread_in_a_cache_is_refused() -> None:
    manager = Manager(one_full(4), "virtual")
    (handle,) = active(manager, (32, 0))
    holder = threading.Thread(target=manager._hold_lock, args=(0.5,))
    holder.start()
    time.sleep(0.1)
    first = threading.Thread(target=manager.resize, args=(handle, 64, None))
    first.start()
    time.sleep(0.1)
    with pytest.raises(LogicError, match="another thread"):
        manager.resize(handle, 96, None)
    with pytest.raises(LogicError, match="another thread"):
        manager.step(np.array([handle]), i32(0), i32(64), i32(0), np.zeros((1, 1, 4), np.int32))
    first.join()
    holder.join()
    assert manager.lengths(handle)[2] == 64
    assert manager.resize(handle, 96, None)


def test_many_threads_with_their_own_caches() -> None:
    manager = Manager(one_full(64), "virtual")
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for round_ in range(100):
                (handle,) = active(manager, (32 + round_ % 96, 0))
                assert len(set(pages(manager, handle))) == manager.lengths(handle)[3]
                manager.close(handle)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    manager.audit()
    assert free(manager) == [64]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads about
def test_child_of_a_fork_is_refused() -> None:
    manager = Manager(one_full(4), "host")
    (handle,) = active(manager, (32, 0))
    child = os.fork()
    if child == 0:
        try:
            manager.resize(handle, 64, None)
        except LogicError as error:
            os._exit(0 if "created in another process (fork)" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert manager.resize(handle, 64, None)


def test_corruption_latches() -> None:
    manager = Manager(one_full(4), "virtual")
    (handle,) = active(manager, (64, 0))
    manager._tier.allocators[0].release(1)
    for _ in range(2):
        with pytest.raises(CorruptedError, match="invariant broken"):
            manager.audit()
    with pytest.raises(CorruptedError, match="invariant broken"):
        manager.close(handle)

    manager = Manager(one_full(4), "virtual")
    (handle,) = active(manager, (64, 0))
    manager._tier.allocators[0].release(1)
    with pytest.raises(CorruptedError, match="slot 1"):
        manager.resize(handle, 32, 0)
