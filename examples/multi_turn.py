"""A chat of several turns: what earlier turns computed is reused. Run it with ``python examples/multi_turn.py``.

Three users talk to one assistant with a common system prompt; each prompt repeats the conversation so far. The "model"
writes as the key of every token a value that depends on all tokens before it, and reads back whatever it did not compute
itself: a page that belongs to another prefix would show as a wrong key.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from kvpool.models import config_for
from kvpool.v2 import KVCache, KVCacheManager

MODEL, HEADS, HEAD_DIM = "gpt-oss-20b", 8, 64
WINDOW, LAYERS = 128, (0, 1)  # layer 0 reads a window, layer 1 everything
USERS, TURNS = 3, 4
SYSTEM, QUESTION, ANSWER = 300, 40, 80  # tokens
Tokens = npt.NDArray[np.int32]


class Assistant:
    """Answers one prompt at a time from the manager's memory."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.groups = [manager.get_layer_group_id(layer) for layer in LAYERS]
        self.keys = [manager.get_buffers(layer, "key", np.float16, HEADS, HEAD_DIM) for layer in LAYERS]
        self.read = self.wrong = 0

    def answer(self, prompt: Tokens, reply: Tokens) -> int:
        """Serve one turn; tokens of the prompt that were not computed again."""
        text = np.concatenate([prompt, reply])
        values = key_values(text)
        # The last token of the prompt is computed in any case: its query yields the first token of the answer.
        with self.manager.create_kv_cache(None, prompt[:-1]) as cache:
            reused = cache.num_committed_tokens
            if not cache.resume():
                raise SystemExit("the pool is too full")  # an executor would try again later
            self.check(cache, values, reused)
            known = reused
            for end in range(
                prompt.size, text.size
            ):  # the prompt at once, then token by token; the last one is not fed
                if not cache.resize(end):
                    raise SystemExit("the pool is too full")
                self.write(cache, values, known, end)
                cache.commit(text[known:end])  # from here on others may share it
                known = end
        return reused

    def check(self, cache: KVCache, values: npt.NDArray[np.float16], end: int) -> None:
        for layer, pages in enumerate(self.pages(cache)):
            positions = np.arange(max(0, end + 1 - WINDOW) if layer == 0 else 0, end)
            found = self.keys[layer][pages[positions // self.block], positions % self.block]
            self.read += positions.size
            self.wrong += int((found != values[positions, None, None]).any((1, 2)).sum())

    def write(self, cache: KVCache, values: npt.NDArray[np.float16], begin: int, end: int) -> None:
        for layer, pages in enumerate(self.pages(cache)):
            positions = np.arange(begin, end)
            self.keys[layer][pages[positions // self.block], positions % self.block] = values[positions, None, None]

    @property
    def block(self) -> int:
        return self.manager.tokens_per_block

    def pages(self, cache: KVCache) -> list[Tokens]:
        return [np.array(cache.get_base_page_indices(group), np.int32) for group in self.groups]


def key_values(text: Tokens) -> npt.NDArray[np.float16]:
    """One number per token that depends on every token up to it; exact in float16."""
    state, values = 1, []
    for token in text.tolist():
        state = (state * 31 + token + 1) % 1_000_003
        values.append(state % 2039)
    return np.array(values, np.float16)


def main() -> int:
    random = np.random.default_rng(0)

    def some(count: int) -> Tokens:
        return random.integers(0, 200_000, count, dtype=np.int32)

    config = config_for(MODEL, quota=96 << 20, max_seq_len=2048)
    chats = [some(SYSTEM)] * USERS
    total = reused = 0
    with KVCacheManager(config, device="host") as manager:
        assistant = Assistant(manager)
        print("turn  user  prompt  reused  computed")
        for turn in range(TURNS):
            for user in range(USERS):
                prompt, reply = np.concatenate([chats[user], some(QUESTION)]), some(ANSWER)
                hit = assistant.answer(prompt, reply)
                print(f"{turn + 1:4}  {user + 1:4}  {prompt.size:6}  {hit:6}  {prompt.size - hit:8}")
                chats[user] = np.concatenate([prompt, reply])
                total, reused = total + prompt.size, reused + hit
        print(
            f"{manager.backend}: {reused:,} of {total:,} prompt tokens reused ({reused / total:.0%}), "
            f"{assistant.read:,} keys read back, {assistant.wrong} wrong"
        )
    return 1 if assistant.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
