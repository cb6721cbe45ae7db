"""Class prototypes: the mean feature of each class, on one client and over all clients."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Batch, Client, State, Uploads, task_loss
from fedrema.models.body_and_head import Net, Tensors

Weighting = Literal["samples", "uniform"]


def class_membership(data: Batch, classes: int, dtype: torch.dtype) -> Tensor:
    """Return a matrix [n, C] that is 1 where a real sample belongs to a class, else 0."""
    return functional.one_hot(data.y, classes).to(dtype) * data.mask[:, None].to(dtype)


def class_means(values: Tensor, data: Batch, classes: int) -> tuple[Tensor, Tensor]:
    """Return the mean of `values` [n, d] over the real samples of each class [C, d], and the class counts [C].

    For a class without samples, both are 0.
    """
    member = class_membership(data, classes, values.dtype)
    counts = member.sum(dim=0)
    return member.T @ values / counts.clamp(min=1)[:, None], counts


def client_prototypes(net: Net, client: Client, data: Batch) -> Tensors:
    """Return what a client sends: the mean feature of each class and the number of samples."""
    means, counts = class_means(net.features(client.params, data.x), data, net.classes)
    return {"means": means, "label_counts": counts}


def initial_prototypes(classes: int, width: int) -> State:
    """Return the server state before any prototype is known."""
    return {"prototypes": torch.zeros(classes, width), "known": torch.zeros(classes)}


def global_prototypes(state: State, uploads: Uploads, weigh: Weighting) -> Tensors:
    """Average the clients' `means` [k, C, d] with their `label_counts` [k, C]: C̄_c = Σ_k (n_kc/n_c) μ_kc.

    With `uniform`, all clients that hold a class have equal weights. A class that no client sent keeps its previous
    prototype; `known` [C] is 1 for classes that have one.
    """
    means, counts = uploads.extras["means"], uploads.extras["label_counts"]
    weights = counts if weigh == "samples" else (counts > 0).to(counts.dtype)
    total = weights.sum(dim=0)
    fresh = torch.einsum("kc,kcd->cd", weights, means) / total.clamp(min=1)[:, None]
    kept, known = torch.as_tensor(state["prototypes"]).to(fresh), torch.as_tensor(state["known"]).to(fresh)
    return {
        "prototypes": torch.where(total[:, None] > 0, fresh, kept),
        "known": torch.where(total > 0, 1.0, known),
    }


def aligned_loss(net: Net, client: Client, batch: Batch, strength: float) -> Tensor:
    """Return CE + λ · mean (1/d)‖h − c̄_y‖²; before the server has sent prototypes, the cross-entropy alone."""
    features = net.features(client.params, batch.x)
    loss = task_loss(net, net.classify(client.params, features), batch)
    if "prototypes" in client.inbox:
        loss = loss + strength * alignment(features, batch, client.inbox["prototypes"], client.inbox["known"])
    return loss


def alignment(features: Tensor, batch: Batch, prototypes: Tensor, known: Tensor) -> Tensor:
    """Return the mean of (1/d)‖h − c̄_y‖² over a batch; samples of a class without a prototype count as 0."""
    distances = (features - prototypes[batch.y]).square().mean(dim=1)
    counted = batch.mask * known[batch.y].to(batch.mask.dtype)
    return (distances * counted).sum() / batch.mask.sum().clamp(min=1)
