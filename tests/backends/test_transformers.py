"""The transformers back-end against the model itself, run plainly on one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trio
from torch import Tensor

transformers = pytest.importorskip("transformers")

from pyserve.backends.base import Backend  # noqa: E402
from pyserve.backends.transformers import TransformersBackend  # noqa: E402
from pyserve.errors import ModelError  # noqa: E402
from pyserve.testing.engine import (  # noqa: E402
    Collected,
    collect,
    make_spec,
    open_scripted_engine,
)
from pyserve.testing.packing import NO_ROWS, HandPackedStep, pack_by_hand  # noqa: E402

VOCAB = 61


def neox() -> Any:
    config = transformers.GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config)


def opt() -> Any:
    config = transformers.OPTConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
        max_position_embeddings=64, word_embed_proj_dim=32, pad_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


@pytest.fixture(params=[neox, opt])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param().eval()


@pytest.fixture
def backend(model: Any) -> TransformersBackend:
    backend = TransformersBackend(model, name="tiny")
    backend.allocate(num_blocks=8, block_size=4)
    return backend


def pack(*shares: tuple[list[int], int, list[int]]) -> HandPackedStep:
    return pack_by_hand(*shares, block_size=4)


def plain(model: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        inputs = torch.tensor([ids])
        return model(inputs).logits[0, -1], model.base_model(inputs).last_hidden_state[0, -1]


def test_is_a_backend_and_says_what_is_loaded(backend: TransformersBackend) -> None:
    assert isinstance(backend, Backend)
    assert backend.info.vocab_size == VOCAB
    assert backend.info.eos_token_ids == (2,)
    assert backend.info.weight_bytes == 4 * backend.info.num_parameters


def test_ragged_batch_gives_each_sequence_its_own_logits(
    model: Any, backend: TransformersBackend
) -> None:
    long, short = [5, 6, 7, 8, 9, 10], [11, 12]
    rows = backend.forward(pack((long, 0, [3, 1]), (short, 0, [0])), NO_ROWS).logits
    torch.testing.assert_close(rows[0], plain(model, long)[0])
    torch.testing.assert_close(rows[1], plain(model, short)[0])


def test_chunks_then_decode_continue_the_same_sequence(
    model: Any, backend: TransformersBackend
) -> None:
    first = pack(([5, 6, 7], 0, [2, 6]))
    first.logit_rows = NO_ROWS  # a chunk short of the prompt's end wants no logits
    assert backend.forward(first, NO_ROWS).logits.shape == (0, VOCAB)
    rows = backend.forward(pack(([20], 0, [4]), ([8, 9], 3, [2, 6])), NO_ROWS).logits
    torch.testing.assert_close(rows[1], plain(model, [5, 6, 7, 8, 9])[0])
    rows = backend.forward(pack(([10], 5, [2, 6])), NO_ROWS).logits
    torch.testing.assert_close(rows[0], plain(model, [5, 6, 7, 8, 9, 10])[0])


def test_hidden_states_are_those_after_the_final_norm(
    model: Any, backend: TransformersBackend
) -> None:
    wanted = torch.tensor([4], dtype=torch.int32)
    hidden = backend.forward(pack(([5, 6, 7], 0, [0]), ([8, 9], 0, [1])), wanted).hidden
    torch.testing.assert_close(hidden[0], plain(model, [8, 9])[1])


def test_unloadable_reference_is_a_model_error(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match="cannot load"):
        TransformersBackend.from_pretrained(str(tmp_path))


def test_loads_a_safetensors_directory(model: Any, tmp_path: Any) -> None:
    model.save_pretrained(tmp_path)
    loaded = TransformersBackend.from_pretrained(str(tmp_path))
    loaded.allocate(num_blocks=2, block_size=4)
    logits = loaded.forward(pack(([5, 6, 7], 0, [1])), NO_ROWS).logits[0]
    torch.testing.assert_close(logits, plain(model, [5, 6, 7])[0])


async def test_engine_on_it_gives_the_models_own_greedy_text(model: Any) -> None:
    """Chunks, company, preemption and prefix hits included: a small pool and a small step."""
    prompts = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 20], [30]]
    expected = [list(prompt) for prompt in prompts]
    for ids in expected:
        for _ in range(6):
            ids.append(int(plain(model, ids)[0].argmax()))
    results: list[Collected | None] = [None] * len(prompts)
    backend = TransformersBackend(model, name="tiny")
    async with (
        open_scripted_engine(
            backend, driver="thread", num_blocks=6, max_batch_tokens=4, max_batch_requests=3
        ) as engine,
        trio.open_nursery() as nursery,
    ):

        async def client(i: int) -> None:
            results[i] = await collect(engine, make_spec(prompts[i], max_tokens=6, ignore_eos=True))

        for i in range(len(prompts)):
            nursery.start_soon(client, i)
    for prompt, ids, result in zip(prompts, expected, results, strict=True):
        assert result is not None
        assert result.tokens[0] == ids[len(prompt) :]
