// Tools for agentd in TypeScript and JavaScript, for Bun and Node: one function in, one JSON object out.
//
// The library keeps the result channel free of stray prints, reads the request synchronously (a streamed read costs Bun
// 15 ms), calls the function, writes the reply and ends the process at once. It checks nothing that agentd checks anyway.
// It speaks tool protocol 1 and has no dependencies. Types stand in index.d.ts.

import fs from "node:fs";
import process from "node:process";

const VERSION = "0.1.0";
const PROTOCOL = 1;
const MAX_EVENT = 4096;
const STDIN = 0;
const STDOUT = 1;
const STDERR = 2;

export class ToolError extends Error {
  constructor(code, message, options = {}) {
    super(message);
    this.name = "ToolError";
    this.code = code;
    this.retryable = options.retryable ?? false;
    this.retryAfterMs = options.retryAfterMs;
    this.details = options.details;
  }
}

export class Context {
  #ends;
  #events;
  #artifacts = [];

  constructor(request, events) {
    this.callId = request.call_id;
    this.tool = request.tool ?? "";
    this.workspace = request.workspace;
    this.deadline = new Date(request.deadline ?? Date.now() + 60_000);
    this.maxResponseBytes = request.max_response_bytes ?? 1 << 20;
    this.idempotencyKey = request.idempotency_key ?? "";
    this.traceparent = request.traceparent;
    this.#ends = performance.now() + (request.timeout_ms ?? 60_000);
    this.#events = events;
  }

  remainingMs() {
    return Math.max(0, this.#ends - performance.now());
  }

  artifact(path, mediaType) {
    this.#artifacts.push({ path, media_type: mediaType });
  }

  get artifacts() {
    return this.#artifacts;
  }

  progress(share, message) {
    if (this.#events === undefined) return;
    const line = Buffer.from(`${JSON.stringify({ progress: share, message })}\n`);
    if ((share === undefined && message === undefined) || line.length > MAX_EVENT) return;
    try {
      fs.writeSync(this.#events, line);
    } catch {
      // Nobody listens, or slowly: progress is a courtesy.
    }
  }
}

export async function run(handler, options = {}) {
  guardStdout();
  await prepare();
  let request;
  try {
    request = parse(readAll(STDIN).toString("utf8"));
    if (typeof request.call_id !== "string") throw new TypeError("call_id is missing");
  } catch (error) {
    log(`stdin holds no request of agentd's tool protocol: ${error}\n`);
    end(2);
  }
  const failed = (error) => answer(request.call_id, { ok: false, error: told(error) });
  process.on("uncaughtException", failed);
  process.on("unhandledRejection", failed);
  process.on("beforeExit", () => failed(new Error("the handler never finished")));
  try {
    answer(request.call_id, { ok: true, ...(await serve(request, handler, options)) });
  } catch (error) {
    failed(error);
  }
}

// Does what every request needs once before there is one, so that it is compiled by then: whoever was started ahead has the
// time now, and nobody else loses any.
async function prepare() {
  const text = Buffer.concat([Buffer.from(`{"protocol":${PROTOCOL},"operation":"describe"}`)]).toString("utf8");
  const request = parse(text);
  const answer = Buffer.from(stringify(await serve(request, () => null, {}), ""));
  new Context(request, eventsDescriptor()).remainingMs();
  try {
    fs.writeSync(STDERR, answer, 0, 0); // Nothing of it.
  } catch {
    // Without a log there is nobody to tell.
  }
}

async function serve(request, handler, options) {
  if (request.protocol !== PROTOCOL) {
    throw new ToolError("UNSUPPORTED", `this tool speaks protocol ${PROTOCOL}, not ${request.protocol}`);
  }
  // A process started ahead of its call stands elsewhere.
  if (request.workspace !== undefined) process.chdir(request.workspace);
  if (request.operation === "call") {
    const context = new Context(request, eventsDescriptor());
    const result = (await handler(request.arguments, context)) ?? null;
    return context.artifacts.length > 0 ? { result, artifacts: context.artifacts } : { result };
  }
  if (request.operation === "describe") {
    return { result: { name: request.tool, sdk: `agentd-typescript/${VERSION}`, ...options.describe } };
  }
  if (request.operation === "health" && options.health !== undefined) {
    const problem = await options.health();
    return { result: problem == null ? { healthy: true } : { healthy: false, message: problem } };
  }
  throw new ToolError("UNSUPPORTED", `this tool does not know the operation ${JSON.stringify(request.operation)}`);
}

function told(error) {
  if (error instanceof ToolError) {
    return {
      code: error.code,
      message: error.message,
      retryable: error.retryable,
      retry_after_ms: error.retryAfterMs,
      details: error.details,
    };
  }
  log(`${error?.stack ?? error}\n`);
  return { code: "INTERNAL", message: String(error) };
}

function answer(callId, body) {
  let text;
  let status = body.ok ? 0 : 1;
  try {
    text = stringify({ protocol: PROTOCOL, call_id: callId, ...body }, callId);
  } catch (error) {
    log(`${error?.stack ?? error}\n`);
    status = 1;
    const message = `the tool's answer is no JSON: ${error?.message ?? error}`;
    text = JSON.stringify({ protocol: PROTOCOL, call_id: callId, ok: false, error: { code: "INTERNAL", message } });
  }
  try {
    writeAll(STDOUT, Buffer.from(text));
  } catch (error) {
    log(`the reply could not be written: ${error}\n`);
    status = 1;
  }
  end(status);
}

// JSON.parse rounds integers beyond 2^53: they are offered as strings instead.
function parse(text) {
  if (!/\d{16}/.test(text)) return JSON.parse(text);
  const token = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;
  const isUnsafe = (word) => /^-?\d+$/.test(word) && !Number.isSafeInteger(Number(word));
  return JSON.parse(text.replace(token, (word) => (isUnsafe(word) ? `"${word}"` : word)));
}

// JSON.stringify refuses BigInt and writes null for NaN: here the one is a number and the other an error.
function stringify(value, callId) {
  let hasBigInt = false;
  const text = JSON.stringify(value, (key, member) => {
    if (typeof member === "bigint") {
      hasBigInt = true;
      return `${callId}:${member}`;
    }
    if (typeof member === "number" && !Number.isFinite(member)) {
      throw new TypeError(`${key || "a number"} is ${member}`);
    }
    return member;
  });
  return hasBigInt ? text.replace(new RegExp(`"${callId}:(-?\\d+)"`, "g"), "$1") : text;
}

// Prints go to stderr, whichever way they are made in JavaScript. (Bun's console does not pass process.stdout.)
function guardStdout() {
  // Whoever asks for the stream is given stderr, made only then: making a stream takes Bun as long as all its start.
  const standIn = new Proxy(
    {},
    {
      get(_, name) {
        const stream = guardedStderr();
        const member = stream[name];
        return typeof member === "function" ? member.bind(stream) : member;
      },
      set: (_, name, value) => Reflect.set(guardedStderr(), name, value),
      has: (_, name) => name in guardedStderr(),
      getPrototypeOf: () => Object.getPrototypeOf(guardedStderr()),
    },
  );
  try {
    process.stdout = standIn;
  } catch {
    // Node's is not to be assigned, and Bun makes the stream first when the property is defined anew.
    Object.defineProperty(process, "stdout", { configurable: true, enumerable: true, value: standIn });
  }
  for (const name of ["log", "info", "debug", "dir", "dirxml", "table", "group", "groupCollapsed", "count", "timeEnd", "timeLog"]) {
    console[name] = console.error.bind(console);
  }
}

function guardedStderr() {
  const stream = process.stderr;
  stream.write = (chunk, encoding, done) => {
    log(typeof chunk === "string" ? chunk : Buffer.from(chunk));
    const callback = typeof encoding === "function" ? encoding : done;
    if (typeof callback === "function") queueMicrotask(callback);
    return true;
  };
  return stream;
}

function eventsDescriptor() {
  const number = Number(process.env.AGENTD_EVENTS_FD || Number.NaN);
  return Number.isInteger(number) && number > STDERR ? number : undefined;
}

function log(text) {
  try {
    writeAll(STDERR, Buffer.from(text));
  } catch {
    // Without a log there is nobody to tell.
  }
}

function readAll(descriptor) {
  const chunks = [];
  for (;;) {
    const chunk = Buffer.allocUnsafe(1 << 16);
    const length = retrying(() => fs.readSync(descriptor, chunk, 0, chunk.length, null));
    if (length === 0) return Buffer.concat(chunks);
    chunks.push(chunk.subarray(0, length));
  }
}

function writeAll(descriptor, data) {
  for (let at = 0; at < data.length; ) {
    at += retrying(() => fs.writeSync(descriptor, data, at));
  }
}

// A descriptor that some parent made non-blocking answers EAGAIN: wait a little.
function retrying(action) {
  for (;;) {
    try {
      return action();
    } catch (error) {
      if (error.code === "EOF") return 0;
      if (error.code !== "EAGAIN") throw error;
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 2);
    }
  }
}

// process.exit would run handlers that may print after the reply.
function end(status) {
  if (typeof process.reallyExit === "function") process.reallyExit(status);
  process.exit(status);
}
