#!/usr/bin/env python3
"""Verifies receipts of agentd; written from docs/receipts.md alone, as a second opinion on `agentctl verify`.

usage: verify_receipts.py FILE PUBLIC_KEY.pem

Needs only the `cryptography` package. Prints one line per fault, `LINE FAULT`, and exits 1; prints `valid` and exits 0.
"""

import base64
import hashlib
import json
import sys

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
RECEIPT = "https://agentd.dev/receipt/v1"
SEAL = "https://agentd.dev/seal/v1"
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


class Check:
    def __init__(self, key):
        self.key = key
        raw = key.public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.key_id = "ed25519:" + hashlib.sha256(raw).hexdigest()[:32]
        self.faults = []
        self.job = None
        self.calls = set()
        self.receipts = []
        self.seal = None
        self.lines = 0

    def fault(self, line, name):
        if (line, name) not in self.faults:
            self.faults.append((line, name))

    def signed(self, data, signature):
        try:
            self.key.verify(base64.b64decode(signature, validate=True), data)
            return True
        except (InvalidSignature, ValueError):
            return False

    def line(self, number, text):
        self.lines += 1
        if self.seal is not None:
            self.fault(number, "after_seal")
        try:
            envelope = json.loads(text)
            payload = base64.b64decode(envelope["payload"], validate=True)
            signatures = envelope["signatures"]
            statement = json.loads(payload)
            if envelope["payloadType"] != PAYLOAD_TYPE or statement["_type"] != STATEMENT:
                raise ValueError
            kind, predicate = statement["predicateType"], statement["predicate"]
            if kind not in (RECEIPT, SEAL):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            self.fault(number, "unreadable")
            return
        if len(signatures) != 1:
            self.fault(number, "unsigned")
        elif signatures[0]["keyid"] != self.key_id:
            self.fault(number, "wrong_key")
        elif not self.signed(encoded(PAYLOAD_TYPE, payload), signatures[0]["sig"]):
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
        elif not self.signed(b"agentd evidence v1\n" + canonical(record), signature):
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
            and receipt["denied"] == record["denied"] + network.get("denied", [])
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


def main():
    path, key_path = sys.argv[1:]
    with open(key_path, "rb") as file:
        check = Check(load_pem_public_key(file.read()))
    last = 1
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        for number, text in enumerate(file, start=1):
            if text.strip():
                check.line(number, text)
                last = number
    faults = check.finish(last)
    for line, name in faults:
        print(line, name)
    if not faults:
        print("valid")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
