"""A call of a remote object's method, written as code that mypy checks against its class."""

from collections.abc import Callable
from typing import Any, NamedTuple


class MethodCall(NamedTuple):
    """What is sent to an actor."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def method_call(write: Callable[..., Any], *args: Any) -> MethodCall:
    """The call that ``write`` makes on its first argument; nothing runs.

    ``write`` is a lambda such as ``lambda worker: worker.save(folder)``, where the caller gives
    ``worker`` the type of the remote class. So mypy checks the method's name, arguments and result,
    and this process need not import the class.

    Args:
        args: what ``write`` takes after the remote object
    """
    call = write(_Remote(), *args)
    assert isinstance(call, MethodCall), f"expected one method call, found {call!r}"
    return call


class _Remote:
    """Has every method; a call of one returns itself."""

    def __getattr__(self, method: str) -> Callable[..., MethodCall]:
        return lambda *args, **kwargs: MethodCall(method, args, kwargs)
