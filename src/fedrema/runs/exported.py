"""Read a folder of exported models, to predict with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedrema.base.files import regular_file
from fedrema.errors import BadInput
from fedrema.models.networks import Network
from fedrema.runs.model_folder import ExportIndex
from fedrema.runs.new_samples import NewData
from fedrema.runs.plain_model import plain_model
from fedrema.runs.prediction import Models
from fedrema.runs.provenance import GIVEN
from fedrema.runs.trained_clients import convert_inputs


def models_of_export(folder: Path, content: Mapping[str, Any]) -> Models:
    """Return the models in a folder that `fedrema export` has written; `content` is that of its index.json."""
    try:
        index = msgspec.convert(content, ExportIndex)
    except msgspec.ValidationError as error:
        raise BadInput(f"{folder} is not an export: its index.json is invalid ({error}).") from error
    facts = index.prediction
    if facts is None or facts.own_prediction or facts.network.net == GIVEN:
        reason = (
            "it was written by an older version"
            if facts is None
            else f"{index.method} computes predictions in its own way"
            if facts.own_prediction
            else "its network was given in Python"
        )
        raise BadInput(f"{folder} cannot be used for predictions, because {reason}: use the folder of the run.")
    network: Network = facts.network
    files = {entry.client: entry.file for entry in index.clients}

    def model_of(name: str) -> nn.Module:
        model = plain_model(network, facts.sample_shape, facts.task.outputs, facts.dtype)
        module = model.module.to(getattr(torch, facts.dtype))
        file = folder / Path(files[name]).name  # never outside the folder, whatever the index says
        try:
            module.load_state_dict(load_file(regular_file(file)))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise BadInput(f"{file} cannot be read as the model of {name!r}: {error}.") from error
        convert_inputs(module, model.net.integers)
        return module.eval()

    labels = tuple(index.class_names) if facts.task.has_classes else ()
    data = NewData(facts.preprocessing, facts.sample_shape, facts.client_column)
    return Models(folder, list(files), facts.task, labels, data, model_of)
