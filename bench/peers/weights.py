"""The default model's weights in the formats that the peers read, all from the Q4_1 file that it ships in.

``python bench/peers/weights.py --to DIR`` writes, beside a link to the shipped file:

- ``bf16/``: a Hugging Face directory (safetensors), the shipped weights dequantised and rounded once,
- ``BF16.gguf``, ``Q8_0.gguf``, ``Q4_0.gguf``: the same by the ``gguf`` package's own quantisers. Vectors stay
  float32, and the embedding, which is the LM head too, is Q8_0 in the 4-bit file, as in the shipped one.

What is there already is kept. Needs the ``bench`` extra.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from torch import Tensor

from pyserve.models.checkpoint import Checkpoint
from pyserve.models.default import fetch_default
from pyserve.models.load import open_checkpoint

DEFAULT_DIRECTORY = Path("~/.cache/pyserve/peers").expanduser()
SHIPPED = "Q4_1"
GGUF_KINDS = ("BF16", "F16", "Q8_0", "Q4_0")

_HF_NAMES = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def weights_path(directory: Path, name: str) -> Path:
    """Where the weights called ``name`` lie ("bf16" a directory, others GGUF); ValueError for unknown."""
    if name == "bf16":
        return directory / "bf16"
    if name in (*GGUF_KINDS, SHIPPED):
        return directory / f"{name}.gguf"
    raise ValueError(f"no weights called {name!r}: bf16, {', '.join(GGUF_KINDS)} or {SHIPPED}")


def make_all(directory: Path, told: Callable[[str], None]) -> None:
    """Write what is missing in ``directory``; every file appears whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    shipped = fetch_default()
    if not (link := weights_path(directory, SHIPPED)).exists():
        link.symlink_to(shipped)
    if not (target := weights_path(directory, "bf16")).exists():
        told(f"writing {target}")
        _write_safetensors(open_checkpoint(str(shipped)), target)
    for kind in GGUF_KINDS:
        if not (target := weights_path(directory, kind)).exists():
            told(f"writing {target}")
            _write_gguf(shipped, target, gguf.GGMLQuantizationType[kind])


def _write_gguf(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    reader = gguf.GGUFReader(source)
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.name}"])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        chosen = _kind_of(tensor.name, values, kind)
        writer.add_tensor(tensor.name, gguf.quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)


def _kind_of(
    name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType
) -> gguf.GGMLQuantizationType:
    if values.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    if kind == gguf.GGMLQuantizationType.Q4_0 and name in ("token_embd.weight", "output.weight"):
        return gguf.GGMLQuantizationType.Q8_0
    return kind


def _write_safetensors(checkpoint: Checkpoint, target: Path) -> None:
    partial = target.with_suffix(".partial")
    partial.mkdir(exist_ok=True)
    tensors = dict(_hf_tensors(checkpoint))
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    _write_json(partial / "config.json", _hf_config(checkpoint))
    tokenizer = checkpoint.tokenizer
    backend = Backend.from_str(tokenizer._backend.to_str())
    backend.decoder = decoders.ByteLevel()  # pyserve decodes by itself, the peers do not
    backend.save(str(partial / "tokenizer.json"))
    named = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_ids[0]}
    _write_json(
        partial / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": checkpoint.config.context_length,
            **{name: backend.id_to_token(token) for name, token in named.items()},
        },
    )
    partial.rename(target)


def _hf_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in checkpoint.tensors():
        assert isinstance(tensor, Tensor)  # nothing is kept quantised
        *layer, part, kind = name.split(".")
        parts = ["model", *layer, _HF_NAMES[part], kind] if layer else [_HF_NAMES[part], kind]
        yield ".".join(parts), tensor.to(torch.bfloat16).contiguous()


def _hf_config(checkpoint: Checkpoint) -> dict[str, object]:
    config = checkpoint.config
    frequencies = config.ropes[0].inv_freq
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        # inv_freq[i] is theta ** (-2i / head_dim)
        "rope_theta": round(frequencies[1] ** (-config.head_dim / 2)),
        "max_position_embeddings": config.context_length,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


@click.command()
@click.option(
    "--to", "directory", type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_DIRECTORY, show_default=True,
)  # fmt: skip
def main(directory: Path) -> None:
    """Write the default model's weights in every format that the comparison needs."""
    make_all(directory, click.echo)
    for name in ("bf16", *GGUF_KINDS, SHIPPED):
        path = weights_path(directory, name)
        files = path.glob("*.safetensors") if path.is_dir() else [path]
        click.echo(f"{name:<5} {sum(f.stat().st_size for f in files) / 1e6:8.1f} MB  {path}")


if __name__ == "__main__":
    main()
