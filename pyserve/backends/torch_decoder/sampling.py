"""Drawing tokens where the logits are: what ``_C.sample`` does on the CPU, through the op ``draw``."""

from __future__ import annotations

import torch
from torch import Tensor

from pyserve import _C
from pyserve.backends.torch_decoder.staging import Staging

_REASONS = {1: "the logits are not finite", 2: "no token has a finite logit"}


class DeviceSampler:
    """Draws from logits on ``device``; parameters go there in one copy, results come back in one wait."""

    def __init__(self, device: torch.device) -> None:
        self._staging = Staging(device)

    def sample(
        self, logits: Tensor, pool: _C.BlockPool, state: _C.SamplerState, rows: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        """The tokens int32 ``[R]`` on the device; and, on the host, what ``_C.sample`` returns.

        ``logits`` float32 ``[R, V]`` on the device are as they were afterwards. Raises ``_C.SampleError``.
        """
        wishes, width, failed = _C.pack_wishes(pool, state, rows, logits.shape[1])
        if failed:
            raise _sample_error(failed)
        self._staging.host(len(wishes)).copy_(wishes)
        sent = self._staging.send(len(wishes))
        drawn = torch.ops.pyserve.draw(logits.contiguous(), sent, width)
        tokens, logprobs, top_ids, top_logprobs, status = _to_host(drawn)
        if status.any():
            reasons = {i: _REASONS[code] for i, code in enumerate(status.tolist()) if code}
            raise _sample_error(reasons)
        return drawn[0], (tokens, logprobs, top_ids, top_logprobs)


def _to_host(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    if tensors[0].device.type == "cpu":
        return list(tensors)
    # Into pinned memory all of them, then one wait.
    there = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    for host, tensor in zip(there, tensors, strict=True):
        host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return there


def _sample_error(failed: dict[int, str]) -> _C.SampleError:
    reasons = " ".join(f"{index} ({reason})" for index, reason in failed.items())
    error = _C.SampleError(f"rows that cannot be sampled: {reasons}")
    error.failed = failed
    return error
