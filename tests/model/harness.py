"""Small random models of every architecture, and a driver that feeds them through paged KV."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

from pyserve._C import Decoder
from pyserve.models.config import DecoderConfig, RopeConfig

VOCAB = 101
CONTEXT = 512
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 88,
    "max_position_embeddings": CONTEXT,
    "attn_implementation": "eager",
}


def _llama(**changes: Any) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SHAPE | changes)))


def _llama3() -> transformers.PreTrainedModel:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return _llama(
        rope_parameters=rope, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    )


def _wide() -> transformers.PreTrainedModel:
    """Deep enough products for several depth blocks, and a head of odd width."""
    changes = {"hidden_size": 324, "intermediate_size": 530, "num_hidden_layers": 2, "head_dim": 40}
    return _llama(**changes)


def _blocks() -> transformers.PreTrainedModel:
    """Every matrix a whole number of GGUF's blocks wide."""
    return _llama(hidden_size=96, intermediate_size=160, attention_bias=True)


def _mistral() -> transformers.PreTrainedModel:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE, sliding_window=19))


def _qwen2() -> transformers.PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**(SHAPE | {"head_dim": 8})))


def _qwen3() -> transformers.PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(SHAPE | {"head_dim": 32})))


def _gemma3() -> transformers.PreTrainedModel:
    config = transformers.Gemma3TextConfig(
        **(SHAPE | {"head_dim": 24}),
        sliding_window=13,
        query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return transformers.Gemma3ForCausalLM(config)


def _gpt2() -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=CONTEXT,
        n_embd=96,
        n_layer=3,
        n_head=4,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config)


MODELS = {
    "llama": _llama,
    "llama3": _llama3,
    "wide": _wide,
    "blocks": _blocks,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
}


def random_model(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A transformers model with every parameter random, biases and norms too, in float32."""
    torch.manual_seed(seed)
    model = MODELS[name]().eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(1.7 * parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
    return model


def reference_logits(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """float32 ``[len(tokens), vocab]`` from transformers, without a cache."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


def config_of(model: transformers.PreTrainedModel) -> DecoderConfig:
    """The model's shape in our words."""
    c = model.config
    kind = c.model_type
    if kind == "gpt2":
        return _gpt2_config(c)
    window = c.sliding_window if kind in ("mistral", "gemma3_text") else None
    kinds = getattr(c, "layer_types", None) or ["full_attention"] * c.num_hidden_layers
    if kind == "mistral":
        kinds = ["sliding_attention"] * c.num_hidden_layers
    rotary = model.model.rotary_emb
    if kind == "gemma3_text":
        names = ["full_attention", "sliding_attention"]
        ropes = tuple(_rope(getattr(rotary, f"{n}_inv_freq")) for n in names)
        layer_rope = tuple(names.index(k) for k in kinds)
    else:
        ropes = (_rope(rotary.inv_freq, rotary.attention_scaling),)
        layer_rope = (0,) * c.num_hidden_layers
    gemma = kind == "gemma3_text"
    return DecoderConfig(
        architecture=kind,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        intermediate_size=c.intermediate_size,
        context_length=c.max_position_embeddings,
        norm="rms",
        norm_eps=c.rms_norm_eps,
        activation="gelu_tanh" if gemma else "silu",
        gated_mlp=True,
        qk_norm=kind in ("qwen3", "gemma3_text"),
        post_norms=gemma,
        attention_scale=model.model.layers[0].self_attn.scaling,
        embedding_scale=c.hidden_size**0.5 if gemma else 1.0,
        layer_window=tuple((window or 0) if k == "sliding_attention" else 0 for k in kinds),
        layer_rope=layer_rope,
        ropes=ropes,
        learned_positions=False,
        tie_embeddings=c.tie_word_embeddings,
        bos_token_id=None,
        eos_token_ids=(),
    )


def _rope(inv_freq: Tensor, factor: float = 1.0) -> RopeConfig:
    return RopeConfig(tuple(inv_freq.float().tolist()), factor)


def _gpt2_config(c: Any) -> DecoderConfig:
    return DecoderConfig(
        architecture="gpt2",
        vocab_size=c.vocab_size,
        hidden_size=c.n_embd,
        num_layers=c.n_layer,
        num_heads=c.n_head,
        num_kv_heads=c.n_head,
        head_dim=c.n_embd // c.n_head,
        intermediate_size=4 * c.n_embd,
        context_length=c.n_positions,
        norm="layer",
        norm_eps=c.layer_norm_epsilon,
        activation="gelu_tanh",
        gated_mlp=False,
        qk_norm=False,
        post_norms=False,
        attention_scale=(c.n_embd // c.n_head) ** -0.5,
        embedding_scale=1.0,
        layer_window=(0,) * c.n_layer,
        layer_rope=(-1,) * c.n_layer,
        ropes=(),
        learned_positions=True,
        tie_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
    )


NAMES = {
    "model.embed_tokens": "embed",
    "model.norm": "final_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    **{f"self_attn.{x}_proj": x for x in "qkvo"},
    **{f"mlp.{x}_proj": x for x in ("gate", "up", "down")},
    "model.layers": "layers",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
GPT2_NAMES = {
    "transformer.wte": "embed",
    "transformer.wpe": "positions",
    "transformer.ln_f": "final_norm",
    "transformer.h": "layers",
    "ln_1": "attn_norm",
    "ln_2": "mlp_norm",
    "attn.c_proj": "o",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}


def weights_of(model: transformers.PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Canonical names and tensors of the model's parameters."""
    kind = model.config.model_type
    names = {"gpt2": GPT2_NAMES, "gemma3_text": GEMMA_NAMES}.get(kind, NAMES)
    for name, tensor in model.named_parameters():
        data = tensor.detach()
        if kind == "gpt2" and ".c_" in name and name.endswith("weight"):
            data = data.T
        if kind == "gemma3_text" and "norm" in name:
            data = data + 1
        short = name
        for ours in names:
            short = short.replace(ours, names[ours])
        if "attn.c_attn" in short:
            for part, piece in zip("qkv", data.chunk(3), strict=True):
                yield short.replace("attn.c_attn", part), piece
        else:
            yield short, data


class KvDecoder(Decoder):
    """A decoder that remembers what its KV cache is to be stored as."""

    kv_dtype = "float32"


def build_decoder(
    model: transformers.PreTrainedModel,
    *,
    dtype: str = "float32",
    kv_dtype: str = "float32",
    isa: str = "",
) -> KvDecoder:
    """A sealed decoder with the model's weights."""
    decoder = KvDecoder(config_of(model).as_dict(), dtype, isa)
    decoder.kv_dtype = kv_dtype
    for name, tensor in weights_of(model):
        decoder.load(name, tensor)
    decoder.seal()
    return decoder


@dataclass
class Row:
    """One sequence on its way through the decoder; ``tokens[:computed]`` have their KV written."""

    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Runner:
    """Feeds rows to a decoder; blocks come in an order drawn from ``seed``."""

    def __init__(
        self, decoder: Decoder, *, num_blocks: int = 256, block_size: int = 16, seed: int = 0
    ) -> None:
        kv_dtype = decoder.kv_dtype if isinstance(decoder, KvDecoder) else "float32"
        self.decoder = decoder
        self.block_size = block_size
        decoder.allocate_kv(num_blocks, block_size, kv_dtype)
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)

    def step(self, work: Iterable[tuple[Row, int]]) -> list[Tensor]:
        """Advances each row by that many tokens; the logits of all of them, ``[take, vocab]`` a row."""
        work = list(work)
        logits, hidden = self.forward(work, range(sum(take for _, take in work)), [])
        assert hidden.shape[0] == 0
        return list(logits.split([take for _, take in work]))

    def forward(
        self, work: list[tuple[Row, int]], logit_rows: Iterable[int], hidden_rows: Iterable[int]
    ) -> tuple[Tensor, Tensor]:
        """The same; logits and hidden states of the flat tokens that are asked for."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cu = [0]
        for row, take in work:
            end = row.computed + take
            while len(row.blocks) * self.block_size < end:
                row.blocks.append(self.free.pop())
            for position in range(row.computed, end):
                ids.append(row.tokens[position])
                positions.append(position)
                block, offset = divmod(position, self.block_size)
                slots.append(row.blocks[block] * self.block_size + offset)
            row.computed = end
            cu.append(len(ids))
        width = max(len(row.blocks) for row, _ in work)
        table = [row.blocks + [-1] * (width - len(row.blocks)) for row, _ in work]
        return self.decoder.forward(
            *map(_int32, (ids, positions, cu, [row.computed for row, _ in work], slots, table)),
            _int32(logit_rows),
            _int32(hidden_rows),
        )

    def run(self, row: Row, chunks: Iterable[int]) -> Tensor:
        """Logits of the row alone, cut into ``chunks`` and the rest; ``[length, vocab]``."""
        pieces = [self.step([(row, take)])[0] for take in chunks]
        if row.computed < len(row.tokens):
            pieces += self.step([(row, len(row.tokens) - row.computed)])
        return torch.cat(pieces)


def _int32(values: Iterable[Any]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def random_tokens(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """That many token ids."""
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


def alone(decoder: Decoder, tokens: list[int]) -> Tensor:
    """The sequence by itself in one step."""
    return Runner(decoder).run(Row(tokens), [])


def in_company(decoder: Decoder, tokens: list[int], others: int) -> Tensor:
    """The sequence in pieces, each in a step with as many of ``others`` sequences as are not through."""
    rng = random.Random(others)
    runner = Runner(decoder, num_blocks=512, seed=others)
    row = Row(tokens)
    company = [Row(random_tokens(rng.randint(30, 90), seed=100 + i)) for i in range(others)]
    pieces = []
    while row.computed < len(tokens):
        left = len(tokens) - row.computed
        work = [(row, min(left, rng.choice([1, 1, 3, 17])))]
        unfinished = [r for r in company if r.computed < len(r.tokens)]
        work += [(r, min(len(r.tokens) - r.computed, rng.choice([1, 1, 1, 8]))) for r in unfinished]
        rng.shuffle(work)
        at = [r is row for r, _ in work].index(True)
        pieces.append(runner.step(work)[at])
    return torch.cat(pieces)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))
