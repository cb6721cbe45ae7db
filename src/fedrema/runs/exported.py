"""Read a folder of exported models, to predict with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedrema.base.digests import file_digest
from fedrema.base.files import regular_file
from fedrema.errors import BadInput
from fedrema.models.networks import Network
from fedrema.runs.checksums import CHANGED, verified
from fedrema.runs.directory import EXPORT_INDEX, MODELS, RunDirectory
from fedrema.runs.model_folder import ExportIndex
from fedrema.runs.new_samples import NewData
from fedrema.runs.plain_model import plain_model
from fedrema.runs.prediction import Models
from fedrema.runs.provenance import GIVEN
from fedrema.runs.trained_clients import convert_inputs
from fedrema.runs.trust import Trust, check_code

AGAIN = "export the models again"


def models_of_export(folder: Path, content: Mapping[str, Any], trust: Trust = False) -> Models:
    """Return the models in a folder that `fedrema export` has written; `content` is that of its index.json."""
    file = folder / EXPORT_INDEX
    content = verified(dict(content), file, remedy=AGAIN)
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
    if folder.resolve().name == MODELS and (run := RunDirectory(folder.resolve().parent)).is_run():
        run.check_owner(file, index.belongs_to, remedy=AGAIN)
    check_code(folder, index.run, index.code, index.marks, index.inputs, trust)
    network: Network = facts.network
    entries = {entry.client: entry for entry in index.clients}

    def model_of(name: str) -> nn.Module:
        model = plain_model(network, facts.sample_shape, facts.task.outputs, facts.dtype)
        module = model.module.to(getattr(torch, facts.dtype))
        file = folder / Path(entries[name].file).name  # never outside the folder, whatever the index says
        try:
            if file_digest(regular_file(file)) != entries[name].digest:
                raise BadInput(f"{file} {CHANGED}: {AGAIN}.")
            module.load_state_dict(load_file(file))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise BadInput(f"{file} cannot be read as the model of {name!r}: {error}.") from error
        convert_inputs(module, model.net.integers)
        return module.eval()

    labels = tuple(index.class_names) if facts.task.has_classes else ()
    data = NewData(facts.preprocessing, facts.sample_shape, facts.client_column)
    return Models(folder, list(entries), facts.task, labels, data, model_of)
