"""Tools for agentd in Python: one function in, one JSON object out.

The library keeps the result channel free of stray prints, reads the request, calls the function, writes the reply and
ends the process at once. It checks nothing that agentd checks anyway. It speaks tool protocol 1 and needs nothing but the
standard library of Python 3.9 or later.
"""

from __future__ import annotations

import json
import os
import sys
import time

TYPE_CHECKING = False  # As type checkers know it; importing `typing` itself takes longer than all else here.
if TYPE_CHECKING:
    from typing import Any, Callable, NoReturn, Optional

    Handler = Callable[[Any, "Context"], Any]

__all__ = ["Context", "ToolError", "run"]
__version__ = "0.1.0"

PROTOCOL = 1
MAX_EVENT = 4096


class ToolError(Exception):
    """An error that the caller is told: raise it from a handler.

    ``code`` is the tool's own: 1 to 64 letters, digits, ``_``, ``-`` and ``.``. ``message`` is read by the model: say
    what is wrong and what would work. ``retryable`` says that the same call may work later, ``retry_after_ms`` when.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retryable: bool = False,
        retry_after_ms: Optional[int] = None,
        details: Any = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retryable = retryable
        self.retry_after_ms = retry_after_ms
        self.details = details

    def to_json(self) -> dict[str, Any]:
        """The error as it stands in a reply."""
        error: dict[str, Any] = {"code": self.code, "message": self.message, "retryable": self.retryable}
        if self.retry_after_ms is not None:
            error["retry_after_ms"] = self.retry_after_ms
        if self.details is not None:
            error["details"] = self.details
        return error


class Context:
    """What a handler knows about its call, and what it can do besides returning a result."""

    def __init__(self, request: dict[str, Any], events: Optional[int]) -> None:
        self.call_id: str = request["call_id"]
        self.tool: str = request.get("tool", "")
        self.workspace: Optional[str] = request.get("workspace")
        """Absolute path; also the working directory. None when the call has no workspace."""
        self.deadline: str = request.get("deadline", "")
        """When the process is ended from outside: RFC 3339, UTC."""
        self.max_response_bytes: int = request.get("max_response_bytes", 1 << 20)
        self.idempotency_key: str = request.get("idempotency_key", "")
        """The same for every repetition of the same call."""
        self.traceparent: Optional[str] = request.get("traceparent")
        self._ends = time.monotonic() + request.get("timeout_ms", 60_000) / 1000
        self._events = events
        self._artifacts: list[dict[str, str]] = []

    def remaining(self) -> float:
        """Seconds until the deadline, never less than 0."""
        return max(0.0, self._ends - time.monotonic())

    def artifact(self, path: str, media_type: str) -> None:
        """Names a file of the workspace, relative to it, that belongs to the result."""
        self._artifacts.append({"path": path, "media_type": media_type})

    def progress(self, share: Optional[float] = None, message: Optional[str] = None) -> None:
        """Says how far the call is (0 to 1) and what it does. Never fails and never waits."""
        if self._events is None:
            return
        event: dict[str, Any] = {}
        if share is not None:
            event["progress"] = share
        if message is not None:
            event["message"] = message
        line = json.dumps(event).encode() + b"\n"
        if event and len(line) <= MAX_EVENT:
            try:
                os.write(self._events, line)
            except OSError:
                pass  # Nobody listens, or slowly: progress is a courtesy.


def run(
    handler: Handler,
    *,
    describe: Optional[dict[str, Any]] = None,
    health: Optional[Callable[[], Optional[str]]] = None,
) -> NoReturn:
    """Serves one request and ends the process; never returns.

    ``handler(arguments, context)`` returns the result, which must be JSON. ``describe`` is merged into the answer to the
    operation of that name (``version``, ``description``, ``input``, ``output``). ``health`` returns None when a call
    could work, else why not; without it the operation is answered with UNSUPPORTED.
    """
    channel = _take_stdout()
    try:
        request = json.loads(sys.stdin.buffer.read())
        call_id = request["call_id"]
    except Exception as error:
        print(f"stdin holds no request of agentd's tool protocol: {error!r}", file=sys.stderr)
        _end(2)
    reply: dict[str, Any] = {"protocol": PROTOCOL, "call_id": call_id, "ok": True}
    try:
        reply.update(_answer(request, handler, describe, health))
        written = _encode(reply)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: every end of a handler is an answer.
        failure = {"protocol": PROTOCOL, "call_id": call_id, "ok": False, "error": _told(error).to_json()}
        try:
            written = _encode(failure)
        except Exception:
            failure["error"] = {"code": "INTERNAL", "message": "the tool's error is no JSON"}
            written = _encode(failure)
        _write(channel, written)
        _end(1)
    _write(channel, written)
    _end(0)


def _answer(
    request: dict[str, Any],
    handler: Handler,
    describe: Optional[dict[str, Any]],
    health: Optional[Callable[[], Optional[str]]],
) -> dict[str, Any]:
    if request.get("protocol") != PROTOCOL:
        raise ToolError("UNSUPPORTED", f"this tool speaks protocol {PROTOCOL}, not {request.get('protocol')}")
    workspace = request.get("workspace")
    if workspace is not None:
        os.chdir(workspace)  # A process started ahead of its call stands elsewhere.
    operation = request.get("operation")
    if operation == "call":
        context = Context(request, _events())
        result = handler(request.get("arguments"), context)
        answer: dict[str, Any] = {"result": result}
        if context._artifacts:
            answer["artifacts"] = context._artifacts
        return answer
    if operation == "describe":
        about = {"name": request.get("tool", ""), "sdk": f"agentd-python/{__version__}"}
        return {"result": {**about, **(describe or {})}}
    if operation == "health" and health is not None:
        problem = health()
        return {"result": {"healthy": True} if problem is None else {"healthy": False, "message": problem}}
    raise ToolError("UNSUPPORTED", f"this tool does not know the operation {operation!r}")


def _told(error: BaseException) -> ToolError:
    if isinstance(error, ToolError):
        return error
    import traceback  # Only a tool that fails needs it.

    traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
    return ToolError("INTERNAL", f"{type(error).__name__}: {error}")


def _encode(reply: dict[str, Any]) -> bytes:
    return json.dumps(reply, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def _take_stdout() -> int:
    """The real stdout; from now on descriptor 1 is stderr, for this process and for the programs that it starts."""
    sys.stdout.flush()
    channel = os.dup(1)
    os.dup2(2, 1)
    return channel


def _events() -> Optional[int]:
    try:
        descriptor = int(os.environ["AGENTD_EVENTS_FD"])
        os.set_blocking(descriptor, False)
        os.set_inheritable(descriptor, False)
        return descriptor
    except (KeyError, ValueError, OSError):
        return None


def _write(channel: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(channel, view) :]
        except OSError as error:
            print(f"the reply could not be written: {error}", file=sys.stderr)
            _end(1)


def _end(status: int) -> NoReturn:
    """Ends at once: threads, atexit handlers and finalizers have no say after the reply."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(status)
