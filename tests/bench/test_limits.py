"""What the machine can do at best is measured sensibly, and an op's limit is its scarcest resource."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyserve import _C
from pyserve.bench.limits import Limits, Work, measure_limits

LIMITS = Limits(10e9, 100e9, 200e9, 800e9, 4e12, 2, "amx")


def test_the_scarcest_resource_is_the_limit() -> None:
    streaming = Work(memory_bytes=10e6, cached_bytes=1e6, int_operations=80e6)
    assert LIMITS.seconds(streaming) == pytest.approx(1e-3)
    assert LIMITS.bound(streaming) == "memory"
    assert LIMITS.percent(streaming, 2e-3) == pytest.approx(50)


def test_all_kinds_of_operations_share_the_arithmetic() -> None:
    mixed = Work(float_operations=100e6, int_operations=200e6, tile_operations=1e9)
    assert LIMITS.seconds(mixed) == pytest.approx(1e-3)
    assert LIMITS.bound(mixed) == "arithmetic"


def test_nothing_to_do_has_no_limit() -> None:
    assert LIMITS.seconds(Work()) == 0
    assert LIMITS.percent(Work(), 1.0) == 0


def test_measured_limits_are_positive_and_say_what_they_are_of() -> None:
    limits = measure_limits(4 << 20)
    assert limits.threads == _C.get_num_threads()
    assert limits.isa == _C.supported_isas()[-1]
    rates = limits.as_dict()
    everywhere = set(Work.__dataclass_fields__) - {"tile_operations"}
    assert all(float(rates[name]) > 1e8 for name in everywhere)


@pytest.mark.parametrize("isa", _C.supported_isas())
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_every_instruction_set_has_a_peak(isa: str, kind: str) -> None:
    assert _C.measure_peak(kind, 0.001, isa) > 1e8
    assert _C.measure_read(1 << 20, 0.001, isa) > 1e8


@pytest.mark.parametrize("isa", _C.supported_isas())
def test_tiles_have_a_peak_where_there_are_tiles(isa: str) -> None:
    assert (_C.measure_peak("tile", 0.001, isa) > 1e8) == (isa == "amx")


def test_limits_without_tiles_say_nothing_of_them() -> None:
    without = replace(LIMITS, tile_operations=0.0)
    assert without.seconds(Work(int_operations=800e6)) == pytest.approx(1e-3)
    assert "tiles" in str(LIMITS)
    assert "tiles" not in str(without)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="float32, int8 or tile"):
        _C.measure_peak("float16")
    with pytest.raises(ValueError, match="positive"):
        _C.measure_read(0)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "add", "silu_mul", "gelu_mul", "rotate"])
def test_row_kernels_can_be_timed_alone(op: str) -> None:
    assert 0 < _C.time_rows(op, 2, 128, 0.001) < 1


def test_unknown_row_kernels_and_odd_widths_are_refused() -> None:
    assert _C.time_rows("quantize", 1, 64, 0.0, "portable") > 0
    with pytest.raises(ValueError, match="no row kernel is called softmax"):
        _C.time_rows("softmax", 1, 64)
    with pytest.raises(ValueError, match="multiple of 64"):
        _C.time_rows("add", 1, 100)
