"""Finding the first of several stop strings in text that arrives in pieces (Aho and Corasick 1975)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence


class StopStrings:
    """The automaton of some stop strings, shared by all choices of a request: never changed once made.

    Costs about 2 us a character to make. Iterates over the strings. ``stop`` strings must not be empty.
    """

    __slots__ = ("_strings", "depth", "fail", "goto", "match")

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise ValueError("a stop string is empty")
        self._strings = tuple(stop)
        self.goto: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match: list[str | None] = [None]  # the longest stop string that ends in a state
        for string in stop:
            self._add(string)
        self.fail = self._failures()

    def __iter__(self) -> Iterator[str]:
        """The strings."""
        return iter(self._strings)

    def __len__(self) -> int:
        """How many."""
        return len(self._strings)

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            following = self.goto[state].get(char)
            if following is None:
                following = len(self.goto)
                self.goto[state][char] = following
                self.goto.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = following
        self.match[state] = string

    def _failures(self) -> list[int]:
        """Where to go on when a character does not fit: the longest proper suffix that is a prefix too."""
        fail = [0] * len(self.goto)
        queue = deque(self.goto[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self.goto[state].items():
                queue.append(following)
                back = fail[state]
                while char not in self.goto[back] and back:
                    back = fail[back]
                fail[following] = self.goto[back].get(char, 0)
                if self.match[following] is None:
                    self.match[following] = self.match[fail[following]]
        return fail


class StopMatcher:
    """One text's place in the automaton: the longest suffix of the text that is a prefix of a stop string.

    Linear in the text, whatever the number of stop strings.
    """

    __slots__ = ("_state", "_strings")

    def __init__(self, stop: StopStrings | Sequence[str]) -> None:
        self._strings = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self._state = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that may become a stop string."""
        return self._strings.depth[self._state]

    def feed(self, text: str) -> tuple[int, str] | None:
        """The end in ``text`` of the first stop string to be complete, and that string (the longest of
        those that end there); None when none is. After a match the matcher is spent."""
        strings, state = self._strings, self._state
        goto, fail, match = strings.goto, strings.fail, strings.match
        for index, char in enumerate(text):
            while (following := goto[state].get(char)) is None and state:
                state = fail[state]
            state = following or 0
            if (found := match[state]) is not None:
                self._state = state
                return index + 1, found
        self._state = state
        return None
