"""States at chunk borders, so that a prefix shared by several prompts is computed once.

A recurrent state cannot be cut back to an earlier position, so it is kept as it was at borders: at
every `rows` tokens of a prompt. A cache row, on the other hand, belongs to one position; so a
checkpoint holds the rows of its own chunk only, and a prefix is the chain of its chunks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from mkc.runtime.backends.backend import Snapshot

DIGEST_BYTES = 16


@dataclass(kw_only=True)
class PrefixCacheStatistics:
    """Counters since the cache was made.

    Attributes:
      queries, hits: prompts looked up, and those of which something was found.
      prompt_tokens, hit_tokens: of these prompts.
      evictions: chunks that gave way to others.
    """

    queries: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Attributes:
    tokens: of this chunk alone; with its key and its parents they are the whole prefix.
    """

    tokens: tuple[int, ...]
    snapshot: Snapshot


class PrefixCache:
    """Checkpoints of one backend by the tokens before them; the least recently used go first.

    Attributes:
      rows: tokens of a chunk.
      max_bytes: what all checkpoints together may take.
      bytes: what they take.
    """

    def __init__(self, *, rows: int, max_bytes: int) -> None:
        assert rows >= 1, f"{rows} tokens in a chunk"
        self.rows = rows
        self.max_bytes = max_bytes
        self.bytes = 0
        self.statistics = PrefixCacheStatistics()
        # Least recently used first. Whoever uses a chunk uses its parents after it, so a parent is
        # never before its children, and what is evicted first has none.
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def find(self, tokens: Sequence[int]) -> list[Snapshot]:
        """Checkpoints of the longest known prefix, to be restored in order.

        The prefix is shorter than the prompt: the last token has to be fed to get its logits.
        """
        found: list[tuple[bytes, _Chunk]] = []
        for key, chunk_tokens in self._keys(tokens[:-1]):
            chunk = self._chunks.get(key)
            if chunk is None or chunk.tokens != chunk_tokens:
                break
            found.append((key, chunk))
        self._touch([key for key, _ in found])
        self.statistics.queries += 1
        self.statistics.hits += bool(found)
        self.statistics.prompt_tokens += len(tokens)
        self.statistics.hit_tokens += len(found) * self.rows
        return [chunk.snapshot for _, chunk in found]

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether `add` would keep a checkpoint behind these tokens."""
        if not tokens or len(tokens) % self.rows:
            return False
        *parents, last = self._keys(tokens)
        return last[0] not in self._chunks and all(key in self._chunks for key, _ in parents)

    def add(self, tokens: Sequence[int], snapshot: Snapshot) -> bool:
        """Keeps the checkpoint behind `tokens`, unless its parents are gone or it is too large.

        Args:
          tokens: the whole prefix, a number of whole chunks.
          snapshot: with the cache rows of the last chunk.
        """
        assert snapshot.end == len(tokens), f"a checkpoint at {snapshot.end} of {len(tokens)}"
        assert snapshot.start == len(tokens) - self.rows, "a checkpoint of another chunk"
        if not self.wants(tokens):
            return False
        *parents, (key, chunk_tokens) = self._keys(tokens)
        self._chunks[key] = _Chunk(tokens=chunk_tokens, snapshot=snapshot)
        self.bytes += snapshot.bytes
        self._touch([*(parent for parent, _ in parents), key])
        while self.bytes > self.max_bytes:
            evicted, chunk = self._chunks.popitem(last=False)
            self.bytes -= chunk.snapshot.bytes
            self.statistics.evictions += 1
            if evicted == key:
                return False
        return True

    def clear(self) -> None:
        """Forgets all checkpoints."""
        self._chunks.clear()
        self.bytes = 0

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Marks chunks, parents first, as used now."""
        for key in reversed(keys):
            self._chunks.move_to_end(key)

    def _keys(self, tokens: Sequence[int]) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """Key and tokens of every whole chunk; a key depends on all tokens up to its end."""
        key = b""
        for start in range(0, len(tokens) - self.rows + 1, self.rows):
            chunk = tuple(tokens[start : start + self.rows])
            content = np.asarray(chunk, np.int64).tobytes()
            key = blake2b(key + content, digest_size=DIGEST_BYTES).digest()
            yield key, chunk
