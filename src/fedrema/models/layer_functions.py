"""Replaces torch's functions that draw random numbers or that vmap cannot batch, while a network is called.

Dropout uses keyed masks in both backends. Other functions that draw random numbers use a generator that is keyed in the
same way; vmap cannot batch them, so that a network that calls them is trained by a loop over clients. Recurrent layers
and attention are replaced where clients are stacked, and where dropout is part of them. Modules such as `nn.LSTM`,
`nn.MultiheadAttention` and `nn.TransformerEncoder` call these functions, so that networks need no change.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedrema.models import dropout
from fedrema.models.attention import Drop, attention, is_stacked, multi_head_attention
from fedrema.models.batch_context import BatchContext
from fedrema.models.recurrent import State, recurrent, unrolled_layer

Function = Callable[..., Any]


class LayerFunctions(TorchFunctionMode):
    """The context in which a network is called; `context` says which batch it computes on."""

    def __init__(self, context: BatchContext) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace a call where necessary; leave others to torch."""
        kwargs = kwargs or {}
        replacement = REPLACEMENTS.get(func)
        result = NotImplemented if replacement is None else replacement(self, *args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def drop(self, p: float, training: bool) -> Drop | None:
        """Return dropout with a keyed mask; None if nothing is to be dropped."""
        if not self._drops(p, training):
            return None
        return lambda x: self._dropped(dropout.dropout, x, p, samples=self.context.samples)

    def _drops(self, p: float, training: bool) -> bool:
        return training and p != 0 and self.context.key is not None

    def _dropped(self, function: Function, x: Tensor, p: float, **more: Any) -> Tensor:
        assert self.context.key is not None
        with torch._C.DisableTorchFunction():  # other contexts would convert the operands
            result: Tensor = function(x, dropout.checked(p), self.context.key, self.context.next_draw(), **more)
        return result

    # The parameters of the following functions have torch's names, because they may be given by keyword.

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002
        drop = self.drop(p, training)
        return NotImplemented if drop is None else drop(input)

    def _feature_dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002
        return self._dropped(dropout.feature_dropout, input, p) if self._drops(p, training) else NotImplemented

    def _alpha_dropout(
        self,
        input: Tensor,  # noqa: A002
        p: float = 0.5,
        training: bool = False,
        inplace: bool = False,
        by_channel: bool = False,
    ) -> Any:
        if not self._drops(p, training):
            return NotImplemented
        return self._dropped(dropout.alpha_dropout, input, p, by_channel=by_channel)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        drop = self.drop(dropout_p, True)
        if drop is None and (dropout_p or not is_stacked(query, key, value, attn_mask)):
            return NotImplemented
        return attention(query, key, value, attn_mask, drop, is_causal, scale, enable_gqa)

    def _multi_head_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        dropout_p: float,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor | None,
        training: bool = True,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        use_separate_proj_weight: bool = False,
        q_proj_weight: Tensor | None = None,
        k_proj_weight: Tensor | None = None,
        v_proj_weight: Tensor | None = None,
        static_k: Tensor | None = None,
        static_v: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        drop = self.drop(dropout_p, training)
        stacked = is_stacked(query, key, value, in_proj_weight, out_proj_weight, q_proj_weight)
        if query.dim() != 3 or static_k is not None or static_v is not None or (drop is None and not stacked):
            return NotImplemented
        separate = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else (in_proj_weight,)
        weights = tuple(weight for weight in separate if weight is not None)
        return multi_head_attention(
            query, key, value, num_heads, weights, in_proj_bias, bias_k, bias_v, add_zero_attn, out_proj_weight,
            out_proj_bias, drop, attn_mask, key_padding_mask, need_weights, average_attn_weights,
            causal=is_causal and attn_mask is None,
        )  # fmt: skip

    def _drawn(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """Call a function that draws random numbers with the generator of the batch."""
        if self.context.key is None or torch._C._functorch.peek_interpreter_stack() is not None:
            return NotImplemented  # vmap refuses such functions
        like = next((value for value in args if isinstance(value, Tensor)), None)
        device = torch.empty(0, device=kwargs.get("device")).device if like is None else like.device
        return function(*args, **{**kwargs, "generator": self.context.generator(device)})

    def _rrelu(
        self,
        input: Tensor,  # noqa: A002
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,
        inplace: bool = False,
    ) -> Any:
        return self._drawn(torch.rrelu, input, lower, upper, training) if training else NotImplemented

    def _recurrent(self, function: Function, *args: Any) -> Any:
        if len(args) != 9 or isinstance(args[3], (list, tuple)):  # a packed sequence
            return NotImplemented
        x, given, weights, biases, layers, p, training, bidirectional, batch_first = args
        kind = function.__name__
        states = given if kind == "lstm" else (given,)
        drop = self.drop(p, training) if layers > 1 else None
        stacked = is_stacked(x, *states, *weights)
        projects = len(weights) != layers * (4 if biases else 2) * (2 if bidirectional else 1)
        if projects or (drop is None and not stacked):
            return NotImplemented

        def torchs_layer(x: Tensor, states: State, weights: Sequence[Tensor]) -> tuple[Tensor, State]:
            start = states if kind == "lstm" else states[0]
            outputs, *final = function(x, start, weights, biases, 1, 0.0, training, bidirectional, True)
            return outputs, tuple(final)

        # torch's own function is called for one layer at a time, so that dropout between them is keyed.
        run_layer = unrolled_layer(kind, biases) if stacked else torchs_layer
        return recurrent(run_layer, x, states, weights, layers, batch_first, drop or (lambda outputs: outputs))


def _recurrent(function: Function) -> Function:
    return lambda mode, *args: mode._recurrent(function, *args)


def _drawn(function: Function) -> Function:
    return lambda mode, *args, **kwargs: mode._drawn(function, *args, **kwargs)


DRAWING: tuple[Function, ...] = (
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like),
    *(torch.bernoulli, torch.normal, torch.multinomial, torch.poisson, torch.binomial, torch.rrelu),
    *(Tensor.bernoulli, Tensor.multinomial, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_),
    *(Tensor.random_, Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_),
)
"""Functions that take a `generator`."""

REPLACEMENTS: dict[Function, Function] = {
    functional.dropout: LayerFunctions._dropout,
    torch.dropout: LayerFunctions._dropout,
    functional.dropout1d: LayerFunctions._feature_dropout,
    functional.dropout2d: LayerFunctions._feature_dropout,
    functional.dropout3d: LayerFunctions._feature_dropout,
    functional.alpha_dropout: LayerFunctions._alpha_dropout,
    functional.feature_alpha_dropout: partial(LayerFunctions._alpha_dropout, by_channel=True),
    functional.rrelu: LayerFunctions._rrelu,
    **{function: _drawn(function) for function in DRAWING},
    functional.scaled_dot_product_attention: LayerFunctions._attention,
    functional.multi_head_attention_forward: LayerFunctions._multi_head_attention,
    **{function: _recurrent(function) for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
}
"""What replaces which function; a replacement returns NotImplemented where torch's own is used."""


class _Recorder(TorchFunctionMode):
    """Notes whether a function that may be replaced is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found |= func in REPLACEMENTS
        return func(*args, **(kwargs or {}))


def needs_layer_functions(module: nn.Module, sample: Tensor) -> bool:
    """Return whether a module calls a function that may be replaced, in training or else in evaluation mode."""
    recorder, training = _Recorder(), module.training
    with torch.random.fork_rng(devices=[]), torch.no_grad(), recorder:
        for mode in (True, False):
            module.train(mode)
            try:
                module(sample)
                break
            except Exception:  # some layers fail in training mode with few samples
                continue
    module.train(training)
    return recorder.found
