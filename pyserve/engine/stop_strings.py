"""Finding the first of several stop strings in text that arrives in pieces (Aho and Corasick 1975)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """An automaton whose state is the longest suffix of the text that is a prefix of a stop string.

    Linear in the text, whatever the number of stop strings. ``stop`` strings must not be empty.
    """

    __slots__ = ("_depth", "_fail", "_goto", "_match", "_state")

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise ValueError("a stop string is empty")
        self._goto: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]  # the longest stop string that ends in a state
        for string in stop:
            self._add(string)
        self._fail = self._failures()
        self._state = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that may become a stop string."""
        return self._depth[self._state]

    def feed(self, text: str) -> tuple[int, str] | None:
        """The end in ``text`` of the first stop string to be complete, and that string (the longest of
        those that end there); None when none is. After a match the matcher is spent."""
        goto, fail, match, state = self._goto, self._fail, self._match, self._state
        for index, char in enumerate(text):
            while (following := goto[state].get(char)) is None and state:
                state = fail[state]
            state = following or 0
            if (found := match[state]) is not None:
                self._state = state
                return index + 1, found
        self._state = state
        return None

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            following = self._goto[state].get(char)
            if following is None:
                following = len(self._goto)
                self._goto[state][char] = following
                self._goto.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = following
        self._match[state] = string

    def _failures(self) -> list[int]:
        """Where to go on when a character does not fit: the longest proper suffix that is a prefix too."""
        fail = [0] * len(self._goto)
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._goto[state].items():
                queue.append(following)
                back = fail[state]
                while char not in self._goto[back] and back:
                    back = fail[back]
                fail[following] = self._goto[back].get(char, 0)
                if self._match[following] is None:
                    self._match[following] = self._match[fail[following]]
        return fail
