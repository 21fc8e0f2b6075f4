"""Threads and instruction sets are chosen by the environment, or by hand."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from pyserve._C import Decoder, Linear, get_num_threads, set_num_threads, supported_isas
from tests.model.harness import config_of, random_model


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    before = get_num_threads()
    yield
    set_num_threads(before)


@pytest.mark.parametrize("isa", supported_isas())
def test_environment_forces_an_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(random_model("llama")).as_dict()
    monkeypatch.delenv("PYSERVE_ISA", raising=False)
    assert Decoder(config).isa == supported_isas()[-1]
    monkeypatch.setenv("PYSERVE_ISA", isa)
    assert Decoder(config).isa == isa
    monkeypatch.setenv("PYSERVE_ISA", "sse9")
    with pytest.raises(ValueError, match="sse9"):
        Decoder(config)


def test_environment_sets_the_number_of_threads() -> None:
    command = "from pyserve._C import get_num_threads as n; print(n())"
    done = subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, "PYSERVE_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["3"]


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_an_impossible_number_of_threads_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        set_num_threads(threads)


def test_callers_on_several_threads_share_the_pool() -> None:
    set_num_threads(3)
    torch.manual_seed(0)
    linear = Linear(torch.randn(300, 64))
    x = torch.randn(40, 64)
    expected = linear.apply(x)
    wrong: list[int] = []

    def call() -> None:
        wrong.extend(i for i in range(200) if not torch.equal(linear.apply(x), expected))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []
