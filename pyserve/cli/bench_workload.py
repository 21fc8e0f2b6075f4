"""Which workload ``pyserve bench serve`` drives: its options, and the work made from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from pyserve.bench import workloads
from pyserve.bench.workload import Span, Work, random_work

Command = TypeVar("Command", bound=Callable[..., Any])

NAMES = (
    "random", "prefix_repetition", "sharegpt", "custom", "tenants", "deadline", "disconnect", "poison",
    "stall",
)  # fmt: skip
_FROM_FILE = ("sharegpt", "custom")


class SpanType(click.ParamType[Span]):
    """``N`` or ``LOW:HIGH``."""

    name = "N|LOW:HIGH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Span:
        """Parse, or fail with the usage."""
        if isinstance(value, Span):
            return value
        try:
            return Span.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@dataclass(frozen=True)
class Workload:
    """The options' values."""

    workload: str
    dataset: Path | None
    input_len: Span
    output_len: Span
    prefix_len: int
    num_prefixes: int
    tenant: tuple[str, ...]
    timeout_ms: Span
    fault_share: float
    stall_s: float

    def make(
        self, tokens: Sequence[int], tokenize: workloads.Tokenize, count: int, seed: int
    ) -> list[Work]:
        """``count`` requests, where there is no dataset of ``tokens``; raises click.UsageError where that
        cannot be done.
        """
        try:
            return self._with_faults(self._plain(tokens, tokenize, count, seed), seed)
        except ValueError as error:
            raise click.UsageError(str(error)) from error

    def check(self) -> None:
        """Raises click.UsageError where the workload lacks what it needs, or a file has no use."""
        if (self.dataset is not None) != (self.workload in _FROM_FILE):
            raise click.UsageError(
                f"--workload {self.workload} "
                + ("needs --dataset" if self.dataset is None else "takes no --dataset")
            )
        if (len(self.tenant) > 0) != (self.workload == "tenants"):
            raise click.UsageError(
                f"--workload {self.workload} "
                + ("takes no --tenant" if self.tenant else "needs --tenant KEY:NUMBER")
            )
        self._tenants()

    @property
    def first_key(self) -> str | None:
        """A tenant's key, for what is asked of the server beside the work."""
        return self._tenants()[0][0] if self.tenant else None

    def _plain(
        self, tokens: Sequence[int], tokenize: workloads.Tokenize, count: int, seed: int
    ) -> list[Work]:
        if self.dataset is not None:
            if self.workload == "sharegpt":
                return workloads.sharegpt(self.dataset, tokenize, count, seed)
            return workloads.custom(self.dataset, tokenize, count, self.output_len, seed)
        if self.workload == "prefix_repetition":
            return workloads.prefix_repetition(
                tokens, count, self.num_prefixes, self.prefix_len, self.input_len, self.output_len, seed
            )  # fmt: skip
        return random_work(tokens, count, self.input_len, self.output_len, seed)

    def _with_faults(self, work: list[Work], seed: int) -> list[Work]:
        match self.workload:
            case "tenants":
                return workloads.with_tenants(work, self._tenants())
            case "deadline":
                return workloads.with_deadlines(work, self.timeout_ms, seed)
            case "disconnect":
                return workloads.with_leavers(work, self.fault_share, seed)
            case "stall":
                return workloads.with_leavers(work, self.fault_share, seed, stall_s=self.stall_s)
            case "poison":
                return workloads.with_poison(work, self.fault_share, seed)
        return work

    def _tenants(self) -> list[tuple[str, int]]:
        tenants = []
        for item in self.tenant:
            key, _, number = item.rpartition(":")
            if not key or not number.isdecimal() or int(number) < 1:
                raise click.BadParameter(
                    "expected KEY:NUMBER, such as sk-polite:1", param_hint="--tenant"
                )
            tenants.append((key, int(number)))
        return tenants


def workload_options(command: Command) -> Command:
    """Adds what :class:`Workload` is made of."""
    for option in reversed(
        (
            click.option(
                "--workload", type=click.Choice(NAMES), default="random", show_default=True,
                help="What is asked; see bench/README.md.",
            ),
            click.option(
                "--dataset", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                help="sharegpt: its JSON. custom: JSONL of prompt and output_tokens.",
            ),
            click.option(
                "--input-len", type=SpanType(), default="16:512", show_default=True,
                help="Prompt tokens (prefix_repetition: after the prefix).",
            ),
            click.option(
                "--output-len", type=SpanType(), default="16:256", show_default=True, help="Tokens."
            ),
            click.option(
                "--prefix-len", type=click.IntRange(1), default=256, show_default=True,
                help="prefix_repetition: tokens of each shared prefix.",
            ),
            click.option(
                "--num-prefixes", type=click.IntRange(1), default=4, show_default=True,
                help="prefix_repetition: how many there are.",
            ),
            click.option(
                "--tenant", multiple=True, metavar="KEY:NUMBER",
                help="tenants: an API key, and how many requests of each round are its. Repeatable.",
            ),
            click.option(
                "--timeout-ms", type=SpanType(), default="500:5000", show_default=True,
                help="deadline: each request's.",
            ),
            click.option(
                "--fault-share", type=click.FloatRange(0, 1), default=0.25, show_default=True,
                help="disconnect, stall, poison: share of requests that misbehave.",
            ),
            click.option(
                "--stall-s", type=click.FloatRange(0), default=5.0, show_default=True,
                help="stall: how long a client does not read before it leaves.",
            ),
        )
    ):  # fmt: skip
        command = option(command)
    return command
