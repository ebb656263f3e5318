// A tool whose argument `do` says what it shall do; the tests run it as a process.
import { run, ToolError } from "../index.js";

const actions = {
  echo: (args) => args,
  print: () => {
    console.log("stray");
    console.info("stray");
    process.stdout.write("stray\n");
    process.on("exit", () => console.log("late"));
    return { printed: true };
  },
  fail: () => {
    throw new ToolError("NO_LUCK", "not today", { retryable: true, retryAfterMs: 5, details: { dice: 1 } });
  },
  raise: () => {
    throw new RangeError("boom");
  },
  reject: async () => {
    throw new RangeError("boom");
  },
  stranded: () => {
    Promise.reject(new RangeError("boom"));
    return new Promise((done) => setTimeout(done, 60_000));
  },
  never: () => new Promise(() => {}),
  timer: () => {
    setInterval(() => {}, 1000);
    return { started: true };
  },
  nan: () => ({ value: Number.NaN }),
  bigint: () => ({ value: 2n ** 64n - 1n, text: "1", list: [-9007199254740993n] }),
  cyclic: () => {
    const value = {};
    value.self = value;
    return value;
  },
  nothing: () => {},
  artifact: (_, context) => {
    context.artifact("out/a.csv", "text/csv");
    return {};
  },
  progress: (_, context) => {
    context.progress(0.5, "half");
    context.progress(undefined, "x".repeat(10_000));
    context.progress();
    return {};
  },
  context: (_, context) => ({
    cwd: process.cwd(),
    workspace: context.workspace,
    remaining: context.remainingMs(),
    cap: context.maxResponseBytes,
    key: context.idempotencyKey,
    tool: context.tool,
    deadline: context.deadline.toISOString(),
  }),
  large: (args) => ({ text: "é".repeat(args.characters) }),
};

run(
  (args, context) => {
    const action = actions[args.do];
    if (action === undefined) throw new ToolError("UNKNOWN_DO", `${args.do} is nothing to do`);
    return action(args, context);
  },
  { describe: { version: "1.2" }, health: () => process.env.UNHEALTHY },
);
