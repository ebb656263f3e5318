package dev.agentd.tool;

import java.math.BigDecimal;
import java.math.BigInteger;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * JSON as plain Java values: {@code Map<String, Object>}, {@code List<Object>}, {@code String}, {@code Boolean},
 * {@code null}, and for numbers {@code Long}, {@code BigInteger} beyond it, {@code Double} with a fraction or an exponent.
 */
public final class Json {
    private static final int MAX_DEPTH = 64;

    private final String text;
    private int at;

    private Json(String text) {
        this.text = text;
    }

    /**
     * Reads one JSON value.
     *
     * @throws IllegalArgumentException with the character where the text stops being JSON
     */
    public static Object parse(String text) {
        Json json = new Json(text);
        Object value = json.value(0);
        json.skipSpace();
        if (json.at < text.length()) {
            throw json.unexpected("the end");
        }
        return value;
    }

    /**
     * Writes a value: maps with string keys, iterables, arrays of objects, strings, numbers, booleans, null.
     *
     * @throws IllegalArgumentException for anything else, NaN, Infinity, and nesting deeper than 64
     */
    public static String write(Object value) {
        StringBuilder to = new StringBuilder();
        write(value, to, 0);
        return to.toString();
    }

    private IllegalArgumentException unexpected(String expected) {
        String found = at < text.length() ? "'" + text.charAt(at) + "'" : "the end";
        return new IllegalArgumentException("expected " + expected + ", found " + found + " at character " + at);
    }

    private void skipSpace() {
        while (at < text.length() && " \t\r\n".indexOf(text.charAt(at)) >= 0) {
            at++;
        }
    }

    private boolean take(char wanted) {
        skipSpace();
        if (at < text.length() && text.charAt(at) == wanted) {
            at++;
            return true;
        }
        return false;
    }

    private void need(char wanted) {
        if (!take(wanted)) {
            throw unexpected("'" + wanted + "'");
        }
    }

    private Object value(int depth) {
        if (depth > MAX_DEPTH) {
            throw new IllegalArgumentException("nesting deeper than " + MAX_DEPTH + " at character " + at);
        }
        skipSpace();
        char first = at < text.length() ? text.charAt(at) : 0;
        switch (first) {
            case '{':
                return object(depth + 1);
            case '[':
                return array(depth + 1);
            case '"':
                return string();
            case 't':
                return word("true", Boolean.TRUE);
            case 'f':
                return word("false", Boolean.FALSE);
            case 'n':
                return word("null", null);
            default:
                return number();
        }
    }

    private Object word(String word, Object value) {
        if (!text.startsWith(word, at)) {
            throw unexpected("a JSON value");
        }
        at += word.length();
        return value;
    }

    private Map<String, Object> object(int depth) {
        Map<String, Object> members = new LinkedHashMap<>();
        need('{');
        if (take('}')) {
            return members;
        }
        do {
            skipSpace();
            if (at >= text.length() || text.charAt(at) != '"') {
                throw unexpected("a key");
            }
            String key = string();
            need(':');
            members.put(key, value(depth));
        } while (take(','));
        need('}');
        return members;
    }

    private List<Object> array(int depth) {
        List<Object> items = new ArrayList<>();
        need('[');
        if (take(']')) {
            return items;
        }
        do {
            items.add(value(depth));
        } while (take(','));
        need(']');
        return items;
    }

    private String string() {
        StringBuilder content = new StringBuilder();
        at++;
        while (at < text.length()) {
            char next = text.charAt(at++);
            if (next == '"') {
                return content.toString();
            }
            content.append(next == '\\' ? escape() : next);
        }
        throw unexpected("a quote");
    }

    private char escape() {
        if (at >= text.length()) {
            throw unexpected("an escape");
        }
        char kind = text.charAt(at++);
        switch (kind) {
            case 'b':
                return '\b';
            case 'f':
                return '\f';
            case 'n':
                return '\n';
            case 'r':
                return '\r';
            case 't':
                return '\t';
            case 'u':
                if (at + 4 > text.length()) {
                    throw unexpected("four hexadecimal digits");
                }
                char character = (char) Integer.parseInt(text.substring(at, at + 4), 16);
                at += 4;
                return character;
            default:
                return kind;
        }
    }

    private Object number() {
        int start = at;
        while (at < text.length() && "+-.eE0123456789".indexOf(text.charAt(at)) >= 0) {
            at++;
        }
        String written = text.substring(start, at);
        try {
            if (written.matches("-?[0-9]+")) {
                BigInteger integer = new BigInteger(written);
                return integer.bitLength() < Long.SIZE ? (Object) integer.longValue() : integer;
            }
            return Double.valueOf(written);
        } catch (NumberFormatException refused) {
            at = start;
            throw unexpected("a JSON value");
        }
    }

    private static void write(Object value, StringBuilder to, int depth) {
        if (depth > MAX_DEPTH) {
            throw new IllegalArgumentException("the value is nested deeper than " + MAX_DEPTH + ", or holds itself");
        }
        if (value == null || value instanceof Boolean) {
            to.append(value);
        } else if (value instanceof CharSequence || value instanceof Character || value instanceof Enum) {
            quote(value.toString(), to);
        } else if (value instanceof Double || value instanceof Float) {
            double number = ((Number) value).doubleValue();
            if (Double.isNaN(number) || Double.isInfinite(number)) {
                throw new IllegalArgumentException(number + " is no JSON number");
            }
            to.append(value);
        } else if (value instanceof BigDecimal || value instanceof Number) {
            to.append(value);
        } else if (value instanceof Map) {
            char separator = '{';
            for (Map.Entry<?, ?> member : ((Map<?, ?>) value).entrySet()) {
                to.append(separator);
                quote(String.valueOf(member.getKey()), to);
                to.append(':');
                write(member.getValue(), to, depth + 1);
                separator = ',';
            }
            to.append(separator == '{' ? "{}" : "}");
        } else if (value instanceof Iterable) {
            char separator = '[';
            for (Object item : (Iterable<?>) value) {
                to.append(separator);
                write(item, to, depth + 1);
                separator = ',';
            }
            to.append(separator == '[' ? "[]" : "]");
        } else if (value instanceof Object[]) {
            write(List.of((Object[]) value), to, depth);
        } else {
            throw new IllegalArgumentException(value.getClass().getName() + " is no JSON value");
        }
    }

    private static void quote(String content, StringBuilder to) {
        to.append('"');
        for (int index = 0; index < content.length(); index++) {
            char next = content.charAt(index);
            if (next == '"' || next == '\\') {
                to.append('\\').append(next);
            } else if (next < ' ') {
                to.append(String.format("\\u%04x", (int) next));
            } else {
                to.append(next);
            }
        }
        to.append('"');
    }
}
