import dev.agentd.tool.Context;
import dev.agentd.tool.Tool;
import dev.agentd.tool.ToolError;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.LinkOption;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.time.LocalDateTime;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Stream;
import java.util.zip.CRC32;
import java.util.zip.ZipEntry;
import java.util.zip.ZipOutputStream;

/** Packs a folder into a zip archive with checksums, by means of agentd's library for Java. */
public final class PackReport {
    /** The earliest time that a zip entry can hold: the archive depends on the contents alone. */
    private static final LocalDateTime FIXED = LocalDateTime.of(1980, 1, 1, 0, 0);

    /** One file to pack. */
    private record Item(String path, byte[] content, String sha256) {
        Map<String, Object> described() {
            var description = new LinkedHashMap<String, Object>();
            description.put("path", path);
            description.put("bytes", (long) content.length);
            description.put("sha256", sha256);
            return description;
        }
    }

    public static void main(String[] none) {
        Tool.run((arguments, context) ->
                pack((String) arguments.get("folder"), (String) arguments.get("archive"), context));
    }

    private static Map<String, Object> pack(String folder, String archive, Context context)
            throws ToolError, IOException {
        var items = read(context.workspace(), folder);
        var target = context.path(archive);
        try (var out = Files.newOutputStream(target)) {
            write(out, items);
        }
        context.artifact(archive, "application/zip");
        var written = Files.readAllBytes(target);
        var result = new LinkedHashMap<String, Object>();
        result.put("archive", archive);
        result.put("bytes", (long) written.length);
        result.put("sha256", sha256(written));
        result.put("files", items.stream().map(Item::described).toList());
        return result;
    }

    /** The folder's regular files, by path; links are not followed. */
    private static List<Item> read(Path workspace, String folder) throws ToolError, IOException {
        var root = workspace.resolve(folder);
        if (!Files.isDirectory(root, LinkOption.NOFOLLOW_LINKS)) {
            throw new ToolError("FOLDER_MISSING", "the workspace has no folder " + folder);
        }
        List<Path> paths;
        try (Stream<Path> found = Files.walk(root)) {
            paths = found.filter(path -> Files.isRegularFile(path, LinkOption.NOFOLLOW_LINKS)).sorted().toList();
        }
        if (paths.isEmpty()) {
            throw new ToolError("FOLDER_EMPTY", "the folder " + folder + " holds no file");
        }
        var items = new ArrayList<Item>();
        for (var path : paths) {
            var content = Files.readAllBytes(path);
            items.add(new Item(workspace.relativize(path).toString(), content, sha256(content)));
        }
        return items;
    }

    private static void write(OutputStream out, List<Item> items) throws IOException {
        var sums = new StringBuilder();
        try (var zip = new ZipOutputStream(out, StandardCharsets.UTF_8)) {
            for (var item : items) {
                store(zip, item.path(), item.content());
                sums.append(item.sha256()).append("  ").append(item.path()).append('\n');
            }
            store(zip, "SHA256SUMS", sums.toString().getBytes(StandardCharsets.UTF_8));
        }
    }

    /** Stored, not deflated: what a compressor writes differs between its versions. */
    private static void store(ZipOutputStream zip, String name, byte[] content) throws IOException {
        var crc = new CRC32();
        crc.update(content);
        var entry = new ZipEntry(name);
        entry.setMethod(ZipEntry.STORED);
        entry.setSize(content.length);
        entry.setCrc(crc.getValue());
        entry.setTimeLocal(FIXED);
        zip.putNextEntry(entry);
        zip.write(content);
        zip.closeEntry();
    }

    private static String sha256(byte[] content) {
        try {
            return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(content));
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException("every Java has SHA-256", error);
        }
    }
}
