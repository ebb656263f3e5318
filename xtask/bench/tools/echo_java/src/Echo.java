import java.io.IOException;
import java.nio.charset.StandardCharsets;

/** Starts, reads its request, answers with a plain result: what a Java tool costs at least. */
public final class Echo {
    public static void main(String[] args) throws IOException {
        var request = new String(System.in.readAllBytes(), StandardCharsets.UTF_8);
        System.out.write(("{\"bytes\":" + request.length() + "}").getBytes(StandardCharsets.UTF_8));
        System.out.flush();
    }
}
