"""What a call has changed so far, so that a call that fails changes nothing.

Whoever changes state that outlives the call (slots, pages, nodes, queues, fields of a request) writes down first how to
take the change back.  One journal per manager: calls come one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from operator import delitem, setitem
from typing import Any

Savepoint = int
"""A position in the journal; valid until the call ends or an older one is undone to."""


class Journal:
    """Undo log of the running call; empty between calls."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[tuple[Any, ...]] = []  # a function and its arguments

    def __len__(self) -> int:
        return len(self._entries)

    def on_undo(self, function: Callable[..., Any], *arguments: Any) -> None:
        """``function(*arguments)`` takes a change back; it can not fail and finds the state as right after the change."""
        self._entries.append((function, *arguments))

    def set(self, record: Any, name: str, value: Any) -> None:
        """``record.name = value``."""
        self._entries.append((setattr, record, name, getattr(record, name)))
        setattr(record, name, value)

    def set_item(self, items: list[Any], index: int, value: Any) -> None:
        """``items[index] = value``."""
        self._entries.append((setitem, items, index, items[index]))
        items[index] = value

    def set_slice(self, items: list[Any], begin: int, end: int, values: list[Any]) -> None:
        """``items[begin:end] = values``; the lengths may differ, so it also appends, inserts and deletes."""
        self._entries.append((setitem, items, slice(begin, begin + len(values)), items[begin:end]))
        items[begin:end] = values

    def append(self, items: list[Any], value: Any) -> None:
        """``items.append(value)``."""
        self._entries.append((list.pop, items))
        items.append(value)

    def put(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """``mapping[key] = value``; the order of a dictionary is restored for a new key only."""
        if key in mapping:
            self._entries.append((setitem, mapping, key, mapping[key]))
        else:
            self._entries.append((delitem, mapping, key))
        mapping[key] = value

    def remove(self, mapping: MutableMapping[Any, Any], key: Any) -> None:
        """``del mapping[key]``; an undo puts it at the end of a dictionary's order."""
        self._entries.append((setitem, mapping, key, mapping[key]))
        del mapping[key]

    def savepoint(self) -> Savepoint:
        """Where :meth:`undo_to` can return to."""
        return len(self._entries)

    def undo_to(self, savepoint: Savepoint) -> None:
        """Take back everything that came after ``savepoint``, newest first."""
        while len(self._entries) > savepoint:
            function, *arguments = self._entries.pop()
            function(*arguments)

    def keep(self) -> None:
        """The call has succeeded: forget how to undo it."""
        self._entries.clear()

    @contextmanager
    def call(self) -> Iterator[Journal]:
        """Around everything a call changes: an exception undoes all of it, else it stays."""
        assert not self._entries, "calls come one at a time"
        try:
            yield self
        except BaseException:
            self.undo_to(0)
            raise
        self.keep()
