"""Threads of a test, and what they raised."""

from __future__ import annotations

import threading


def run_all(*targets, stop: threading.Event | None = None) -> list[BaseException]:
    """Run each in a thread of its own; what they raised. The first that fails sets ``stop``, so that nobody goes on."""
    errors: list[BaseException] = []

    def guarded(target) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)
            if stop is not None:
                stop.set()

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    return errors
