//! The zoo: tools that misbehave, each in its own way, and the code that a call of each must end with.
//!
//! Every animal is one program. Python programs see the request as `request` and its id as `ID`; `envelope(…)` makes the
//! text of a reply, `put` writes bytes to descriptor 1.

use toolproto::code::Code;

/// How a call of an animal must end.
#[derive(Clone, Copy, Debug)]
pub enum Ends {
    /// Well: the oddity is tolerated, or harmless.
    Well,
    /// With this code, and this in the message.
    With(Code, &'static str),
    /// With one of these codes: which one depends on what the host can enforce.
    WithOneOf(&'static [Code]),
}

/// One misbehaving tool.
#[derive(Clone, Copy, Debug)]
pub struct Animal {
    /// Its name, also the tool's.
    pub name: &'static str,
    /// The runtime: `python`, `node`, `bun` or `exec`.
    pub runtime: &'static str,
    /// The program.
    pub program: &'static str,
    /// How a call of it ends.
    pub ends: Ends,
    /// Its deadline, in milliseconds. Those that never end get a short one.
    pub deadline_ms: u64,
}

/// What stands before each Python program.
pub const PYTHON_PREAMBLE: &str = r#"
import json, os, signal, subprocess, sys, time
request = json.loads(sys.stdin.buffer.read())
ID = request["call_id"]
def put(text):
    data = text if isinstance(text, bytes) else text.encode()
    while data:
        data = data[os.write(1, data):]
def envelope(**members):
    return json.dumps({"protocol": 1, "call_id": ID, "ok": True, "result": {}, **members})
def failure(**error):
    return json.dumps({"protocol": 1, "call_id": ID, "ok": False, "error": error})
"#;

/// The time of animals that end by themselves.
const ENOUGH_MS: u64 = 30_000;
/// The time of animals that do not.
const SHORT_MS: u64 = 1_500;

const fn python(name: &'static str, program: &'static str, ends: Ends) -> Animal {
    Animal { name, runtime: "python", program, ends, deadline_ms: ENOUGH_MS }
}

const fn shell(name: &'static str, program: &'static str, ends: Ends) -> Animal {
    Animal { name, runtime: "exec", program, ends, deadline_ms: ENOUGH_MS }
}

/// A tool that does not end before its deadline.
const fn endless(mut animal: Animal) -> Animal {
    animal.deadline_ms = SHORT_MS;
    animal
}

const fn breaks(at: &'static str) -> Ends {
    Ends::With(Code::ToolProtocolError, at)
}

const TIMES_OUT: Ends = Ends::With(Code::ToolTimeout, "");
const CRASHES: Ends = Ends::With(Code::ToolCrashed, "");
const FLOODS: Ends = Ends::With(Code::ResponseTooLarge, "");

/// All of them.
pub const ANIMALS: &[Animal] = &[
    // What they write is no reply.
    shell("silent", "#!/bin/sh\nexit 0\n", breaks("wrote nothing")),
    shell("chatty", "#!/bin/sh\necho all done\n", breaks("at byte 0")),
    python("lister", "put('[1, 2]')", breaks("at byte 0")),
    python("twins", "put('{\"a\": 1}\\n{\"a\": 2}\\n')", breaks("at byte 9")),
    python("latin", "put(b'{\"name\": \"caf\\xe9\"}')", breaks("invalid UTF-8 at byte 13")),
    python("wide", "put(envelope().encode('utf-16'))", breaks("invalid UTF-8 at byte 0")),
    python("nul", "put('{\"a\": 1}\\0')", breaks("at byte 8")),
    python("not_a_number", "put(json.dumps({'a': float('nan')}))", breaks("NaN is no JSON number at byte 6")),
    python("infinite", "put(json.dumps({'a': float('-inf')}))", breaks("Infinity")),
    python("doubled", "put('{\"a\": 1, \"a\": 2}')", breaks("duplicate key \"a\" at byte 9")),
    python("deep", "put('{\"a\": ' + '[' * 64 + ']' * 64 + '}')", breaks("nesting deeper than 64")),
    python("abyss", "put('[' * 900_000)", breaks("nesting deeper than 64")),
    python("maze", "put('{\"a\":\\n' * 150_000)", breaks("nesting deeper than 64")),
    python("giant", "put('{\"n\": %d}' % 2**70)", breaks("beyond 64 bits")),
    python("half_pair", "put('{\"a\": \"\\\\ud800\"}')", breaks("surrogate")),
    python("half", "put(envelope()[:-5])", breaks("found the end")),
    python("trailer", "put(envelope()); put('bye')", breaks("after the JSON value")),
    python("single_quotes", "put(repr({'a': 1}))", breaks("at byte 1")),
    // Replies of the wrong shape.
    python("stranger", "put(envelope(call_id='0' * 26))", breaks("/call_id")),
    python("stranger_after_noise", "put('loading\\n' + envelope(call_id='0' * 26))", breaks("/call_id")),
    python("nameless", "put('{\"protocol\": 1, \"ok\": true, \"result\": {}}')", breaks("/call_id")),
    python("from_the_future", "put(envelope(protocol=2))", breaks("/protocol")),
    python("truthy", "put(envelope(ok='true'))", breaks("/ok")),
    python("undecided", "put(json.dumps({'protocol': 1, 'call_id': ID, 'result': {}}))", breaks("/ok")),
    python("liar", "put(envelope()); sys.exit(1)", breaks("exited with status 1")),
    python("humble", "put(failure(code='A', message='b'))", breaks("exited with status 0")),
    python("empty_handed", "put(json.dumps({'protocol': 1, 'call_id': ID, 'ok': True}))", breaks("/result")),
    python("both_ways", "put(envelope(error={'code': 'A', 'message': 'b'}))", breaks("/error")),
    python("codeless", "put(failure(message='b')); sys.exit(1)", breaks("/error/code")),
    python("wordy_code", "put(failure(code='it went wrong', message='b')); sys.exit(1)", breaks("/error/code")),
    python(
        "impatient",
        "put(failure(code='A', message='b', retry_after_ms=-1)); sys.exit(1)",
        breaks("/error/retry_after_ms"),
    ),
    python(
        "rooted",
        "put(envelope(artifacts=[{'path': '/etc/passwd', 'media_type': 'a/b'}]))",
        breaks("/artifacts/0/path"),
    ),
    python(
        "climber",
        "put(envelope(artifacts=[{'path': 'a/../../b', 'media_type': 'a/b'}]))",
        breaks("/artifacts/0/path"),
    ),
    python(
        "hoarder",
        "put(envelope(artifacts=[{'path': str(n), 'media_type': 'a/b'} for n in range(1000)]))",
        breaks("/artifacts"),
    ),
    python("wrong_type", "put(envelope(result='text'))", Ends::With(Code::ResponseInvalid, "")),
    // They write too much.
    shell("flood", "#!/bin/sh\nexec yes\n", FLOODS),
    python("ten_megabytes", "put(envelope(result={'data': 'A' * 10_000_000}))", FLOODS),
    python("stretched", "os.ftruncate(1, 1 << 40)", FLOODS),
    python("eraser", "put(envelope()); os.ftruncate(1, 0)", breaks("wrote nothing")),
    python(
        "babbler",
        "for n in range(100_000): os.write(2, b'x' * 80 + b'\\n') if n < 50_000 else None\nput(envelope())",
        Ends::Well,
    ),
    // They die.
    shell("status_two", "#!/bin/sh\necho '{}'\nexit 2\n", CRASHES),
    python("traceback", "raise RuntimeError('boom')", CRASHES),
    python("segfault", "os.kill(os.getpid(), signal.SIGSEGV)", CRASHES),
    python("suicide", "put(envelope()); os.kill(os.getpid(), signal.SIGKILL)", CRASHES),
    python("abort", "os.abort()", CRASHES),
    shell("no_interpreter", "#!/nowhere/at/all\n", Ends::WithOneOf(&[Code::ToolUnavailable, Code::LaunchFailed])),
    // They do not end.
    endless(shell("sleeper", "#!/bin/sh\nexec sleep 1000\n", TIMES_OUT)),
    endless(python("busy", "while True: pass", TIMES_OUT)),
    endless(python("deaf", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)", TIMES_OUT)),
    endless(python("stopped", "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(1000)", TIMES_OUT)),
    endless(python("lingerer", "put(envelope()); time.sleep(1000)", TIMES_OUT)),
    endless(python("closer", "os.close(0); os.close(1); os.close(2); time.sleep(1000)", TIMES_OUT)),
    endless(python(
        "last_word",
        "def late(*_):\n    put(envelope())\n    os._exit(0)\nsignal.signal(signal.SIGTERM, late)\ntime.sleep(1000)",
        TIMES_OUT,
    )),
    endless(python("parent", "[os.fork() or time.sleep(1000) for _ in range(3)]\ntime.sleep(1000)", TIMES_OUT)),
    endless(python(
        "forking_on_term",
        "signal.signal(signal.SIGTERM, lambda *_: os.fork())\nwhile True: time.sleep(0.01)",
        TIMES_OUT,
    )),
    // They leave something behind, or reach for others: harmless in a sandbox.
    python("holder", "os.fork() or time.sleep(1000)\nput(envelope())", Ends::Well),
    python(
        "daemon",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n        time.sleep(1000)\n    os._exit(0)\nput(envelope())",
        Ends::Well,
    ),
    python("killer", "try:\n    os.kill(-1, signal.SIGKILL)\nexcept OSError:\n    pass\nput(envelope())", Ends::Well),
    python("regicide", "try:\n    os.kill(1, signal.SIGKILL)\nexcept OSError:\n    pass\nput(envelope())", Ends::Well),
    python("zombies", "for _ in range(20):\n    os.fork() or os._exit(0)\nput(envelope())", Ends::Well),
    python(
        "descriptors",
        "import resource\ntry:\n    while True: os.open('/dev/null', os.O_RDONLY)\nexcept OSError:\n    put(envelope())",
        Ends::Well,
    ),
    python(
        "bomb",
        "try:\n    while True:\n        if os.fork() == 0:\n            time.sleep(1000)\nexcept OSError:\n    put(failure(code='NO_MORE', message='fork failed'))\n    sys.stdout.flush()\n    os._exit(1)",
        Ends::WithOneOf(&[Code::ProcessLimit, Code::ToolFailed]),
    ),
    // Its own errors.
    python(
        "honest",
        "put(failure(code='NO_LUCK', message='not today')); sys.exit(1)",
        Ends::With(Code::ToolFailed, "not today"),
    ),
    shell("plain_error", "#!/bin/sh\necho no such column\nexit 1\n", Ends::With(Code::ToolFailed, "no such column")),
    // Oddities that are tolerated.
    shell("deaf_to_input", "#!/bin/sh\nexec <&-\necho '{}'\n", Ends::Well),
    python(
        "windows",
        "put(b'\\xef\\xbb\\xbf' + envelope().replace(', ', ',\\r\\n').encode() + b'\\r\\n\\r\\n')",
        Ends::Well,
    ),
    python("noisy", "print('loading model'); print('warning: {'); sys.stdout.flush(); put(envelope())", Ends::Well),
    python("pretty", "put(json.dumps(json.loads(envelope()), indent=4))", Ends::Well),
    python("exact", "put(envelope(result={'n': 2**64 - 1, 'm': -(2**63)}))", Ends::Well),
    Animal {
        name: "hasty_node",
        runtime: "node",
        program: "process.stdin.resume(); process.stdout.write(JSON.stringify({text: 'x'.repeat(300000)})); process.exit(0);",
        ends: Ends::Well,
        deadline_ms: ENOUGH_MS,
    },
    Animal {
        name: "hasty_bun",
        runtime: "bun",
        program: "process.stdout.write(JSON.stringify({text: 'x'.repeat(300000)})); process.exit(0);",
        ends: Ends::Well,
        deadline_ms: ENOUGH_MS,
    },
];
