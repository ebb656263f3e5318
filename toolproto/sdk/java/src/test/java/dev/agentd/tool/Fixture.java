package dev.agentd.tool;

import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** A tool whose argument {@code do} says what it shall do; the tests run it as a process. */
final class Fixture {
    public static void main(String[] none) {
        new Tool(Fixture::handle).describe("version", "1.2").health(() -> System.getenv("UNHEALTHY")).run();
    }

    private static Object handle(Map<String, Object> arguments, Context context) throws Exception {
        switch (String.valueOf(arguments.get("do"))) {
            case "echo":
                return arguments;
            case "print":
                System.out.println("stray");
                System.out.write("stray\n".getBytes());
                Runtime.getRuntime().addShutdownHook(new Thread(() -> System.out.println("late")));
                return Map.of("printed", true);
            case "fail":
                throw new ToolError("NO_LUCK", "not today").retryAfter(5).details(Map.of("dice", 1));
            case "raise":
                throw new IllegalStateException("boom");
            case "overflow":
                return overflow(1) + 1;
            case "nan":
                return Map.of("value", Double.NaN);
            case "odd":
                return Map.of("value", new Object());
            case "cyclic":
                Map<String, Object> cyclic = new HashMap<>();
                cyclic.put("self", cyclic);
                return cyclic;
            case "odd_details":
                throw new ToolError("ODD", "odd").details(new Object());
            case "thread":
                new Thread(() -> {
                    try {
                        Thread.sleep(600_000);
                    } catch (InterruptedException woken) {
                        Thread.currentThread().interrupt();
                    }
                }).start();
                return List.of("started");
            case "artifact":
                context.artifact("out/a.csv", "text/csv");
                return Map.of();
            case "progress":
                context.progress(0.5, "half");
                context.progress(0.6, "x".repeat(10_000));
                return Map.of();
            case "context":
                return Map.of(
                        "path", context.path("a/b").toString(),
                        "remaining", context.remaining().toMillis(),
                        "cap", context.maxResponseBytes(),
                        "key", context.idempotencyKey(),
                        "tool", context.tool(),
                        "deadline", context.deadline().toString());
            case "large":
                return Map.of("text", "é".repeat(((Long) arguments.get("characters")).intValue()));
            default:
                throw new ToolError("UNKNOWN_DO", arguments.get("do") + " is nothing to do");
        }
    }

    private static int overflow(int depth) {
        return overflow(depth + 1) + 1;
    }
}
