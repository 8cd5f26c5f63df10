"""The unit of replay: one request as a trace or a workload gives it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A prompt and the number of tokens to generate after it.

    ``index`` counts from 0 in the order of the file; ``arrival`` is in simulated seconds after the first request;
    ``hash_ids`` names the prompt's 512-token pieces (equal ids are equal tokens), None where the source has none.
    """

    index: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None

    @property
    def total_tokens(self) -> int:
        """The sequence's length at its end; what ``max_seq_len`` bounds."""
        return self.prompt_tokens + self.output_tokens
