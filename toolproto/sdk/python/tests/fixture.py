"""A tool whose argument `do` says what it shall do; the tests run it as a process."""

import atexit
import os
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from agentd_tool import ToolError, run  # noqa: E402


def handle(arguments, context):
    do = arguments.get("do")
    if do == "echo":
        return arguments
    if do == "print":
        print("stray")
        sys.__stdout__.write("stray\n")
        os.write(1, b"stray\n")
        subprocess.run(["/bin/echo", "stray"], check=True)
        atexit.register(print, "stray, late")
        return {"printed": True}
    if do == "fail":
        raise ToolError("NO_LUCK", "not today", retryable=True, retry_after_ms=5, details={"dice": 1})
    if do == "raise":
        raise RuntimeError("boom")
    if do == "exit":
        sys.exit(0)
    if do == "nan":
        return {"value": float("nan")}
    if do == "unserialisable":
        return {"value": object()}
    if do == "thread":
        threading.Thread(target=time.sleep, args=(600,)).start()
        return {"started": True}
    if do == "artifact":
        context.artifact("out/a.csv", "text/csv")
        return {}
    if do == "progress":
        context.progress(0.5, "half")
        context.progress(message="x" * 10_000)
        for _ in range(arguments.get("times", 0)):
            context.progress(0.6)
        return {}
    if do == "context":
        return {
            "cwd": os.getcwd(),
            "workspace": context.workspace,
            "remaining_ms": int(context.remaining() * 1000),
            "max_response_bytes": context.max_response_bytes,
            "idempotency_key": context.idempotency_key,
            "tool": context.tool,
        }
    if do == "large":
        return {"text": "é" * arguments["characters"]}
    raise ToolError("UNKNOWN_DO", f"{do!r} is nothing to do")


def health():
    return os.environ.get("UNHEALTHY")


run(handle, describe={"version": "1.2"}, health=health)
