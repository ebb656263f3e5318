"""Checks a finished report from outside: trusts neither the model nor the tools that made it."""

import csv
import hashlib
import json
import os
import sys
import zipfile

LISTED = 20


class Failure(Exception):
    """An error of this tool's own, with the code that the caller sees."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Checks:
    """Counts what was checked and keeps what was wrong."""

    def __init__(self):
        self.count = 0
        self.faults = []

    def expect(self, holds, fault):
        self.count += 1
        if not holds:
            self.faults.append(fault[:300])

    def result(self):
        return {"passed": not self.faults, "checked": self.count, "faults": self.faults[:LISTED]}


def check_archive(checks, workspace, archive):
    """Every entry has its checksum, every checksum its entry, and both are what lies in the workspace."""
    sums = dict(reversed(line.split("  ", 1)) for line in archive.read("SHA256SUMS").decode().splitlines())
    names = sorted(name for name in archive.namelist() if name != "SHA256SUMS")
    checks.expect(names == sorted(sums), "SHA256SUMS and the archive's entries differ")
    for name in names:
        content = archive.read(name)
        checks.expect(hashlib.sha256(content).hexdigest() == sums.get(name), f"{name} does not match its checksum")
        path = os.path.join(workspace, name)
        with open(path, "rb") as file:
            checks.expect(file.read() == content, f"{name} in the archive is not the one in the workspace")


def check_figures(checks, figures, quarter, source):
    """The headline figures, counted again from the records."""
    year, number = quarter.split("-Q")
    strikes = damaging = cost = 0
    with open(source, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            date = row["Flight Date"]
            if date[:4] == year and (int(date[5:7]) + 2) // 3 == int(number):
                strikes += 1
                damaging += row["Effect Amount of damage"] != "None"
                cost += int(row["Cost Total $"])
    counted = {"quarter": quarter, "strikes": strikes, "damaging": damaging, "cost_usd": cost}
    for name, value in counted.items():
        said = figures.get(name)
        checks.expect(said == value, f"{name}: the report says {said}, the records say {value}")


def check(workspace, quarter, source, archive):
    checks = Checks()
    try:
        with zipfile.ZipFile(os.path.join(workspace, archive)) as opened:
            check_archive(checks, workspace, opened)
            figures = json.loads(opened.read("report/figures.json"))["figures"]
        check_figures(checks, figures, quarter, os.path.join(workspace, source))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise Failure("REPORT_UNREADABLE", f"the report cannot be checked: {error}") from None
    return checks.result()


def answer(request):
    if request["operation"] != "call":
        raise Failure("UNSUPPORTED", f"operation {request['operation']} is not known")
    arguments = request["arguments"]
    return check(request["workspace"], arguments["quarter"], arguments["source"], arguments["archive"])


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
