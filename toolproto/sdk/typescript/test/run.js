// Runs the fixture, with the runtime that runs this file, as agentd would run a tool: `node test/run.js`, `bun test/run.js`.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";

const FIXTURE = fileURLToPath(new URL("fixture.js", import.meta.url));
const CALL = `${"0".repeat(25)}g`;

function start(input, { env = {}, stdio = [] } = {}) {
  return spawnSync(process.execPath, [FIXTURE], {
    input,
    env: { ...process.env, ...env },
    stdio: ["pipe", "pipe", "pipe", ...stdio],
    timeout: 60_000,
    maxBuffer: 1 << 24,
    encoding: "utf8",
  });
}

function serve(args, { operation = "call", protocol = 1, workspace, ...how } = {}) {
  const request = {
    protocol,
    operation,
    call_id: CALL,
    tool: "fixture",
    arguments: args,
    workspace,
    deadline: "2026-11-29T12:00:03.000Z",
    timeout_ms: 3000,
    max_response_bytes: 1 << 20,
    idempotency_key: "key",
  };
  const done = start(typeof args === "string" ? args : JSON.stringify(request), how);
  assert.equal(done.error, undefined);
  const reply = JSON.parse(done.stdout);
  assert.equal(reply.protocol, 1);
  assert.equal(reply.call_id, CALL);
  assert.equal(reply.ok, done.status === 0, done.stdout);
  return { ...reply, stderr: done.stderr, stdout: done.stdout };
}

const tests = {
  "a result is written"() {
    const args = { do: "echo", text: "é\u2028😀", n: 1.5 };
    assert.deepEqual(serve(args).result, args);
    assert.equal(serve({ do: "nothing" }).result, null);
  },
  "large integers arrive as strings and leave as numbers"() {
    const plain = { do: "echo", n: 1, s: '1234567890123456789 "\\', f: 0.12345678901234567, e: 1e300 };
    const text = JSON.stringify({ protocol: 1, operation: "call", call_id: CALL, tool: "t", arguments: plain }).replace(
      '"n":1',
      '"n":18446744073709551615,"m":-9007199254740993,"k":9007199254740991',
    );
    assert.deepEqual(serve(text).result, {
      ...plain,
      n: "18446744073709551615",
      m: "-9007199254740993",
      k: 9007199254740991,
    });
    assert.ok(serve({ do: "bigint" }).stdout.includes('{"value":18446744073709551615,"text":"1","list":[-9007199254740993]}'));
  },
  "prints go to the log"() {
    const done = serve({ do: "print" });
    assert.deepEqual(done.result, { printed: true });
    assert.equal(done.stderr.split("stray").length - 1, 3);
  },
  "errors are told"() {
    const expected = { code: "NO_LUCK", message: "not today", retryable: true, retry_after_ms: 5, details: { dice: 1 } };
    assert.deepEqual(serve({ do: "fail" }).error, expected);
    for (const way of ["raise", "reject", "stranded"]) {
      const done = serve({ do: way });
      assert.equal(done.error.code, "INTERNAL", way);
      assert.match(done.error.message, /boom/);
      assert.match(done.stderr, /RangeError/);
    }
    assert.match(serve({ do: "never" }).error.message, /never finished/);
  },
  "results that are no JSON are errors"() {
    assert.match(serve({ do: "nan" }).error.message, /NaN/);
    assert.equal(serve({ do: "cyclic" }).error.code, "INTERNAL");
  },
  "timers do not keep the process"() {
    assert.deepEqual(serve({ do: "timer" }).result, { started: true });
  },
  "large replies come whole"() {
    assert.equal(serve({ do: "large", characters: 300_000 }).result.text.length, 300_000);
  },
  "the context is the request's"() {
    const folder = fs.realpathSync(fs.mkdtempSync(path.join(os.tmpdir(), "agentd-tool-")));
    try {
      const result = serve({ do: "context" }, { workspace: folder }).result;
      assert.equal(result.cwd, folder);
      assert.equal(result.workspace, folder);
      assert.ok(result.remaining > 0 && result.remaining <= 3000);
      assert.deepEqual([result.cap, result.key, result.tool], [1 << 20, "key", "fixture"]);
      assert.equal(result.deadline, "2026-11-29T12:00:03.000Z");
    } finally {
      fs.rmdirSync(folder);
    }
  },
  "artifacts are named"() {
    assert.deepEqual(serve({ do: "artifact" }).artifacts, [{ path: "out/a.csv", media_type: "text/csv" }]);
  },
  "progress reaches the descriptor"() {
    const file = path.join(fs.mkdtempSync(path.join(os.tmpdir(), "agentd-tool-")), "events");
    const events = fs.openSync(file, "a");
    try {
      serve({ do: "progress" }, { env: { AGENTD_EVENTS_FD: "3" }, stdio: [events] });
      assert.equal(fs.readFileSync(file, "utf8"), '{"progress":0.5,"message":"half"}\n');
    } finally {
      fs.closeSync(events);
      fs.rmSync(path.dirname(file), { recursive: true });
    }
    for (const number of ["199", "x", "1"]) serve({ do: "progress" }, { env: { AGENTD_EVENTS_FD: number } });
  },
  "the other operations"() {
    const about = serve({}, { operation: "describe" }).result;
    assert.deepEqual([about.name, about.version], ["fixture", "1.2"]);
    assert.deepEqual(serve({}, { operation: "health" }).result, { healthy: true });
    const sick = serve({}, { operation: "health", env: { UNHEALTHY: "no disk" } }).result;
    assert.deepEqual(sick, { healthy: false, message: "no disk" });
    assert.equal(serve({}, { operation: "dance" }).error.code, "UNSUPPORTED");
    assert.equal(serve({}, { protocol: 2 }).error.code, "UNSUPPORTED");
  },
  "what is no request is refused"() {
    for (const text of ["", "hello", "[]", "{}", "null"]) {
      const done = start(text);
      assert.deepEqual([done.status, done.stdout], [2, ""], text);
      assert.match(done.stderr, /no request/);
    }
  },
};

let failed = 0;
for (const [name, test] of Object.entries(tests)) {
  try {
    test();
    console.log(`ok   ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL ${name}\n${error.stack}`);
  }
}
process.exit(failed === 0 ? 0 : 1);
