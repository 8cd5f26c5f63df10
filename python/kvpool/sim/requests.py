"""The unit of replay: one request as a trace or a workload gives it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A prompt and the number of tokens to generate after it.

    ``index`` counts from 0 in the order of the file; ``arrival`` is in simulated seconds after the first request.  What
    the prompt shares with others, none of it by default: ``hash_ids`` names all of its 512-token pieces (equal ids are
    equal tokens); its first ``system_tokens`` are those of the system prompt ``system``; it begins with everything that
    request ``follows`` had at its end, prompt and answer, and arrives at that moment.
    """

    index: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    system: int | None = None
    system_tokens: int = 0
    follows: int | None = None

    @property
    def total_tokens(self) -> int:
        """The sequence's length at its end; what ``max_seq_len`` bounds."""
        return self.prompt_tokens + self.output_tokens
