"""Recurrent layers as a loop over time steps, for stacked clients: vmap has no rules for torch's own functions.

One product computes the inputs' part of all time steps; each step then needs one small product for the hidden state.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

Drop = Callable[[Tensor], Tensor]
"""Dropout between layers, of outputs [samples, time, features]."""
State = tuple[Tensor, ...]
"""The hidden state, and with an LSTM the cell state."""
Layer = Callable[[Tensor, State, Sequence[Tensor]], tuple[Tensor, State]]
"""Returns outputs and final states of one layer, given its inputs [samples, time, features], its initial states
[directions, samples, features] and its weights."""


def recurrent(
    run_layer: Layer, x: Tensor, states: State, weights: Sequence[Tensor], layers: int, batch_first: bool, drop: Drop
) -> tuple[Tensor, ...]:
    """Return what torch.lstm, torch.gru, torch.rnn_tanh and torch.rnn_relu return: outputs and final states.

    Parameters
    ----------
    run_layer
        Computes one layer.
    x
        Inputs [samples, time, features], or with time first unless `batch_first`.
    states
        Initial states [layers × directions, samples, features]: h, and for an LSTM c.
    weights
        All weights in torch's order: by layer, then direction; W_ih, W_hh and, if there are biases, b_ih, b_hh.
    drop
        Applied to the outputs of all layers but the last.
    """
    x = x if batch_first else x.transpose(0, 1)
    per_layer = len(weights) // layers
    directions = len(states[0]) // layers
    final: list[State] = []
    for layer in range(layers):
        start = tuple(state[layer * directions : (layer + 1) * directions] for state in states)
        x, last = run_layer(x, start, weights[layer * per_layer : (layer + 1) * per_layer])
        final.append(last)
        if layer < layers - 1:
            x = drop(x)
    joined = (torch.cat(parts) for parts in zip(*final, strict=True))
    return (x if batch_first else x.transpose(0, 1)), *joined


def unrolled_layer(kind: str, biases: bool) -> Layer:
    """Return a layer (`lstm`, `gru`, `rnn_tanh` or `rnn_relu`) as a loop over time steps."""
    per_direction = 4 if biases else 2

    def run_layer(x: Tensor, states: State, weights: Sequence[Tensor]) -> tuple[Tensor, State]:
        outputs, final = [], []
        for direction in range(len(states[0])):
            own = weights[direction * per_direction : (direction + 1) * per_direction]
            b_input, b_hidden = (own[2], own[3]) if biases else (None, None)
            steps = functional.linear(x, own[0], b_input).unbind(1)
            start = tuple(state[direction] for state in states)
            output, last = _direction(kind, steps[::-1] if direction else steps, start, own[1], b_hidden)
            outputs.append(torch.stack(output[::-1] if direction else output, dim=1))
            final.append(last)
        return torch.cat(outputs, dim=-1), tuple(torch.stack(parts) for parts in zip(*final, strict=True))

    return run_layer


def _direction(
    kind: str, steps: Sequence[Tensor], state: State, weight: Tensor, bias: Tensor | None
) -> tuple[list[Tensor], State]:
    """Run one layer in one direction over the inputs' parts of the gates, one tensor for each time step."""
    cell = CELLS[kind]
    outputs = []
    for step in steps:
        state = cell(step, functional.linear(state[0], weight, bias), state)
        outputs.append(state[0])
    return outputs, state


def _lstm(of_input: Tensor, of_hidden: Tensor, state: State) -> State:
    into, forget, new, out = (of_input + of_hidden).chunk(4, dim=-1)
    memory = torch.sigmoid(forget) * state[1] + torch.sigmoid(into) * torch.tanh(new)
    return torch.sigmoid(out) * torch.tanh(memory), memory


def _gru(of_input: Tensor, of_hidden: Tensor, state: State) -> State:
    reset_input, update_input, new_input = of_input.chunk(3, dim=-1)
    reset_hidden, update_hidden, new_hidden = of_hidden.chunk(3, dim=-1)
    new = torch.tanh(new_input + torch.sigmoid(reset_input + reset_hidden) * new_hidden)
    update = torch.sigmoid(update_input + update_hidden)
    return (new + update * (state[0] - new),)


def _rnn_tanh(of_input: Tensor, of_hidden: Tensor, state: State) -> State:
    return (torch.tanh(of_input + of_hidden),)


def _rnn_relu(of_input: Tensor, of_hidden: Tensor, state: State) -> State:
    return (torch.relu(of_input + of_hidden),)


CELLS = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn_tanh, "rnn_relu": _rnn_relu}
"""The step of each kind of layer: parts of the gates from input and hidden state, and the state."""
