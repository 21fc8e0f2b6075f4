"""Rotary frequencies, with every context scaling that does not depend on the sequence at hand.

Computed in float32 with the same operations as ``transformers`` (modeling_rope_utils), so that the angles
agree to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pyserve.errors import ModelError
from pyserve.models.config import RopeConfig
from pyserve.models.fields import Fields


def make_rope(
    head_dim: int,
    theta: float,
    scaling: Mapping[str, object] | None = None,
    *,
    context_length: int,
    where: str,
) -> RopeConfig:
    """The rotary embedding that Hugging Face's ``rope_parameters`` / ``rope_scaling`` describe.

    ``context_length`` (tokens) stands in for an absent ``original_max_position_embeddings``; ``where`` names
    the file in errors. Types: default, linear (kaiokendev), llama3, yarn (arXiv 2309.00071), and dynamic NTK,
    which only changes anything beyond ``context_length`` and so equals default here. Raises ModelError for
    any other.
    """
    fields = Fields(scaling or {}, where)
    kind = fields.text("rope_type", fields.text("type", "default"))
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{where}: rotary embeddings over part of a head are not supported")
    inv_freq = base_frequencies(head_dim, theta)
    attention_factor = 1.0
    match kind:
        case "default" | "dynamic":
            pass
        case "linear":
            inv_freq = inv_freq / fields.number("factor")
        case "llama3":
            inv_freq = _llama3(inv_freq, fields, context_length)
        case "yarn":
            inv_freq, attention_factor = _yarn(head_dim, theta, fields, context_length)
        case _:
            raise ModelError(
                f"{where}: rope type {kind!r} is not supported (default, linear, dynamic, llama3, yarn are)"
            )
    return RopeConfig(tuple(inv_freq.tolist()), attention_factor)


def base_frequencies(head_dim: int, theta: float) -> Tensor:
    """Float32 ``[head_dim / 2]``: ``theta ** (-2 i / head_dim)``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponents)


def _llama3(inv_freq: Tensor, fields: Fields, context_length: int) -> Tensor:
    """Llama 3.1: long wavelengths divided by ``factor``, short ones kept, a ramp between them."""
    factor = fields.number("factor")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    original = fields.number("original_max_position_embeddings", context_length)
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    is_medium = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(is_medium, smoothed, scaled)


def _yarn(head_dim: int, theta: float, fields: Fields, context_length: int) -> tuple[Tensor, float]:
    """YaRN: interpolated where a dimension turns rarely, kept where it turns often; attention tempered."""
    original = fields.number("original_max_position_embeddings", context_length)
    factor = fields.number("factor", context_length / original)
    powers = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)

    def correction(rotations: float) -> float:
        return (head_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low = correction(fields.number("beta_fast", 32.0) or 32.0)
    high = correction(fields.number("beta_slow", 1.0) or 1.0)
    if fields.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (
        high - low if high != low else 0.001
    )
    kept = 1 - torch.clamp(ramp, 0, 1)
    inv_freq = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return inv_freq, _yarn_attention_factor(fields, factor)


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    def temper(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if fields.has("attention_factor"):
        return fields.number("attention_factor")
    mscale, all_dim = fields.number("mscale", 0.0), fields.number("mscale_all_dim", 0.0)
    return temper(mscale) / temper(all_dim) if mscale and all_dim else temper(1.0)


def rope_from_config(
    fields: Fields, head_dim: int, context_length: int, default_theta: float = 10000.0
) -> RopeConfig:
    """The one rotary embedding of a config.json, in transformers 5's spelling or in the older one."""
    scaling = fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {}
    theta = Fields(scaling, fields.where, "").number(
        "rope_theta", fields.number("rope_theta", default_theta)
    )
    merged: dict[str, object] = {"partial_rotary_factor": fields.raw("partial_rotary_factor")}
    merged.update(scaling)
    if fields.has("original_max_position_embeddings"):  # the outer one wins, as in transformers
        merged["original_max_position_embeddings"] = fields.raw("original_max_position_embeddings")
    return make_rope(head_dim, theta, merged, context_length=context_length, where=fields.where)
