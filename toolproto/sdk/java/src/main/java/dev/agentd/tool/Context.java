package dev.agentd.tool;

import java.io.FileOutputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** What a handler knows about its call, and what it can do besides returning a result. */
public final class Context {
    private static final int MAX_EVENT = 4096;

    private final Map<String, Object> request;
    private final long ends;
    private final FileOutputStream events;
    final List<Map<String, Object>> artifacts = new ArrayList<>();

    Context(Map<String, Object> request, FileOutputStream events) {
        this.request = request;
        this.events = events;
        Object timeout = request.getOrDefault("timeout_ms", 60_000L);
        ends = System.nanoTime() + ((Number) timeout).longValue() * 1_000_000;
    }

    /** The call's id. */
    public String callId() {
        return (String) request.get("call_id");
    }

    /** The tool's name in its manifest. */
    public String tool() {
        return (String) request.get("tool");
    }

    /** The same for every repetition of the same call. */
    public String idempotencyKey() {
        return (String) request.get("idempotency_key");
    }

    /** W3C trace context, or null. */
    public String traceparent() {
        return (String) request.get("traceparent");
    }

    /** The most bytes that a reply may have. */
    public long maxResponseBytes() {
        return ((Number) request.getOrDefault("max_response_bytes", 1L << 20)).longValue();
    }

    /** The workspace, or null when the call has none. A JVM cannot change its directory: use {@link #path}. */
    public Path workspace() {
        String workspace = (String) request.get("workspace");
        return workspace == null ? null : Path.of(workspace);
    }

    /** A path of the workspace. */
    public Path path(String relative) {
        Path workspace = workspace();
        return workspace == null ? Path.of(relative) : workspace.resolve(relative);
    }

    /** When the process is ended from outside. */
    public Instant deadline() {
        return Instant.parse((String) request.get("deadline"));
    }

    /** The time until the deadline, never less than zero. */
    public Duration remaining() {
        return Duration.ofNanos(Math.max(0, ends - System.nanoTime()));
    }

    /** Names a file of the workspace, relative to it, that belongs to the result. */
    public void artifact(String path, String mediaType) {
        Map<String, Object> artifact = new LinkedHashMap<>();
        artifact.put("path", path);
        artifact.put("media_type", mediaType);
        artifacts.add(artifact);
    }

    /** Says how far the call is, from 0 to 1, and what it does. Never fails. */
    public void progress(double share, String message) {
        if (events == null) {
            return;
        }
        Map<String, Object> event = new LinkedHashMap<>();
        event.put("progress", share);
        if (message != null) {
            event.put("message", message);
        }
        byte[] line = (Json.write(event) + "\n").getBytes(StandardCharsets.UTF_8);
        if (line.length <= MAX_EVENT) {
            try {
                events.write(line);
            } catch (IOException nobodyListens) {
                // Progress is a courtesy.
            }
        }
    }
}
