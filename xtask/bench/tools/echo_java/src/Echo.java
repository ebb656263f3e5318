import dev.agentd.tool.Tool;

/** Gives its arguments back. */
public final class Echo {
    public static void main(String[] args) {
        Tool.run((arguments, context) -> arguments);
    }
}
