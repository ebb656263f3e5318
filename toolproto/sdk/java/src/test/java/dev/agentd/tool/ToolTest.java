package dev.agentd.tool;

import java.io.File;
import java.io.IOException;
import java.io.InputStream;
import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Runs {@link Fixture} as agentd would run a tool. No test library: {@code ./test.sh} compiles and runs it. */
final class ToolTest {
    private static final String CALL = "0".repeat(25) + "g";

    private interface Test {
        void run() throws Exception;
    }

    private record Ended(int status, String stdout, String stderr) {
        @SuppressWarnings("unchecked")
        Map<String, Object> reply() {
            Map<String, Object> reply = (Map<String, Object>) Json.parse(stdout);
            same(1L, reply.get("protocol"));
            same(CALL, reply.get("call_id"));
            same(status == 0, reply.get("ok"));
            return reply;
        }

        @SuppressWarnings("unchecked")
        Map<String, Object> result() {
            return (Map<String, Object>) reply().get("result");
        }

        @SuppressWarnings("unchecked")
        Map<String, Object> error() {
            return (Map<String, Object>) reply().get("error");
        }
    }

    public static void main(String[] none) {
        Map<String, Test> tests = new LinkedHashMap<>();
        tests.put("a result is written and large integers survive", () -> {
            Map<String, Object> arguments = new LinkedHashMap<>();
            arguments.put("do", "echo");
            arguments.put("n", new BigInteger("18446744073709551615"));
            arguments.put("m", Long.MIN_VALUE);
            arguments.put("text", "é\u2028😀\"\\\n\u0001");
            arguments.put("list", List.of(1.5, true, Map.of()));
            arguments.put("none", null);
            same(arguments, serve(arguments).result());
        });
        tests.put("prints go to the log", () -> {
            Ended ended = serve(Map.of("do", "print"));
            same(Map.of("printed", true), ended.result());
            same("stray\nstray\n", ended.stderr());
        });
        tests.put("errors are told", () -> {
            Map<String, Object> expected = Map.of(
                    "code", "NO_LUCK", "message", "not today", "retryable", true, "retry_after_ms", 5L,
                    "details", Map.of("dice", 1L));
            same(expected, serve(Map.of("do", "fail")).error());
            Ended raised = serve(Map.of("do", "raise"));
            same("INTERNAL", raised.error().get("code"));
            holds(raised.stderr().contains("IllegalStateException: boom"), raised.stderr());
            same("INTERNAL", serve(Map.of("do", "overflow")).error().get("code"));
            same("INTERNAL", serve(Map.of("do", "odd_details")).error().get("code"));
        });
        tests.put("results that are no JSON are errors", () -> {
            for (String way : List.of("nan", "odd", "cyclic")) {
                same("INTERNAL", serve(Map.of("do", way)).error().get("code"));
            }
        });
        tests.put("threads do not keep the process", () ->
                same(List.of("started"), serve(Map.of("do", "thread")).reply().get("result")));
        tests.put("large replies come whole", () ->
                same(300_000, ((String) serve(Map.of("do", "large", "characters", 300_000)).result().get("text")).length()));
        tests.put("the context is the request's", () -> {
            Map<String, Object> context = serve(Map.of("do", "context")).result();
            same("/somewhere/a/b", context.get("path"));
            same("key", context.get("key"));
            same("fixture", context.get("tool"));
            same(1048576L, context.get("cap"));
            same("2026-11-29T12:00:03Z", context.get("deadline"));
            long remaining = (Long) context.get("remaining");
            holds(remaining >= 0 && remaining <= 3000, "remaining " + remaining);
        });
        tests.put("artifacts are named", () ->
                same(List.of(Map.of("path", "out/a.csv", "media_type", "text/csv")),
                        serve(Map.of("do", "artifact")).reply().get("artifacts")));
        tests.put("progress reaches the descriptor", () -> {
            Path events = Files.createTempFile("agentd-tool-", ".events");
            try {
                // A shell opens the descriptor: ProcessBuilder can hand on only the first three.
                String request = request("call", 1, Map.of("do", "progress"));
                Ended ended = start(request, Map.of("AGENTD_EVENTS_FD", "7"),
                        List.of("/bin/sh", "-c", "exec 7>>\"$0\"; exec \"$@\"", events.toString()));
                same(Map.of(), ended.result());
                same("{\"progress\":0.5,\"message\":\"half\"}\n", Files.readString(events));
            } finally {
                Files.delete(events);
            }
            for (String number : List.of("199", "x")) {
                same(Map.of(), start(request("call", 1, Map.of("do", "progress")),
                        Map.of("AGENTD_EVENTS_FD", number), List.of()).result());
            }
        });
        tests.put("the other operations", () -> {
            Map<String, Object> about = start(request("describe", 1, Map.of()), Map.of(), List.of()).result();
            same("fixture", about.get("name"));
            same("1.2", about.get("version"));
            same(Map.of("healthy", true), start(request("health", 1, Map.of()), Map.of(), List.of()).result());
            same(Map.of("healthy", false, "message", "no disk"),
                    start(request("health", 1, Map.of()), Map.of("UNHEALTHY", "no disk"), List.of()).result());
            same("UNSUPPORTED", start(request("dance", 1, Map.of()), Map.of(), List.of()).error().get("code"));
            same("UNSUPPORTED", start(request("call", 2, Map.of()), Map.of(), List.of()).error().get("code"));
        });
        tests.put("what is no request is refused", () -> {
            for (String text : List.of("", "hello", "[]", "{}", "null", "{\"a\":", "[".repeat(100_000))) {
                Ended ended = start(text, Map.of(), List.of());
                same(2, ended.status());
                same("", ended.stdout());
                holds(ended.stderr().contains("no request"), ended.stderr());
            }
        });
        int failed = 0;
        for (Map.Entry<String, Test> test : tests.entrySet()) {
            try {
                test.getValue().run();
                System.out.println("ok   " + test.getKey());
            } catch (Exception | AssertionError error) {
                failed++;
                System.out.println("FAIL " + test.getKey());
                error.printStackTrace(System.out);
            }
        }
        System.exit(failed == 0 ? 0 : 1);
    }

    private static String request(String operation, int protocol, Map<String, Object> arguments) {
        Map<String, Object> request = new LinkedHashMap<>();
        request.put("protocol", protocol);
        request.put("operation", operation);
        request.put("call_id", CALL);
        request.put("tool", "fixture");
        request.put("arguments", arguments);
        request.put("workspace", "/somewhere");
        request.put("deadline", "2026-11-29T12:00:03.000Z");
        request.put("timeout_ms", 3000);
        request.put("max_response_bytes", 1 << 20);
        request.put("idempotency_key", "key");
        return Json.write(request);
    }

    private static Ended serve(Map<String, Object> arguments) throws Exception {
        return start(request("call", 1, arguments), Map.of(), List.of());
    }

    private static Ended start(String stdin, Map<String, String> environment, List<String> before) throws Exception {
        List<String> command = new ArrayList<>(before);
        command.addAll(List.of(
                Path.of(System.getProperty("java.home"), "bin", "java").toString(),
                "-cp", System.getProperty("java.class.path"), Fixture.class.getName()));
        File errors = File.createTempFile("agentd-tool-", ".stderr");
        try {
            ProcessBuilder builder = new ProcessBuilder(command).redirectError(errors);
            builder.environment().putAll(environment);
            Process process = builder.start();
            try (var to = process.getOutputStream()) {
                to.write(stdin.getBytes(StandardCharsets.UTF_8));
            } catch (IOException closed) {
                // It ended before it had read everything: its answer says why.
            }
            try (InputStream from = process.getInputStream()) {
                String stdout = new String(from.readAllBytes(), StandardCharsets.UTF_8);
                return new Ended(process.waitFor(), stdout, Files.readString(errors.toPath()));
            }
        } finally {
            Files.delete(errors.toPath());
        }
    }

    private static void same(Object expected, Object found) {
        holds(expected == null ? found == null : expected.equals(found), "expected " + expected + ", found " + found);
    }

    private static void holds(boolean condition, String otherwise) {
        if (!condition) {
            throw new AssertionError(otherwise);
        }
    }
}
