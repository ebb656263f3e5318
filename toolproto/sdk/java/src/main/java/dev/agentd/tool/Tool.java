package dev.agentd.tool;

import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.function.Supplier;

/**
 * A tool for agentd: one function in, one JSON object out.
 *
 * <p>The library keeps the result channel free of stray prints, reads the request, calls the function, writes the reply and
 * halts the JVM at once. It checks nothing that agentd checks anyway. It speaks tool protocol 1 and has no dependencies.
 */
public final class Tool {
    /** The work: arguments in, result out. Both are JSON values as {@link Json} has them. */
    @FunctionalInterface
    public interface Handler {
        /** @throws Exception any: a {@link ToolError} is told as it is, others with the code INTERNAL */
        Object call(Map<String, Object> arguments, Context context) throws Exception;
    }

    private static final String VERSION = "0.1.0";
    private static final long PROTOCOL = 1;

    private final Handler handler;
    private final Map<String, Object> description = new LinkedHashMap<>();
    private Supplier<String> health;

    /** A tool with this handler. */
    public Tool(Handler handler) {
        this.handler = handler;
    }

    /** Adds a member ({@code version}, {@code description}, {@code input}, {@code output}) to the answer to {@code describe}. */
    public Tool describe(String member, Object value) {
        description.put(member, value);
        return this;
    }

    /** Answers {@code health}: null when a call could work, else why not. */
    public Tool health(Supplier<String> check) {
        health = check;
        return this;
    }

    /** Serves one request with this handler and ends the JVM. */
    public static void run(Handler handler) {
        new Tool(handler).run();
    }

    /** Serves one request and ends the JVM. */
    public void run() {
        FileOutputStream channel = new FileOutputStream(FileDescriptor.out);
        System.setOut(System.err);
        FileOutputStream events = events();
        prepare();
        Map<String, Object> request = readRequest();
        Map<String, Object> reply = reply(request, true);
        int status = 0;
        String written;
        try {
            answer(request, reply, events);
            written = Json.write(reply);
        } catch (Throwable error) { // Errors such as running out of heap are answers too.
            status = 1;
            reply = reply(request, false);
            reply.put("error", told(error).toJson());
            written = writeFailure(request, reply);
        }
        try {
            channel.write(written.getBytes(StandardCharsets.UTF_8));
        } catch (IOException refused) {
            System.err.println("the reply could not be written: " + refused);
            status = 1;
        }
        end(status);
    }

    /** Loads the classes that every request needs, before there is one: who was started ahead has the time now. */
    private static void prepare() {
        Json.write(Json.parse("{\"a\":[1,0.5,true,null,\"\\n\"]}"));
        new Context(Map.of(), null);
    }

    @SuppressWarnings("unchecked")
    private static Map<String, Object> readRequest() {
        try {
            byte[] stdin = System.in.readAllBytes(); // FileInputStream alone seeks, which a pipe refuses.
            Map<String, Object> request = (Map<String, Object>) Json.parse(new String(stdin, StandardCharsets.UTF_8));
            if (request.get("call_id") instanceof String) {
                return request;
            }
            System.err.println("stdin holds no request of agentd's tool protocol: call_id is missing");
        } catch (IOException | RuntimeException error) {
            System.err.println("stdin holds no request of agentd's tool protocol: " + error);
        }
        end(2);
        throw new IllegalStateException("the JVM has been halted");
    }

    private static Map<String, Object> reply(Map<String, Object> request, boolean ok) {
        Map<String, Object> reply = new LinkedHashMap<>();
        reply.put("protocol", PROTOCOL);
        reply.put("call_id", request.get("call_id"));
        reply.put("ok", ok);
        return reply;
    }

    @SuppressWarnings("unchecked")
    private void answer(Map<String, Object> request, Map<String, Object> reply, FileOutputStream events)
            throws Exception {
        if (!Long.valueOf(PROTOCOL).equals(request.get("protocol"))) {
            throw new ToolError(
                    "UNSUPPORTED", "this tool speaks protocol " + PROTOCOL + ", not " + request.get("protocol"));
        }
        String operation = String.valueOf(request.get("operation"));
        if (operation.equals("call")) {
            Context context = new Context(request, events);
            reply.put("result", handler.call((Map<String, Object>) request.get("arguments"), context));
            if (!context.artifacts.isEmpty()) {
                reply.put("artifacts", context.artifacts);
            }
        } else if (operation.equals("describe")) {
            Map<String, Object> about = new LinkedHashMap<>();
            about.put("name", request.get("tool"));
            about.put("sdk", "agentd-java/" + VERSION);
            about.putAll(description);
            reply.put("result", about);
        } else if (operation.equals("health") && health != null) {
            Map<String, Object> state = new LinkedHashMap<>();
            String problem = health.get();
            state.put("healthy", problem == null);
            if (problem != null) {
                state.put("message", problem);
            }
            reply.put("result", state);
        } else {
            throw new ToolError("UNSUPPORTED", "this tool does not know the operation " + operation);
        }
    }

    private static ToolError told(Throwable error) {
        if (error instanceof ToolError) {
            return (ToolError) error;
        }
        error.printStackTrace();
        return new ToolError("INTERNAL", error.toString());
    }

    private static String writeFailure(Map<String, Object> request, Map<String, Object> failure) {
        try {
            return Json.write(failure);
        } catch (IllegalArgumentException error) {
            Map<String, Object> reply = reply(request, false);
            reply.put("error", new ToolError("INTERNAL", "the tool's error is no JSON: " + error.getMessage()).toJson());
            return Json.write(reply);
        }
    }

    /** Java opens no descriptor by number; its name below /proc does, where that is allowed. */
    private static FileOutputStream events() {
        String number = System.getenv("AGENTD_EVENTS_FD");
        try {
            // Not joined by `+`, which sets up machinery of the JVM's that takes longer than all else here.
            return number == null ? null : new FileOutputStream("/proc/self/fd/".concat(number), true);
        } catch (IOException refused) {
            return null;
        }
    }

    /** Ends at once: threads and shutdown hooks have no say after the reply. */
    private static void end(int status) {
        System.err.flush();
        Runtime.getRuntime().halt(status);
    }
}
