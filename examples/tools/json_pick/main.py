"""A tool in plain Python, written against the protocol alone."""

import json
import os
import sys


class Refused(Exception):
    """An answer with ``ok: false``."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def pick(path, pointer):
    try:
        with open(path, "rb") as file:
            text = file.read()
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise Refused("NO_SUCH_FILE", f"the file cannot be opened: {error}") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused("NOT_JSON", f"the file is no JSON: {error}") from error
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise Refused("NOTHING_THERE", f"the pointer leads nowhere at {part!r}") from error
    return {"value": value}


def answer(request):
    operation = request["operation"]
    if operation == "call":
        return pick(**request["arguments"])
    if operation == "describe":
        return {"name": "json_pick", "version": "1.0"}
    if operation == "health":
        return {"healthy": True}
    raise Refused("UNSUPPORTED", f"this tool does not know the operation {operation}")


channel = os.dup(1)
os.dup2(2, 1)  # whatever prints goes to the log
request = json.loads(sys.stdin.buffer.read())
reply = {"protocol": 1, "call_id": request["call_id"]}
try:
    reply.update(ok=True, result=answer(request))
    written = json.dumps(reply, allow_nan=False)
except Refused as refused:
    reply.update(ok=False, error={"code": refused.code, "message": str(refused)})
    written = json.dumps(reply)
except ValueError as error:
    reply.pop("result", None)
    reply.update(ok=False, error={"code": "NOT_JSON", "message": f"the value is no JSON: {error}"})
    written = json.dumps(reply)
with os.fdopen(channel, "w", encoding="utf-8") as out:
    out.write(written)
sys.exit(0 if reply["ok"] else 1)
