"""A replacement of CUDA graphs for the CPU: it records the operators of a function and executes them again."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph:
    """Takes the place of `torch.cuda.CUDAGraph`: a replay executes the operators, but no Python code."""

    def __init__(self):
        self.operators = []
        self.replays = 0

    def replay(self):
        self.replays += 1
        with torch.no_grad():
            for operator, args, kwargs, results in self.operators:
                again = tree_leaves(operator(*args, **kwargs))
                for result, value in zip(tree_leaves(results), again, strict=True):
                    if isinstance(result, torch.Tensor) and not _same_memory(result, value):
                        result.copy_(value)


class Recording(TorchDispatchMode):
    """Records operators; changes in place are undone at the end, because a capture computes nothing."""

    def __init__(self, graph):
        super().__init__()
        self.graph = graph
        self.changed = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        if operator._schema.is_mutable:
            written = zip(operator._schema.arguments, args, strict=False)
            for value in tree_leaves([value for argument, value in written if argument.is_write]):
                self.changed.append((value, value.clone()))
        results = operator(*args, **kwargs)
        self.graph.operators.append((operator, args, kwargs, results))
        return results

    def undo(self):
        for value, before in reversed(self.changed):
            value.copy_(before)


@contextmanager
def recorded(graph, pool, capture_error_mode):
    """Take the place of `torch.cuda.graph`."""
    with Recording(graph) as recording:
        yield
    recording.undo()


def _same_memory(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
