"""Validate users' methods: the class when it is loaded, and what its hooks return or raise.

Every problem becomes one sentence that names the method, the line of the user's code and what to write instead.
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedrema.base.user_code import user_code_line
from fedrema.core import Answer, Client, Method, Phase, Role, Uploads
from fedrema.errors import BadInput, FedremaError, raised_by_user
from fedrema.models.body_and_head import Tensors

HOOKS = tuple(name for name, value in vars(Method).items() if inspect.isfunction(value) and not name.startswith("_"))
"""Names of the functions that a method may override."""


class BadMethod(BadInput, TypeError):
    """A method violates the contract of a hook; the message names the hook, its line and what it should return."""


def check_method(kind: type[Method]) -> type[Method]:
    """Raise `BadMethod` for a class with a misspelt hook, a wrong signature or a missing name."""
    where = f"Method {kind.__name__}{_in_brackets(_first_line(kind))}"
    for attribute, example in {
        "name": kind.__name__.lower(),
        "title": kind.__name__,
        "paper": "where it is from",
    }.items():
        if not isinstance(getattr(kind, attribute, None), str):
            raise BadMethod(f'{where} has no {attribute}: add `{attribute}: ClassVar[str] = "{example}"`.')
    for owner in (each for each in kind.__mro__ if issubclass(each, Method) and _is_user_defined(each)):
        if "__dataclass_fields__" not in vars(owner) and _annotated_fields(owner):
            raise BadMethod(f"{where} is not a dataclass: put @dataclass(frozen=True) above `class {owner.__name__}`.")
        for name, value in vars(owner).items():
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if inspect.isfunction(function):
                _check_hook(owner, name, function, isinstance(value, staticmethod))
    return kind


def _check_hook(owner: type[Method], name: str, function: Callable[..., Any], static: bool) -> None:
    where = f"Method {owner.__name__}{_in_brackets(location(function))}"
    if name in HOOKS:
        wanted = inspect.signature(getattr(Method, name))
        try:
            inspect.signature(function).bind(*list(wanted.parameters)[int(static) :])
        except TypeError:
            expected = ", ".join(wanted.parameters)
            found = ", ".join(inspect.signature(function).parameters)
            raise BadMethod(f"{where}: {name} must take ({expected}), got ({found}).") from None
    elif not name.startswith("_"):
        close = difflib.get_close_matches(name.lower(), HOOKS, n=1, cutoff=0.75)
        if close:
            raise BadMethod(
                f"{where} defines {name!r}, which is not a hook: did you mean {close[0]!r}?"
                f" If it is a function of your own, call it _{name}."
            )


def _annotated_fields(kind: type) -> list[str]:
    annotations = inspect.get_annotations(kind)
    return [name for name, what in annotations.items() if "ClassVar" not in str(what)]


@contextmanager
def calling(method: Method, hook: str) -> Iterator[None]:
    """Convert errors of a user's method to one sentence with the location in the user's code."""
    if not _is_user_defined(type(method)):
        yield
        return
    random_state = torch.get_rng_state() if hook in ("begin", "end", "aggregate") else None
    try:
        yield
    except FedremaError:
        raise
    except (Exception, SystemExit) as error:
        place = _location_in_user_code(error, type(method))
        if place is None:
            raise
        reason = _remedy(str(error)) or raised_by_user(error)
        raise BadMethod(f"{_hook_name(method, hook)} failed at {place}: {reason}.") from error
    if random_state is not None and not torch.equal(random_state, torch.get_rng_state()):
        raise BadMethod(
            f"{_hook_name(method, hook)}{_in_brackets(location(getattr(method, hook)))} uses torch's global random"
            ' generator, so runs are not reproducible: pass generator=moment.generator("a purpose").'
        )


def _remedy(reason: str) -> str | None:
    """Return advice for errors of stacked training, whose messages from torch are hard to understand."""
    if "data-dependent control flow" in reason or ".item()" in reason:
        return (
            "a Python `if`, float() or .item() cannot depend on a tensor while clients train stacked:"
            " use torch.where, or --backend loop"
        )
    if "random operation" in reason:
        return (
            "random numbers cannot be drawn while clients train stacked: draw them in `begin` with"
            ' generator=moment.generator("a purpose") and put them into client.inbox, or use --backend loop'
        )
    return None


def check_client(method: Method, hook: str, after: Any) -> Client:
    """Return the client that a hook returned, if it is a `Client` with dictionaries of tensors."""
    if not isinstance(after, Client):
        raise _error(method, hook, "the client", after, "return client, or client.having(memory={…}) to change it")
    for group in ("params", "memory", "inbox"):
        _check_tensors(method, hook, f"client.{group}", getattr(after, group))
    return after


def check_end(method: Method, ended: Any) -> tuple[Client, Tensors]:
    """Return the client and the tensors to send, if `end` returned both."""
    if not isinstance(ended, tuple) or len(ended) != 2:
        raise _error(method, "end", "two values, the client and what it sends", ended, "return client, {}")
    if not isinstance(ended[1], dict):
        raise _error(method, "end", "a dict of tensors as its second value", ended[1], "return client, {}")
    _check_tensors(method, "end", "what it sends", ended[1])
    return check_client(method, "end", ended[0]), ended[1]


def check_phases(method: Method, hook: str, phases: Any) -> Sequence[Phase]:
    """Return the phases, if they are a sequence of `Phase`."""
    if not isinstance(phases, (tuple, list)) or not all(isinstance(phase, Phase) for phase in phases):
        raise _error(method, hook, "a tuple of phases", phases, "return (Phase(…),)")
    return phases


def check_role(method: Method, name: str, role: Any) -> Role:
    """Return the role of a parameter, if it is a `Role`."""
    if not isinstance(role, Role):
        raise _error(method, "role", f"a Role for {name!r}", role, "return Role.SHARED, PERSONAL, COLLECTED or PRIVATE")
    return role


def check_loss(loss: Callable[..., Any], value: Any) -> Tensor:
    """Return a loss, if it is a scalar."""
    if isinstance(value, Tensor) and value.dim() == 0:
        return value
    raise BadMethod(
        f"{getattr(loss, '__qualname__', 'loss')}{_in_brackets(location(loss))} must return one number per batch, a"
        f" tensor of shape (), got {_describe(value)}: take the mean over the batch, as cross_entropy(logits, batch)"
        " does."
    )


def check_scores(method: Method, scores: Any, samples: int, classes: int) -> Tensor:
    """Return outputs, if they have one row per sample and one column per class or other output of the network."""
    if not isinstance(scores, Tensor) or scores.shape != (samples, classes):
        wanted = f"scores of shape {(samples, classes)}, a row per sample and a column per class"
        raise _error(method, "predict", wanted, scores, "return net(params, x)")
    return scores


def check_answer(method: Method, answer: Any, uploads: Uploads, roles: Mapping[str, Role], params: Tensors) -> Answer:
    """Return a valid answer of `aggregate`; `params` are those of the federation, the personal ones [K, ...]."""
    if not isinstance(answer, Answer):
        raise _error(method, "aggregate", "an Answer", answer, "return Answer(shared=…, state=state)")
    for group in ("shared", "personal"):
        _check_tensors(method, "aggregate", group, getattr(answer, group))
    for name, value in answer.shared.items():
        role = roles.get(name)
        if role in (Role.PERSONAL, Role.PRIVATE):
            raise _error(method, "aggregate", f"{name!r} in personal, as it is {role}", value, "Answer(personal=…)")
        if role is not None and value.shape != params[name].shape:
            raise _error(
                method, "aggregate", f"{name!r} of shape {tuple(params[name].shape)}", value, "one copy for all"
            )
    for name, value in answer.personal.items():
        wanted = (len(uploads.clients), *(params[name].shape[1:] if name in roles else value.shape[1:]))
        if roles.get(name) in (Role.SHARED, Role.COLLECTED) or tuple(value.shape) != wanted:
            raise _error(method, "aggregate", f"{name!r} of shape {wanted}", value, "one row per client that uploaded")
    for name, kept in answer.state.items():
        if not isinstance(kept, (Tensor, int, float)):
            raise _error(method, "aggregate", f"a tensor or number as state[{name!r}]", kept, "only these can be saved")
    return answer


def check_traces(method: Method, names: Iterable[Any], recorded: Collection[str]) -> None:
    """Refuse names of traces that are no strings, or by which records hold something else."""
    where = _in_brackets(location(type(method).aggregate))
    for name in names:
        if not isinstance(name, str):
            raise BadMethod(f"{_hook_name(method, 'aggregate')}{where} traces {name!r}: a name must be a string.")
        if name in recorded:
            raise BadMethod(
                f"{_hook_name(method, 'aggregate')}{where} traces {name!r}, but every record of a round has something"
                f" else of that name: call it 'own_{name}'."
            )


def _check_tensors(method: Method, hook: str, what: str, group: Any) -> None:
    if not isinstance(group, dict):
        raise _error(method, hook, f"a dict of tensors as {what}", group, "map names to tensors")
    for name, value in group.items():
        if not isinstance(value, Tensor):
            raise _error(method, hook, f"a tensor as {name!r} in {what}", value, "torch.tensor(value)")


def _error(method: Method, hook: str, wanted: str, found: Any, remedy: str) -> BadMethod:
    where = _in_brackets(location(getattr(method, hook)))
    return BadMethod(f"{_hook_name(method, hook)}{where} must return {wanted}, got {_describe(found)}: {remedy}.")


def _hook_name(method: Method, hook: str) -> str:
    return f"{type(method).__name__}.{hook}"


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is None:
        return "None (is a `return` missing?)"
    return f"a {type(value).__name__}"


def location(function: Callable[..., Any]) -> str | None:
    """Return file and first line of a function; None if it has no Python code."""
    function = inspect.unwrap(getattr(function, "func", getattr(function, "__func__", function)))
    code = getattr(function, "__code__", None)
    return None if code is None else f"{_relative_path(code.co_filename)}:{code.co_firstlineno}"


def _first_line(kind: type) -> str | None:
    try:
        return f"{_relative_path(inspect.getfile(kind))}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):  # created dynamically or in an interactive session
        return None


def _location_in_user_code(error: BaseException, kind: type[Method]) -> str | None:
    """Return file and line of the innermost call in the user's code; the user's method may be installed."""
    place = user_code_line(
        error, {value.__code__.co_filename for value in vars(kind).values() if inspect.isfunction(value)}
    )
    return None if place is None else f"{_relative_path(place[0])}:{place[1]}"


def _is_user_defined(kind: type) -> bool:
    return not kind.__module__.startswith("fedrema.")


def _relative_path(file: str) -> str:
    """Return a path relative to the working directory if it is inside it."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def _in_brackets(where: str | None) -> str:
    return f" ({where})" if where else ""
