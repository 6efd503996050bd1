"""From committed tokens to text that may be shown: only whole characters, never a stop string."""

from collections.abc import Iterable, Sequence
from typing import Any


class TextStream:
    """Incremental detokenizing with stop strings matched on text, across token boundaries.

    Text that may be the beginning of a stop string is held back until that is decided, together with the tokens after
    the one in which it begins. So neither text nor tokens depend on where blocks end.
    """

    def __init__(self, detokenizer: Any, stop_strings: Sequence[str] = ()):
        self._detokenizer = detokenizer
        self._detokenizer.reset()
        self._stop_strings = tuple(stop_strings)
        self._held = ""  # text not decided yet
        self._released = 0  # characters before it
        self._waiting: list[tuple[int, int]] = []  # tokens not decided yet, and where the text of each begins
        self.stopped = False
        self.segments: list[str] = []  # text of each token of the last `add`; `finish` appends the rest to the last

    def add(self, tokens: Iterable[int]) -> tuple[str, list[int]]:
        """The text and tokens that became certain with ``tokens``; nothing after a stop string."""
        segment, self.segments = "", []
        for token in tokens:  # read one by one: mlx-lm's naive detokenizer forgets a half character after a newline
            begin = self._released + len(self._held) + len(segment) + self._spaces_kept_back()
            self._waiting.append((token, begin))
            self._detokenizer.add_token(token)
            self.segments.append(self._detokenizer.last_segment)
            segment += self.segments[-1]
        return self._release(segment)

    def finish(self) -> tuple[str, list[int]]:
        """The rest of text and tokens after the last token."""
        self._detokenizer.finalize()
        rest = self._detokenizer.last_segment
        self.segments = [*self.segments[:-1], "".join([*self.segments[-1:], rest])]
        return self._release(rest, last=True)

    def _spaces_kept_back(self) -> int:
        """Spaces already added that mlx-lm's byte-level detokenizer shows only with the next token."""
        pending = getattr(self._detokenizer, "_unflushed", None)
        return len(pending) - len(pending.lstrip("Ġ")) if isinstance(pending, str) else 0

    def _release(self, segment: str, last: bool = False) -> tuple[str, list[int]]:
        """What is certain now. The stop string that begins first wins, so the text does not depend on block borders."""
        if self.stopped:
            return "", []
        text = self._held + segment
        found = min((i for i in (text.find(s) for s in self._stop_strings) if i >= 0), default=None)
        pending = 0 if last else max((_overlap(text, s) for s in self._stop_strings), default=0)
        end = len(text) - pending
        if found is not None and found <= end:  # nothing that begins earlier can still become a stop string
            self.stopped, end, text = True, found, text[:found]
        self._held = text[end:]
        self._released += end
        certain = [token for token, begin in self._waiting if not self._stop_strings or begin <= self._released]
        self._waiting = self._waiting[len(certain) :]
        return text[:end], certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
