"""Counts the bird strikes of one quarter. Speaks agentd's tool protocol without any library."""

import csv
import json
import os
import sys
from collections import Counter

LISTED = 8


class Failure(Exception):
    """An error of this tool's own, with the code that the caller sees."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def months_of(quarter):
    year, number = quarter.split("-Q")
    first = 3 * int(number) - 2
    return [f"{year}-{month:02}" for month in range(first, first + 3)]


def ranking(names):
    """The most frequent names; equal counts in alphabetical order, so that the result never varies."""
    ordered = sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))
    return [{"name": name, "strikes": strikes} for name, strikes in ordered[:LISTED]]


def figures(quarter, path):
    months = months_of(quarter)
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["Flight Date"][:7] in months]
    except FileNotFoundError:
        raise Failure("SOURCE_MISSING", f"{os.path.basename(path)} is not in the workspace") from None
    except KeyError as error:
        raise Failure("SOURCE_UNFIT", f"{os.path.basename(path)} has no column {error}") from None
    if not rows:
        raise Failure("QUARTER_EMPTY", f"{os.path.basename(path)} has no record of {quarter}")

    strikes = Counter(row["Flight Date"][:7] for row in rows)
    damaging = Counter(row["Flight Date"][:7] for row in rows if row["Effect Amount of damage"] != "None")
    identified = [row["Wildlife Species"] for row in rows if not row["Wildlife Species"].startswith("Unknown")]
    return {
        "quarter": quarter,
        "strikes": len(rows),
        "damaging": sum(damaging.values()),
        "cost_usd": sum(int(row["Cost Total $"]) for row in rows),
        "months": [{"month": month, "strikes": strikes[month], "damaging": damaging[month]} for month in months],
        "phases": ranking(row["Phase of flight"] for row in rows),
        "species": ranking(identified),
        "unidentified": len(rows) - len(identified),
    }


def answer(request):
    if request["operation"] != "call":
        raise Failure("UNSUPPORTED", f"operation {request['operation']} is not known")
    arguments = request["arguments"]
    return figures(arguments["quarter"], os.path.join(request["workspace"], arguments["source"]))


def main():
    request = json.load(sys.stdin)
    reply = {"protocol": 1, "call_id": request["call_id"]}
    try:
        reply |= {"ok": True, "result": answer(request)}
    except Failure as failure:
        reply |= {"ok": False, "error": {"code": failure.code, "message": str(failure), "retryable": False}}
    json.dump(reply, sys.stdout)
    return 0 if reply["ok"] else 1


sys.exit(main())
