"""Errors that are unisono's own and torch's at once.

A call that raises does so with an error of both types. But a future passes on only text
to whoever waits for it in C++, and so does backward() if a bucket of DDP fails: what
comes out is a RuntimeError around that text. So the errors that futures got are kept,
and where torch raises such a RuntimeError in Python, the error whose text is in it is
raised instead.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unisono import errors
from unisono.errors import CollectiveTimeout, UnisonoError
from unisono.interop.torch.dynamo import leave_frame_out

_KEPT = 64  # errors, of which each is as small as its text

_given: deque[UnisonoError] = deque(maxlen=_KEPT)


class BadArgument(errors.BadArgument, dist.DistBackendError):
    """Tensors or options that do not fit, refused before anything is sent."""


_both: dict[type[BaseException], type[BaseException]] = {
    errors.BadArgument: BadArgument
}


def for_torch(error: BaseException) -> BaseException:
    """The same error, which is torch's DistBackendError as well."""
    if not isinstance(error, UnisonoError) or isinstance(error, RuntimeError):
        return error
    text = str(error)
    if isinstance(error, CollectiveTimeout):
        text = f"{error.collective or 'a call'} Timed out waiting: {text}"
    error.args = (text,)
    return as_both(error)


def as_both(error: UnisonoError) -> BaseException:
    """The same for one whose text is as torch's programs know it."""
    kind = type(error)
    if kind not in _both:
        own = {"__module__": kind.__module__}
        _both[kind] = type(kind.__name__, (kind, dist.DistBackendError), own)
    both: BaseException = error
    both.__class__ = _both[kind]
    return both


def text_for_future(error: BaseException) -> str:
    """What a future is given for an error, by which the error is found again."""
    if isinstance(error, UnisonoError):
        _given.append(_copy(error))
    return f"{type(error).__name__}: {error}"


def original(error: BaseException) -> BaseException:
    """The error of ours that an error of torch's is about; or else itself."""
    if isinstance(error, UnisonoError):
        return error
    text = str(error)
    for given in reversed(_given):
        if (told := str(given)) and told in text:
            return _copy(given)
    return error


def _copy(error: UnisonoError) -> UnisonoError:
    """Without the frames that it went through, which hold on to models and tensors."""
    made = type(error).__new__(type(error))
    made.args = error.args
    made.__dict__.update(error.__dict__)
    return made


@functools.cache
def raise_originals() -> None:
    """Have futures and backward() raise our errors, not text about them."""
    future: Any = torch._C.Future
    future.wait = _raising_originals(future.wait)
    future.value = _raising_originals(future.value)
    work: Any = dist.Work
    exception = work.exception
    work.exception = lambda self: (e := exception(self)) and original(e)
    # Whoever changes what backward() does changes both, as torch.compiler does.
    autograd: Any = torch.autograd
    if hasattr(autograd, "_engine_run_backward"):
        run = _raising_originals(autograd._engine_run_backward)
        autograd._engine_run_backward = autograd.graph._engine_run_backward = run


def _raising_originals(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            found = original(error)
            if found is error:
                raise
        raise found from None

    leave_frame_out(called)
    return called
