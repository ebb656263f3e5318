"""Runs the fixture as agentd would run a tool. `python3 -m unittest discover -s tests`"""

import json
import os
import subprocess
import sys
import tempfile
import unittest

FIXTURE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixture.py")
CALL = "0" * 25 + "g"


def serve(operation="call", environment=None, workspace=None, pass_fds=(), protocol=1, **arguments):
    request = {
        "protocol": protocol,
        "operation": operation,
        "call_id": CALL,
        "tool": "fixture",
        "arguments": arguments,
        "deadline": "2026-11-29T12:00:03.000Z",
        "timeout_ms": 3000,
        "max_response_bytes": 1 << 20,
        "idempotency_key": "key",
    }
    if workspace is not None:
        request["workspace"] = workspace
    done = subprocess.run(
        [sys.executable, FIXTURE],
        input=json.dumps(request).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        pass_fds=pass_fds,
        timeout=60,
        check=False,
    )
    return done


def reply(done):
    answer = json.loads(done.stdout)
    assert answer["protocol"] == 1 and answer["call_id"] == CALL
    assert answer["ok"] == (done.returncode == 0), (answer, done.returncode)
    return answer


class Protocol(unittest.TestCase):
    def test_a_result_is_written_and_large_integers_survive(self):
        answer = reply(serve(do="echo", n=2**64 - 1, text="é\u2028😀"))
        self.assertEqual(answer["result"], {"do": "echo", "n": 2**64 - 1, "text": "é\u2028😀"})

    def test_prints_of_all_kinds_go_to_the_log(self):
        done = serve(do="print")
        self.assertEqual(reply(done)["result"], {"printed": True})
        self.assertEqual(done.stderr.count(b"stray"), 4)

    def test_errors_are_told(self):
        error = reply(serve(do="fail"))["error"]
        self.assertEqual(
            error,
            {"code": "NO_LUCK", "message": "not today", "retryable": True, "retry_after_ms": 5, "details": {"dice": 1}},
        )
        done = serve(do="raise")
        self.assertEqual(reply(done)["error"]["code"], "INTERNAL")
        self.assertIn("boom", reply(done)["error"]["message"])
        self.assertIn(b"Traceback", done.stderr)
        self.assertIn("SystemExit", reply(serve(do="exit"))["error"]["message"])

    def test_results_that_are_no_json_are_errors(self):
        self.assertEqual(reply(serve(do="nan"))["error"]["code"], "INTERNAL")
        self.assertEqual(reply(serve(do="unserialisable"))["error"]["code"], "INTERNAL")

    def test_threads_do_not_keep_the_process(self):
        self.assertTrue(reply(serve(do="thread"))["ok"])

    def test_large_replies_come_whole(self):
        self.assertEqual(len(reply(serve(do="large", characters=300_000))["result"]["text"]), 300_000)

    def test_the_context_is_the_requests(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = os.path.realpath(folder)
            result = reply(serve(do="context", workspace=folder))["result"]
        self.assertEqual((result["cwd"], result["workspace"]), (folder, folder))
        self.assertTrue(0 < result["remaining_ms"] <= 3000)
        self.assertEqual((result["idempotency_key"], result["tool"]), ("key", "fixture"))
        self.assertEqual(result["max_response_bytes"], 1 << 20)

    def test_artifacts_are_named(self):
        self.assertEqual(
            reply(serve(do="artifact"))["artifacts"], [{"path": "out/a.csv", "media_type": "text/csv"}]
        )

    def test_progress_reaches_the_descriptor_and_never_waits(self):
        reading, writing = os.pipe()
        try:
            done = serve(
                do="progress", times=50_000, environment={"AGENTD_EVENTS_FD": str(writing)}, pass_fds=(writing,)
            )
            self.assertTrue(reply(done)["ok"])
            lines = os.read(reading, 1 << 20).splitlines()
        finally:
            os.close(reading)
            os.close(writing)
        self.assertEqual(json.loads(lines[0]), {"progress": 0.5, "message": "half"})
        self.assertTrue(all(len(line) < 4096 for line in lines))
        self.assertTrue(reply(serve(do="progress", environment={"AGENTD_EVENTS_FD": "199"}))["ok"])
        self.assertTrue(reply(serve(do="progress", environment={"AGENTD_EVENTS_FD": "x"}))["ok"])

    def test_the_other_operations(self):
        about = reply(serve(operation="describe"))["result"]
        self.assertEqual((about["name"], about["version"]), ("fixture", "1.2"))
        self.assertEqual(reply(serve(operation="health"))["result"], {"healthy": True})
        sick = reply(serve(operation="health", environment={"UNHEALTHY": "no disk"}))["result"]
        self.assertEqual(sick, {"healthy": False, "message": "no disk"})
        self.assertEqual(reply(serve(operation="dance"))["error"]["code"], "UNSUPPORTED")
        self.assertEqual(reply(serve(protocol=2))["error"]["code"], "UNSUPPORTED")

    def test_what_is_no_request_is_refused(self):
        for text in (b"", b"hello", b"[]", b"{}"):
            done = subprocess.run([sys.executable, FIXTURE], input=text, capture_output=True, timeout=60, check=False)
            self.assertEqual((done.returncode, done.stdout), (2, b""))
            self.assertIn(b"no request", done.stderr)


if __name__ == "__main__":
    unittest.main()
