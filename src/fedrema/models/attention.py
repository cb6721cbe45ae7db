"""Attention for stacked clients: it has no weights of its own, so clients become part of the batch axis."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Drop = Callable[[Tensor], Tensor]
"""Dropout of the attention weights [samples, heads, queries, keys]."""


def is_stacked(*tensors: object) -> bool:
    """Return whether one of the tensors has an axis that vmap hides."""
    return any(isinstance(value, Tensor) and _is_batched(value) for value in tensors)


def _is_batched(value: Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(value):  # as in gradients of single samples
        value = functorch.get_unwrapped(value)
    return functorch.is_batchedtensor(value)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    drop: Drop | None = None,
    causal: bool = False,
    scale: float | None = None,
    grouped: bool = False,
) -> Tensor:
    """Return softmax(scale · query keyᵀ + mask) value, as scaled_dot_product_attention does."""
    if drop is not None:
        weights, value = attention_weights(query, key, value, mask, causal, scale, grouped)
        return drop(weights).to(value.dtype) @ value
    if is_stacked(query, key, value, mask):
        merged: Tensor = _Merged.apply(query, key, value, mask, causal, scale, grouped)  # type: ignore[no-untyped-call]  # not annotated in torch
        return merged
    return functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def attention_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None = None,
    grouped: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the weights [..., queries, keys] in at least 32 bits, and the values that they multiply."""
    if grouped:  # several heads of queries share one of keys and values
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-2, -1) * scale).to(torch.promote_types(query.dtype, torch.float32))
    if causal:
        shape = (query.shape[-2], key.shape[-2])
        later = torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, dim=-1), value


class _Merged(torch.autograd.Function):
    """Attention, applied only under vmap; torch records the gradients of what `vmap` computes."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        raise NotImplementedError("only under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        axes: tuple[int | None, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        grouped: bool,
    ) -> tuple[Tensor, int]:
        clients = info.batch_size
        first = [_clients_first(each, axis, clients) for each, axis in zip((query, key, value), axes, strict=False)]
        batch: torch.Size = torch.broadcast_shapes(*(each.shape[1:-3] for each in first))  # type: ignore[no-untyped-call]
        q, k, v = (each.expand(clients, *batch, *each.shape[-3:]).reshape(-1, *each.shape[-3:]) for each in first)
        if mask is not None and (axes[3] is not None or mask.dim() > 2):
            queries, keys = mask.shape[-2:]
            own = _clients_first(mask, axes[3], clients)
            own = own.reshape(clients, *[1] * (len(batch) + 4 - own.dim()), *own.shape[1:])  # missing axes
            heads = own.shape[-3]
            mask = own.expand(clients, *batch, heads, queries, keys).reshape(-1, heads, queries, keys)
        found = attention(q, k, v, mask, None, causal, scale, grouped)
        return found.reshape(clients, *batch, *found.shape[1:]), 0


def _clients_first(value: Tensor, axis: int | None, clients: int) -> Tensor:
    """Return a tensor [clients, ..., heads, positions, features]; a missing axis of heads has length 1."""
    return value.expand(clients, *value.shape) if axis is None else value.movedim(axis, 0)


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    in_weights: tuple[Tensor, ...],
    in_bias: Tensor | None,
    extra_key: Tensor | None,
    extra_value: Tensor | None,
    add_zeros: bool,
    out_weight: Tensor,
    out_bias: Tensor | None,
    drop: Drop | None,
    mask: Tensor | None,
    padding: Tensor | None,
    need_weights: bool,
    average_weights: bool,
    causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return what multi_head_attention_forward returns for inputs [positions, samples, features].

    `in_weights` is one tensor for queries, keys and values together, or three. `mask` and `padding` are boolean, where
    True is left out, or are added to the scores.
    """
    queries, samples, width = query.shape
    q, k, v = _projected(query, key, value, in_weights, in_bias)
    mask = _as_added(mask, query)
    padding = _as_added(padding, query)
    if extra_key is not None and extra_value is not None:
        k, v = torch.cat([k, extra_key.expand(1, samples, -1)]), torch.cat([v, extra_value.expand(1, samples, -1)])
        mask, padding = (None if each is None else functional.pad(each, (0, 1)) for each in (mask, padding))
    q, k, v = (each.reshape(len(each), samples, heads, -1).permute(1, 2, 0, 3) for each in (q, k, v))
    if add_zeros:
        k, v = (torch.cat([each, each.new_zeros(*each.shape[:2], 1, each.shape[-1])], dim=2) for each in (k, v))
        mask, padding = (None if each is None else functional.pad(each, (0, 1)) for each in (mask, padding))
    if mask is not None and mask.dim() == 3:
        mask = mask.reshape(samples, heads, *mask.shape[1:])
    if padding is not None:
        padding = padding.reshape(samples, 1, 1, -1)
        mask = padding if mask is None else mask + padding
    causal = causal and mask is None
    weights = None
    if need_weights:
        weights, v = attention_weights(q, k, v, mask, causal)
        weights = weights.to(v.dtype) if drop is None else drop(weights).to(v.dtype)
        result = weights @ v
    else:
        result = attention(q, k, v, mask, drop, causal)
    output = functional.linear(result.permute(2, 0, 1, 3).reshape(queries, samples, width), out_weight, out_bias)
    return output, weights if weights is None or not average_weights else weights.mean(dim=1)


def _projected(
    query: Tensor, key: Tensor, value: Tensor, weights: tuple[Tensor, ...], bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if len(weights) == 1 and query is key and key is value:
        q, k, v = functional.linear(query, weights[0], bias).chunk(3, dim=-1)
        return q, k, v
    each = weights[0].chunk(3) if len(weights) == 1 else weights
    biases = (None, None, None) if bias is None else bias.chunk(3)
    q, k, v = (functional.linear(x, w, b) for x, w, b in zip((query, key, value), each, biases, strict=True))
    return q, k, v


def _as_added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a mask as numbers that are added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
