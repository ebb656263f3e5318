#!/usr/bin/env python3
"""Verifies receipts of agentd, and histories of its keys; written from docs/receipts.md alone, as a second opinion on
`agentctl verify`.

usage: verify_receipts.py FILE PUBLIC_KEYS.pem

Needs only the `cryptography` package. Prints one line per fault, `LINE FAULT`, and exits 1; prints `valid` and exits 0.
"""

import base64
import hashlib
import json
import re
import sys

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
RECEIPT = "https://agentd.dev/receipt/v1"
SEAL = "https://agentd.dev/seal/v1"
KEY_CHANGE = "https://agentd.dev/key-change/v1"
PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
SAME_IN_EVIDENCE = (
    "job_id", "call_id", "sequence", "tool", "policy", "enforced", "not_enforced",
    "started", "ended", "workspace", "withdraws",
)


def canonical(value):
    """RFC 8785 for what receipts hold: objects, arrays, strings, integers, booleans, null."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
        return b"{" + b",".join(canonical(key) + b":" + canonical(value[key]) for key in keys) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(canonical(item) for item in value) + b"]"
    if isinstance(value, float):
        raise ValueError("receipts hold no fractions")
    return json.dumps(value, ensure_ascii=False).encode()


def sha256(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def encoded(payload_type, payload):
    """DSSE's pre-authentication encoding."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def key_id(key):
    raw = key.public_bytes(Encoding.Raw, PublicFormat.Raw)
    return "ed25519:" + hashlib.sha256(raw).hexdigest()[:32]


def signed(key, data, signature):
    try:
        key.verify(base64.b64decode(signature, validate=True), data)
        return True
    except (InvalidSignature, ValueError):
        return False


def opened(text, kinds):
    """The statement's type, its predicate, the payload and the envelope of a line."""
    envelope = json.loads(text)
    payload = base64.b64decode(envelope["payload"], validate=True)
    statement = json.loads(payload)
    if envelope["payloadType"] != PAYLOAD_TYPE or statement["_type"] != STATEMENT:
        raise ValueError
    if statement["predicateType"] not in kinds:
        raise ValueError
    envelope["signatures"] = list(envelope["signatures"])
    return statement, statement["predicate"], payload, envelope


class History:
    """Which keys signed, one after the other."""

    def __init__(self, keys):
        self.keys = keys
        self.faults = []

    def fault(self, line, name):
        if (line, name) not in self.faults:
            self.faults.append((line, name))

    def check(self, lines):
        before, last = None, 1
        for count, (line, text) in enumerate(lines, start=1):
            last = line
            try:
                _, change, payload, envelope = opened(text, (KEY_CHANGE,))
            except (ValueError, KeyError, TypeError):
                self.fault(line, "unreadable")
                continue
            self.record(line, count, change, encoded(PAYLOAD_TYPE, payload), envelope, before)
            before = (change, sha256(canonical(envelope)))
        if before is not None and before[0]["new"]["key_id"] != next(iter(self.keys)):
            self.fault(last, "unsealed")
        return sorted(self.faults)

    def record(self, line, count, change, data, envelope, before):
        new, old = change["new"], change.get("old")
        if self.own(new) is None:
            self.fault(line, "key_mismatch")
        news = [one["sig"] for one in envelope["signatures"] if one["keyid"] == new["key_id"]]
        others = [one for one in envelope["signatures"] if one["keyid"] != new["key_id"]]
        if not news:
            self.fault(line, "unsigned")
        elif new["key_id"] not in self.keys:
            self.fault(line, "wrong_key")
        elif not signed(self.keys[new["key_id"]], data, news[0]):
            self.fault(line, "bad_signature")
        if old is not None and old["signature"] == "present":
            key = self.own(old)
            is_so = len(others) == 1 and others[0]["keyid"] == old["key_id"] and key is not None
            is_so = is_so and signed(key, data, others[0]["sig"])
        else:
            is_so = not others
        if not is_so:
            self.fault(line, "old_signature_mismatch")
        if change["sequence"] != count:
            self.fault(line, "wrong_sequence")
        if change.get("previous") != (before and before[1]):
            self.fault(line, "broken_chain")
        if before is not None and (old is None or old["key_id"] != before[0]["new"]["key_id"]):
            self.fault(line, "key_mismatch")

    @staticmethod
    def own(named):
        """The key, if its id is its own."""
        try:
            key = load_pem_public_key(named["public_key"].encode())
            return key if key_id(key) == named["key_id"] else None
        except ValueError:
            return None


class Check:
    def __init__(self, keys):
        self.keys = keys
        self.faults = []
        self.job = None
        self.calls = set()
        self.receipts = []
        self.seal = None
        self.lines = 0

    def fault(self, line, name):
        if (line, name) not in self.faults:
            self.faults.append((line, name))

    def line(self, number, text):
        self.lines += 1
        if self.seal is not None:
            self.fault(number, "after_seal")
        try:
            statement, predicate, payload, envelope = opened(text, (RECEIPT, SEAL))
            kind, signatures = statement["predicateType"], envelope["signatures"]
        except (ValueError, KeyError, TypeError):
            self.fault(number, "unreadable")
            return
        if len(signatures) != 1:
            self.fault(number, "unsigned")
        elif signatures[0]["keyid"] not in self.keys:
            self.fault(number, "wrong_key")
        elif not signed(self.keys[signatures[0]["keyid"]], encoded(PAYLOAD_TYPE, payload), signatures[0]["sig"]):
            self.fault(number, "bad_signature")
        if self.job is None:
            self.job = predicate["job_id"]
        elif self.job != predicate["job_id"]:
            self.fault(number, "other_job")
        if kind == SEAL:
            self.seal = (number, predicate)
        else:
            self.receipt(number, statement, predicate)
            self.receipts.append((number, predicate, sha256(canonical(envelope))))

    def receipt(self, line, statement, receipt):
        after = receipt["workspace"].get("after")
        subject = [] if after is None else [{"name": "workspace", "digest": dict([after.split(":")])}]
        if statement["subject"] != subject:
            self.fault(line, "subject_mismatch")
        if receipt["call_id"] in self.calls:
            self.fault(line, "duplicate_call")
        self.calls.add(receipt["call_id"])
        if receipt["ended"] < receipt["started"]:
            self.fault(line, "time_reversed")
        record = receipt["evidence"]["record"]
        if not self.agrees(receipt, record):
            self.fault(line, "evidence_mismatch")
        signature = receipt["evidence"].get("signature")
        if signature is None:
            self.fault(line, "evidence_unsigned")
        elif not any(signed(key, b"agentd evidence v1\n" + canonical(record), signature) for key in self.keys.values()):
            self.fault(line, "evidence_bad_signature")

    @staticmethod
    def agrees(receipt, record):
        claims, said, seen = record["claims"], receipt["outcome"], record["outcome"]
        workspace = record["workspace"]
        network = claims.get("network", {})
        usage = dict(record["usage"])
        usage.update({"net_" + way: network[way] for way in ("sent", "received") if network})
        changed = any(workspace.get(name) for name in ("created", "modified", "deleted"))
        return (
            all(receipt.get(name) == record.get(name) for name in SAME_IN_EVIDENCE)
            and receipt["denied"] == record["denied"] + network.get("denied", []) + claims.get("named", [])
            and receipt["usage"] == usage
            and all(said.get(name) == seen.get(name) for name in ("kind", "exit_status", "signal"))
            and said.get("code") == (claims.get("code") or seen.get("code"))
            and receipt["arguments_digest"] == claims.get("arguments_digest")
            and receipt.get("result", {}).get("digest") == claims.get("result_digest")
            and receipt["semantics"]["observed"] == ("changed" if changed else "unchanged")
        )

    @staticmethod
    def withdrawable(before, receipt):
        workspace = receipt["workspace"]
        return (
            before is not None
            and before["call_id"] == receipt["withdraws"]
            and before["workspace"]["state"] in ("committed", "rolled_back")
            and before["workspace"].get("before") == workspace.get("after")
            and workspace["state"] in ("conflict", "discarded")
            and not any(workspace.get(name) for name in ("created", "modified", "deleted"))
        )

    def finish(self, last_line):
        if self.lines == 1 and len(self.receipts) == 1:
            return self.faults
        previous = previous_record = None
        for index, (line, receipt, digest) in enumerate(self.receipts):
            if receipt["sequence"] != index + 1:
                self.fault(line, "wrong_sequence")
            if receipt.get("previous") != previous:
                self.fault(line, "broken_chain")
            if receipt["evidence"]["record"].get("previous") != previous_record:
                self.fault(line, "broken_evidence_chain")
            if receipt.get("withdraws") is not None:
                before = self.receipts[index - 1][1] if index else None
                if not self.withdrawable(before, receipt):
                    self.fault(line, "bad_withdrawal")
            previous, previous_record = digest, sha256(canonical(receipt["evidence"]["record"]))
        if self.seal is None:
            self.fault(last_line, "unsealed")
        else:
            line, seal = self.seal
            told = (seal["count"], seal.get("previous"), seal.get("evidence_head"))
            if told != (len(self.receipts), previous, previous_record):
                self.fault(line, "seal_mismatch")
        return sorted(self.faults)


def is_history(lines):
    try:
        opened(lines[0][1], (KEY_CHANGE,))
        return True
    except (IndexError, ValueError, KeyError, TypeError):
        return False


def main():
    path, key_path = sys.argv[1:]
    with open(key_path, "rb") as file:
        keys = [load_pem_public_key(block) for block in PEM.findall(file.read())]
    keys = {key_id(key): key for key in keys}
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        lines = [(number, text) for number, text in enumerate(file, start=1) if text.strip()]
    if is_history(lines):
        faults = History(keys).check(lines)
    else:
        check = Check(keys)
        for number, text in lines:
            check.line(number, text)
        faults = check.finish(lines[-1][0] if lines else 1)
    for line, name in faults:
        print(line, name)
    if not faults:
        print("valid")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
