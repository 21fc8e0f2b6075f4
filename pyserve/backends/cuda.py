"""Whether there is CUDA to run on, asked without importing what only CUDA needs."""

from __future__ import annotations

from typing import Literal

import torch

from pyserve import extension
from pyserve.errors import ModelError


def missing_for_cuda() -> str | None:
    """What is not there to run on CUDA, in words; None where nothing is missing."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    if extension.build_info().cuda is None:
        return "pyserve's extension was built without CUDA; PYSERVE_CUDA=1 pip install -e . builds it in"
    return None


def choose_device(wanted: str) -> Literal["cpu", "cuda"]:
    """What ``--device`` means here: "auto" is CUDA where nothing is missing for it.

    Raises :class:`~pyserve.errors.ModelError` where "cuda" is asked for and something is missing.
    """
    if wanted == "cpu":
        return "cpu"
    missing = missing_for_cuda()
    if missing is None:
        return "cuda"
    if wanted == "cuda":
        raise ModelError(f"device: cuda was asked for, but {missing}")
    return "cpu"
