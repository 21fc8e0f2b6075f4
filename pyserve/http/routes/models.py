"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from quart import Blueprint, Response

from pyserve.http.errors import ModelNotFound
from pyserve.http.routes.common import json
from pyserve.http.shapes import ModelCard, ModelList
from pyserve.http.state import ServerState


def blueprint(state: ServerState) -> Blueprint:
    """The models family."""
    routes = Blueprint("models", __name__)

    @routes.get("/v1/models")
    async def list_models() -> Response:
        return json(ModelList(data=[model_card(state)]))

    @routes.get("/v1/models/<path:model>")
    async def get_model(model: str) -> Response:
        if model != state.model:
            raise ModelNotFound(f"the model {model!r} does not exist", param="model")
        return json(model_card(state))

    return routes


def model_card(state: ServerState) -> ModelCard:
    """OpenAI's model object with context length and quantisation beside."""
    info = state.engine.info
    return ModelCard(
        id=info.name,
        created=state.created,
        root=info.name,
        max_model_len=state.context_length,
        context_length=state.context_length,
        quantization=info.quantization,
        dtype=info.dtype,
        num_parameters=info.num_parameters,
    )
