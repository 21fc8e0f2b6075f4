"""A checkpoint's weights on a device, merged where one product does the work of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyserve.backends.source import WeightSource
from pyserve.errors import ModelError
from pyserve.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Linear:
    """``weight [out, in]``, ``bias [out]`` or None, both in the compute type."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """``x [rows, in]`` times the weight, ``[rows, out]``."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """float32 ``[size]``; a bias makes it a LayerNorm."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Layer:
    """``qkv`` has query, key and value rows in this order; ``gate_up`` gate rows (if gated), then up rows."""

    attn_norm: Norm
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    attn_post_norm: Norm | None
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    mlp_post_norm: Norm | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a decoder's. ``positions`` float32 ``[context_length, hidden_size]``, if they are learned."""

    embed: Tensor
    positions: Tensor | None
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the device; tied ones counted once."""
        return sum(t.nbytes for t in {id(t): t for t in _tensors(self)}.values())


def load_weights(
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int], None] | None = None,
) -> Weights:
    """Copies every tensor of ``source``; quantised ones are dequantised to ``dtype``.

    Raises :class:`~pyserve.errors.ModelError` where names or shapes do not fit the config.
    """
    config = source.config
    expected = dict(_expected(config))
    loaded: dict[str, Tensor] = {}
    unexpected = []
    for name, tensor in source.tensors():
        assert isinstance(tensor, Tensor)
        if name not in expected:
            unexpected.append(name)
            continue
        shape, kind = expected[name]
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{source.name}: weight {name} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        wanted = torch.float32 if kind == "vector" else dtype
        loaded[name] = tensor.to(device=device, dtype=wanted, copy=True).contiguous()
        if progress is not None:
            progress(tensor.nbytes)
    missing = sorted(n for n, (_, kind) in expected.items() if kind != "bias" and n not in loaded)
    if missing or unexpected:
        parts = [("missing", missing), ("unexpected", unexpected)]
        text = "; ".join(f"{what} {', '.join(names)}" for what, names in parts if names)
        raise ModelError(f"{source.name}: weights do not fit the model: {text}")
    return _assemble(config, loaded)


def _expected(config: DecoderConfig) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """Canonical names with shape and kind: "matrix", "bias" (optional), "vector" (stays float32)."""
    hidden, inner = config.hidden_size, config.intermediate_size

    def linear(
        name: str, rows: int, columns: int
    ) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
        yield f"{name}.weight", ((rows, columns), "matrix")
        yield f"{name}.bias", ((rows,), "bias")

    def norm(name: str) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
        yield f"{name}.weight", ((hidden,), "vector")
        if config.norm == "layer":
            yield f"{name}.bias", ((hidden,), "vector")

    yield "embed.weight", ((config.vocab_size, hidden), "matrix")
    if config.learned_positions:
        yield "positions.weight", ((config.context_length, hidden), "vector")
    if not config.tie_embeddings:
        yield "lm_head.weight", ((config.vocab_size, hidden), "matrix")
    yield from norm("final_norm")
    for i in range(config.num_layers):
        at = f"layers.{i}."
        for name in ("attn_norm", "mlp_norm"):
            yield from norm(at + name)
        if config.post_norms:
            yield from norm(at + "attn_post_norm")
            yield from norm(at + "mlp_post_norm")
        if config.qk_norm:
            yield at + "q_norm.weight", ((config.head_dim,), "vector")
            yield at + "k_norm.weight", ((config.head_dim,), "vector")
        yield from linear(at + "q", config.q_size, hidden)
        yield from linear(at + "k", config.kv_size, hidden)
        yield from linear(at + "v", config.kv_size, hidden)
        yield from linear(at + "o", hidden, config.q_size)
        for name in ("gate", "up") if config.gated_mlp else ("up",):
            yield from linear(at + name, inner, hidden)
        yield from linear(at + "down", hidden, inner)


def _assemble(config: DecoderConfig, loaded: dict[str, Tensor]) -> Weights:
    """Takes the tensors out of ``loaded``, so that merged ones are not held twice for long."""

    def norm(name: str) -> Norm:
        return Norm(loaded.pop(f"{name}.weight"), loaded.pop(f"{name}.bias", None))

    def post_norm(name: str) -> Norm | None:
        return norm(name) if config.post_norms else None

    def linear(prefix: str, *names: str) -> Linear:
        weights = [loaded.pop(f"{prefix}{n}.weight") for n in names]
        biases = [loaded.pop(f"{prefix}{n}.bias", None) for n in names]
        bias = None
        if any(b is not None for b in biases):
            filled = [
                w.new_zeros(len(w)) if b is None else b
                for w, b in zip(weights, biases, strict=True)
            ]
            bias = torch.cat(filled)
        return Linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)

    def layer(at: str) -> Layer:
        return Layer(
            attn_norm=norm(at + "attn_norm"),
            qkv=linear(at, "q", "k", "v"),
            q_norm=loaded.pop(at + "q_norm.weight", None),
            k_norm=loaded.pop(at + "k_norm.weight", None),
            o=linear(at, "o"),
            attn_post_norm=post_norm(at + "attn_post_norm"),
            mlp_norm=norm(at + "mlp_norm"),
            gate_up=linear(at, *(("gate", "up") if config.gated_mlp else ("up",))),
            down=linear(at, "down"),
            mlp_post_norm=post_norm(at + "mlp_post_norm"),
        )

    embed = loaded.pop("embed.weight")
    return Weights(
        embed=embed,
        positions=loaded.pop("positions.weight", None),
        layers=tuple(layer(f"layers.{i}.") for i in range(config.num_layers)),
        final_norm=norm("final_norm"),
        head=embed if config.tie_embeddings else loaded.pop("lm_head.weight"),
    )


def _tensors(weights: Weights) -> Iterator[Tensor]:
    def of(part: Tensor | Linear | Norm | None) -> Iterator[Tensor]:
        match part:
            case Tensor():
                yield part
            case Linear() | Norm():
                yield part.weight
                yield from of(part.bias)

    for part in (weights.embed, weights.positions, weights.final_norm, weights.head):
        yield from of(part)
    for layer in weights.layers:
        for name in Layer.__slots__:
            yield from of(getattr(layer, name))
