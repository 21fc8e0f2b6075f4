"""From a checkpoint's tensor names to the canonical ones of :class:`~pyserve.models.config.DecoderConfig`.

An architecture lists *rules*; :func:`plan_weights` matches them with the tensors that a checkpoint really
has, before anything is read, so that a checkpoint with a hole or with weights nobody would use is refused
at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from pyserve.errors import ModelError
from pyserve.models.config import DecoderConfig
from pyserve.models.source import QuantizedTensor

LINEAR = ("q", "k", "v", "o", "gate", "up", "down")
Transform = Callable[[Tensor, DecoderConfig], Sequence[Tensor]]


@dataclass(frozen=True)
class Rule:
    """``source`` in the checkpoint becomes ``targets``; ``{i}`` in both stands for every layer's number.

    ``transform`` gives one tensor per target; None passes the source through.
    """

    source: str
    targets: tuple[str, ...]
    transform: Transform | None = None


@dataclass(frozen=True)
class PlannedWeight:
    """One tensor to read: ``key`` as the checkpoint calls it, and what becomes of it."""

    key: str
    targets: tuple[str, ...]
    transform: Transform | None

    @property
    def is_linear(self) -> bool:
        """Whether it becomes weights that are multiplied with, embeddings included."""
        kinds = (*LINEAR, "embed", "lm_head")
        parts = (target.split(".")[-2:] for target in self.targets)
        return all(part == "weight" and kind in kinds for kind, part in parts)

    def apply_blocks(
        self, tensor: QuantizedTensor, config: DecoderConfig, where: str
    ) -> Iterator[tuple[str, QuantizedTensor]]:
        """The same for a matrix that stays quantised: what GGUF rules transform is whole rows."""
        rows, row_bytes = tensor.blocks.shape
        parts = [tensor.blocks] if self.transform is None else self.transform(tensor.blocks, config)
        for name, part in zip(self.targets, parts, strict=True):
            wanted = weight_shape(name, config)
            shape = (part.shape[0], tensor.shape[-1])
            if part.shape[1] != row_bytes or shape != wanted:
                raise ModelError(
                    f"{where}: {self.key} of {rows} rows gives {name} the shape {list(shape)}, but the"
                    f" model's configuration asks for {list(wanted)}"
                )
            yield name, QuantizedTensor(tensor.type, shape, part)

    def apply(
        self, tensor: Tensor, config: DecoderConfig, where: str
    ) -> Iterator[tuple[str, Tensor]]:
        """The canonical (name, tensor) pairs. Raises ModelError on a shape that does not fit ``config``."""
        try:
            parts = [tensor] if self.transform is None else self.transform(tensor, config)
        except (RuntimeError, IndexError) as error:
            raise ModelError(
                f"{where}: {self.key} has shape {list(tensor.shape)}: {error}"
            ) from error
        for name, part in zip(self.targets, parts, strict=True):
            wanted = weight_shape(name, config)
            if tuple(part.shape) != wanted:
                raise ModelError(
                    f"{where}: {self.key} gives {name} the shape {list(part.shape)}, but the model's"
                    f" configuration asks for {list(wanted)}"
                )
            yield name, part


def both(source: str, target: str, transform: Transform | None = None) -> tuple[Rule, Rule]:
    """Rules for ``source.weight`` and ``source.bias``."""
    return (
        Rule(f"{source}.weight", (f"{target}.weight",), transform),
        Rule(f"{source}.bias", (f"{target}.bias",), transform),
    )


def plan_weights(
    rules: Iterable[Rule],
    keys: Iterable[tuple[str, str]],
    config: DecoderConfig,
    *,
    ignored: str,
    where: str,
) -> tuple[PlannedWeight, ...]:
    """Which tensors to read, in the order of the rules, layer after layer.

    ``keys`` are (name without prefixes, name in the checkpoint) of every tensor there; those that match the
    regular expression ``ignored`` are none of ours. Raises ModelError on missing and on unexpected ones.
    """
    present = dict(keys)
    plan: list[PlannedWeight] = []
    for source, rule, index in _expand(rules, config.num_layers):
        key = present.pop(source, None)
        if key is not None:
            targets = tuple(target.replace("{i}", str(index)) for target in rule.targets)
            plan.append(PlannedWeight(key, targets, rule.transform))
    if config.tie_embeddings:
        plan = [weight for weight in plan if weight.targets != ("lm_head.weight",)]
    produced = {name for weight in plan for name in weight.targets}
    _refuse(where, "lacks weights", required_weights(config) - produced)
    unexpected = {name for name in present if not re.search(ignored, name)}
    _refuse(where, f"has weights that {config.architecture} has no place for", unexpected)
    return tuple(plan)


def _expand(rules: Iterable[Rule], num_layers: int) -> Iterator[tuple[str, Rule, int]]:
    rules = tuple(rules)
    per_layer = [rule for rule in rules if "{i}" in rule.source]
    yield from ((rule.source, rule, 0) for rule in rules if "{i}" not in rule.source)
    for index in range(num_layers):
        yield from ((rule.source.replace("{i}", str(index)), rule, index) for rule in per_layer)


def _refuse(where: str, what: str, names: Collection[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
        raise ModelError(f"{where} {what}: {shown} ({len(names)} in all)")


def required_weights(config: DecoderConfig) -> set[str]:
    """Canonical names without which the model cannot run (biases of linear layers are optional)."""
    norm_parts = ("weight", "bias") if config.norm == "layer" else ("weight",)
    names = {"embed.weight"} | {f"final_norm.{part}" for part in norm_parts}
    if config.learned_positions:
        names.add("positions.weight")
    if not config.tie_embeddings:
        names.add("lm_head.weight")
    linear = ["q", "k", "v", "o", "up", "down"] + ["gate"] * config.gated_mlp
    plain = ["q_norm", "k_norm"] * config.qk_norm
    plain += ["attn_post_norm", "mlp_post_norm"] * config.post_norms
    for i in range(config.num_layers):
        names.update(f"layers.{i}.{name}.weight" for name in linear + plain)
        names.update(
            f"layers.{i}.{name}.{part}" for name in ("attn_norm", "mlp_norm") for part in norm_parts
        )
    return names


def weight_shape(name: str, config: DecoderConfig) -> tuple[int, ...]:
    """The shape that the canonical weight ``name`` has in a model of ``config``."""
    hidden, middle = config.hidden_size, config.intermediate_size
    *_, layer, part = name.split(".")
    match layer:
        case "embed" | "lm_head":
            return (config.vocab_size, hidden)
        case "positions":
            return (config.context_length, hidden)
        case "q_norm" | "k_norm":
            return (config.head_dim,)
        case _ if layer in LINEAR:
            out, into = {
                "q": (config.q_size, hidden),
                "k": (config.kv_size, hidden),
                "v": (config.kv_size, hidden),
                "o": (hidden, config.q_size),
                "gate": (middle, hidden),
                "up": (middle, hidden),
                "down": (hidden, middle),
            }[layer]
            return (out, into) if part == "weight" else (out,)
        case _:  # norms
            return (hidden,)
