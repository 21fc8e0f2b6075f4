"""Each API key's own limits: tokens a minute, and requests at once.

A request reserves the most it may cost before it runs and gives back what it did not use. Everything here
is bounded by the number of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pyserve.errors import RateLimited
from pyserve.http.auth import ApiKey


@dataclass(slots=True)
class _Account:
    """``available`` tokens at ``at_s``; refills at the key's rate up to one minute's worth."""

    available: float
    at_s: float
    running: int = 0


class Lease:
    """What one request holds of its key's limits while it runs."""

    def __init__(self, reserved: int) -> None:
        self.spent = reserved

    def used(self, tokens: int) -> None:
        """Corrects the reservation to what was really used."""
        self.spent = tokens


class KeyLimits:
    """The accounts of all keys, on ``clock`` (seconds)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @contextmanager
    def hold(self, key: ApiKey, most_tokens: int) -> Iterator[Lease]:
        """Holds one place and ``most_tokens`` tokens; raises :class:`RateLimited` with when to retry.

        A request larger than a whole minute's allowance runs when the allowance is full.
        """
        if key.tokens_per_minute is None and key.max_concurrent is None:
            yield Lease(most_tokens)
            return
        account = self._account(key)
        if key.max_concurrent is not None and account.running >= key.max_concurrent:
            raise RateLimited(
                f"{key.max_concurrent} requests of this key are running", retry_after_s=1.0
            )
        rate = key.tokens_per_minute
        reserved = 0.0
        if rate is not None:
            reserved = min(float(most_tokens), rate)
            if reserved > account.available:
                wait_s = (reserved - account.available) / (rate / 60)
                raise RateLimited(
                    f"over this key's rate of {rate:g} tokens a minute", retry_after_s=wait_s
                )
        account.available -= reserved
        account.running += 1
        lease = Lease(most_tokens)
        try:
            yield lease
        finally:
            account.running -= 1
            if rate is not None:
                account.available += reserved - min(float(lease.spent), rate)

    def _account(self, key: ApiKey) -> _Account:
        now = self._clock()
        rate = key.tokens_per_minute or 0.0
        account = self._accounts.setdefault(key.name, _Account(rate, now))
        account.available = min(rate, account.available + (now - account.at_s) * rate / 60)
        account.at_s = now
        return account
