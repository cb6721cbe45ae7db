"""Checks of users' methods: their class when it is loaded, and what their hooks return or raise.

Whatever is wrong becomes one sentence that names the method, the line of the user's code and what to write instead.
"""

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedrema.base.user_code import users_line
from fedrema.core import Answer, Client, Method, Phase, Role, Uploads
from fedrema.errors import BadInput, FedremaError, raised_by_user
from fedrema.models.body_and_head import Tensors

HOOKS = tuple(name for name, value in vars(Method).items() if inspect.isfunction(value) and not name.startswith("_"))
"""What a method may define."""


class BadMethod(BadInput, TypeError):
    """A method that breaks the contract of a hook: names the hook, its line and what it should return."""


def check_method(kind: type[Method]) -> type[Method]:
    """Refuse a class that cannot be what its author meant: misspelt hooks, wrong signatures, missing names."""
    where = f"Method {kind.__name__}{_in_brackets(_first_line(kind))}"
    for attribute, example in {
        "name": kind.__name__.lower(),
        "title": kind.__name__,
        "paper": "where it is from",
    }.items():
        if not isinstance(getattr(kind, attribute, None), str):
            raise BadMethod(f'{where} has no {attribute}: add `{attribute}: ClassVar[str] = "{example}"`.')
    for owner in (each for each in kind.__mro__ if issubclass(each, Method) and _is_users(each)):
        if "__dataclass_fields__" not in vars(owner) and _own_settings(owner):
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


def _own_settings(kind: type) -> list[str]:
    annotations = inspect.get_annotations(kind)
    return [name for name, what in annotations.items() if "ClassVar" not in str(what)]


@contextmanager
def calling(method: Method, hook: str) -> Iterator[None]:
    """Turn what a user's method raises into one sentence with its place in the user's code."""
    if not _is_users(type(method)):
        yield
        return
    drawn = torch.get_rng_state() if hook in ("begin", "end", "aggregate") else None
    try:
        yield
    except FedremaError:
        raise
    except (Exception, SystemExit) as error:
        place = _place_in_users_code(error, type(method))
        if place is None:
            raise
        reason = _remedy(str(error)) or raised_by_user(error)
        raise BadMethod(f"{_called(method, hook)} failed at {place}: {reason}.") from error
    if drawn is not None and not torch.equal(drawn, torch.get_rng_state()):
        raise BadMethod(
            f"{_called(method, hook)}{_in_brackets(location(getattr(method, hook)))} draws from torch's global random"
            ' numbers, so a run could not be repeated: pass generator=moment.generator("a purpose").'
        )


def _remedy(reason: str) -> str | None:
    """Return what to do about errors of stacked training, which torch explains in its own terms."""
    if "data-dependent control flow" in reason or ".item()" in reason:
        return (
            "a Python `if`, float() or .item() cannot look at a tensor while all clients train stacked:"
            " use torch.where, or --backend loop"
        )
    if "random operation" in reason:
        return (
            "random numbers cannot be drawn while all clients train stacked: draw them in `begin` with"
            ' generator=moment.generator("a purpose") and put them into client.inbox, or use --backend loop'
        )
    return None


def check_client(method: Method, hook: str, after: Any) -> Client:
    """Return the client that a hook made, if it is one whose groups hold named tensors."""
    if not isinstance(after, Client):
        raise _wrong(method, hook, "the client", after, "return client, or client.having(memory={…}) to change it")
    for group in ("params", "memory", "inbox"):
        _check_tensors(method, hook, f"client.{group}", getattr(after, group))
    return after


def check_end(method: Method, ended: Any) -> tuple[Client, Tensors]:
    """Return the client to keep and what it sends, if `end` returned both."""
    if not isinstance(ended, tuple) or len(ended) != 2:
        raise _wrong(method, "end", "two values, the client and what it sends", ended, "return client, {}")
    if not isinstance(ended[1], dict):
        raise _wrong(method, "end", "a dict of tensors as its second value", ended[1], "return client, {}")
    _check_tensors(method, "end", "what it sends", ended[1])
    return check_client(method, "end", ended[0]), ended[1]


def check_phases(method: Method, hook: str, phases: Any) -> Sequence[Phase]:
    """Return the plan of local training, if it is one."""
    if not isinstance(phases, (tuple, list)) or not all(isinstance(phase, Phase) for phase in phases):
        raise _wrong(method, hook, "a tuple of phases", phases, "return (Phase(…),)")
    return phases


def check_role(method: Method, name: str, role: Any) -> Role:
    """Return what becomes of a parameter, if it is a role."""
    if not isinstance(role, Role):
        raise _wrong(method, "role", f"a Role for {name!r}", role, "return Role.SHARED, PERSONAL, COLLECTED or PRIVATE")
    return role


def check_loss(loss: Callable[..., Any], value: Any) -> Tensor:
    """Return a loss, if it is a single number."""
    if isinstance(value, Tensor) and value.dim() == 0:
        return value
    raise BadMethod(
        f"{getattr(loss, '__qualname__', 'loss')}{_in_brackets(location(loss))} must return one number per batch, a"
        f" tensor of shape (), got {_described(value)}: take the mean over the batch, as cross_entropy(logits, batch)"
        " does."
    )


def check_scores(method: Method, scores: Any, samples: int, classes: int) -> Tensor:
    """Return class scores, if there is a row per sample and a column per class."""
    if not isinstance(scores, Tensor) or scores.shape != (samples, classes):
        wanted = f"scores of shape {(samples, classes)}, a row per sample and a column per class"
        raise _wrong(method, "predict", wanted, scores, "return net(params, x)")
    return scores


def check_answer(method: Method, answer: Any, uploads: Uploads, roles: Mapping[str, Role], params: Tensors) -> Answer:
    """Return a server's answer, if it can be handed out; `params` are everybody's, the personal ones [K, ...]."""
    if not isinstance(answer, Answer):
        raise _wrong(method, "aggregate", "an Answer", answer, "return Answer(shared=…, state=state)")
    for group in ("shared", "personal"):
        _check_tensors(method, "aggregate", group, getattr(answer, group))
    for name, value in answer.shared.items():
        role = roles.get(name)
        if role in (Role.PERSONAL, Role.PRIVATE):
            raise _wrong(method, "aggregate", f"{name!r} in personal, as it is {role}", value, "Answer(personal=…)")
        if role is not None and value.shape != params[name].shape:
            raise _wrong(
                method, "aggregate", f"{name!r} of shape {tuple(params[name].shape)}", value, "one copy for all"
            )
    for name, value in answer.personal.items():
        wanted = (len(uploads.clients), *(params[name].shape[1:] if name in roles else value.shape[1:]))
        if roles.get(name) in (Role.SHARED, Role.COLLECTED) or tuple(value.shape) != wanted:
            raise _wrong(
                method, "aggregate", f"{name!r} of shape {wanted}", value, "a row for each client that uploaded"
            )
    for name, kept in answer.state.items():
        if not isinstance(kept, (Tensor, int, float)):
            raise _wrong(method, "aggregate", f"a tensor or number as state[{name!r}]", kept, "only those can be saved")
    return answer


def _check_tensors(method: Method, hook: str, what: str, group: Any) -> None:
    if not isinstance(group, dict):
        raise _wrong(method, hook, f"a dict of tensors as {what}", group, "names with tensors")
    for name, value in group.items():
        if not isinstance(value, Tensor):
            raise _wrong(method, hook, f"a tensor as {name!r} in {what}", value, "torch.tensor(value)")


def _wrong(method: Method, hook: str, wanted: str, found: Any, remedy: str) -> BadMethod:
    where = _in_brackets(location(getattr(method, hook)))
    return BadMethod(f"{_called(method, hook)}{where} must return {wanted}, got {_described(found)}: {remedy}.")


def _called(method: Method, hook: str) -> str:
    return f"{type(method).__name__}.{hook}"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is None:
        return "nothing (is a `return` missing?)"
    return f"a {type(value).__name__}"


def location(function: Callable[..., Any]) -> str | None:
    """Return file and first line of a function; None where it has no code of its own."""
    function = inspect.unwrap(getattr(function, "func", getattr(function, "__func__", function)))
    code = getattr(function, "__code__", None)
    return None if code is None else f"{_shown(code.co_filename)}:{code.co_firstlineno}"


def _first_line(kind: type) -> str | None:
    try:
        return f"{_shown(inspect.getfile(kind))}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):  # made by hand, or typed into a prompt
        return None


def _place_in_users_code(error: BaseException, kind: type[Method]) -> str | None:
    """Return file and line of the innermost call in code that users wrote; their method may be installed."""
    place = users_line(
        error, {value.__code__.co_filename for value in vars(kind).values() if inspect.isfunction(value)}
    )
    return None if place is None else f"{_shown(place[0])}:{place[1]}"


def _is_users(kind: type) -> bool:
    return not kind.__module__.startswith("fedrema.")


def _shown(file: str) -> str:
    """Return a path as short as it is from the working folder."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def _in_brackets(where: str | None) -> str:
    return f" ({where})" if where else ""
