package dev.agentd.tool;

import java.util.LinkedHashMap;
import java.util.Map;

/** An error that the caller is told: throw it from a handler. */
public final class ToolError extends Exception {
    private static final long serialVersionUID = 1L;

    private final String code;
    private boolean retryable;
    private Long retryAfterMs;
    private transient Object details;

    /**
     * @param code the tool's own: 1 to 64 letters, digits, {@code _}, {@code -} and {@code .}
     * @param message read by the model: say what is wrong and what would work
     */
    public ToolError(String code, String message) {
        super(message);
        this.code = code;
    }

    /** The same call may work later. */
    public ToolError retryable() {
        retryable = true;
        return this;
    }

    /** The same call may work after so many milliseconds. */
    public ToolError retryAfter(long milliseconds) {
        retryable = true;
        retryAfterMs = milliseconds;
        return this;
    }

    /** Anything that is JSON. */
    public ToolError details(Object value) {
        details = value;
        return this;
    }

    Map<String, Object> toJson() {
        Map<String, Object> error = new LinkedHashMap<>();
        error.put("code", code);
        error.put("message", String.valueOf(getMessage()));
        error.put("retryable", retryable);
        if (retryAfterMs != null) {
            error.put("retry_after_ms", retryAfterMs);
        }
        if (details != null) {
            error.put("details", details);
        }
        return error;
    }
}
