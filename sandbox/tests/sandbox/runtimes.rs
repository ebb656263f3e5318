//! Real runtimes do real work under the default policy.

use std::path::{Path, PathBuf};

use crate::harness::{Sandbox, Test, sh, skip};

pub(crate) const TESTS: &[Test] = &[
    ("runtimes::python", python),
    ("runtimes::python_starts_processes_in_every_way", python_starts_processes_in_every_way),
    ("runtimes::python_makes_virtual_environments", python_makes_virtual_environments),
    ("runtimes::node", node),
    ("runtimes::node_fetches_over_loopback", node_fetches_over_loopback),
    ("runtimes::bun", bun),
    ("runtimes::java", java),
    ("runtimes::java_speaks_http_over_loopback", java_speaks_http_over_loopback),
    ("runtimes::gcc", gcc),
    ("runtimes::shells_and_their_tools", shells_and_their_tools),
    ("runtimes::git", git),
];

fn python() {
    let script = "import json, sys, threading, subprocess, multiprocessing, sqlite3, ssl, tempfile, zoneinfo\n\
        def double(n): return 2 * n\n\
        if __name__ == '__main__':\n\
        \x20   value = json.load(sys.stdin)\n\
        \x20   thread = threading.Thread(target=lambda: None); thread.start(); thread.join()\n\
        \x20   assert subprocess.run(['echo', 'x'], capture_output=True).stdout == b'x\\n'\n\
        \x20   with multiprocessing.get_context('fork').Pool(2) as pool: assert pool.map(double, [1, 2]) == [2, 4]\n\
        \x20   db = sqlite3.connect('/workspace/x.db'); db.execute('create table t (a)'); db.commit()\n\
        \x20   ssl.create_default_context()\n\
        \x20   json.dump({'n': value['n'] + 1}, sys.stdout)";
    let output = Sandbox::new("workspace", &["python3", "-c", script]).stdin(b"{\"n\": 1}").run();
    assert_eq!(output.success(), r#"{"n": 2}"#);
}

fn python_starts_processes_in_every_way() {
    // forkserver and spawn import the main module again, so it is a file.
    let script = "cat > m.py <<'END'\n\
        import multiprocessing as mp, sys\n\
        from multiprocessing import shared_memory\n\
        def double(n): return 2 * n\n\
        if __name__ == '__main__':\n\
        \x20   for way in ['fork', 'spawn', 'forkserver']:\n\
        \x20       context = mp.get_context(way)\n\
        \x20       with context.Pool(2) as pool: assert pool.map(double, [1, 2]) == [2, 4]\n\
        \x20       queue = context.Queue(); queue.put(way); assert queue.get() == way\n\
        \x20   with mp.Manager() as manager: assert list(manager.list([1])) == [1]\n\
        \x20   memory = shared_memory.SharedMemory(create=True, size=16); memory.close(); memory.unlink()\n\
        \x20   print('done')\n\
        END\n\
        python3 m.py";
    assert_eq!(sh("workspace", script).run().success(), "done");
}

fn python_makes_virtual_environments() {
    let script =
        "python3 -m venv --without-pip env && env/bin/python -c 'import sys; print(sys.prefix != sys.base_prefix)'";
    assert_eq!(sh("workspace", script).run().success(), "True");
}

fn node() {
    if !Path::new("/usr/bin/node").exists() {
        return skip("node is not installed");
    }
    let script = "const { Worker } = require('worker_threads');\n\
        const input = JSON.parse(require('fs').readFileSync(0, 'utf8'));\n\
        require('child_process').execFileSync('true');\n\
        new WebAssembly.Module(new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0]));\n\
        new Worker('require(\"worker_threads\").parentPort.postMessage(1)', { eval: true })\n\
          .on('message', () => console.log(JSON.stringify({ n: input.n + 1 })));";
    let output = Sandbox::new("workspace", &["node", "-e", script]).stdin(b"{\"n\": 1}").run();
    assert_eq!(output.success(), r#"{"n":2}"#);
}

fn node_fetches_over_loopback() {
    if !Path::new("/usr/bin/node").exists() {
        return skip("node is not installed");
    }
    let script = "const server = require('http').createServer((_, reply) => reply.end('x'.repeat(300000)));\n\
        server.listen(0, '127.0.0.1', async () => {\n\
          const reply = await fetch('http://127.0.0.1:' + server.address().port);\n\
          console.log((await reply.text()).length); server.close(); server.closeAllConnections(); });";
    assert_eq!(Sandbox::new("workspace", &["node", "-e", script]).run().success(), "300000");
}

/// Bun's binary: the one that AGENTD_TEST_BUN names, that `cargo xtask` has fetched, or that is installed.
fn bun_binary() -> Option<PathBuf> {
    let named = std::env::var_os("AGENTD_TEST_BUN").map(PathBuf::from);
    let target = std::env::current_exe().ok().and_then(|this| Some(this.ancestors().nth(3)?.join("tools")));
    let fetched = target.and_then(|tools| std::fs::read_dir(tools).ok()).into_iter().flatten().flatten();
    let fetched = fetched.map(|entry| entry.path().join("bun"));
    let installed = ["/usr/local/bin/bun", "/usr/bin/bun"].map(PathBuf::from);
    named.into_iter().chain(fetched).chain(installed).find(|path| path.is_file())
}

fn bun() {
    let Some(bun) = bun_binary() else { return skip("no bun: `cargo demo` fetches it, or AGENTD_TEST_BUN names it") };
    let bun = bun.canonicalize().unwrap();
    let script = "const input = JSON.parse(require('fs').readFileSync(0, 'utf8'));\n\
        Bun.spawnSync(['true']);\n\
        const worker = new Worker(URL.createObjectURL(new Blob(['postMessage(1)'])));\n\
        worker.onmessage = () => { console.log(JSON.stringify({ n: input.n + 1 })); worker.terminate(); };";
    let command = [bun.to_str().unwrap(), "-e", script];
    let output = Sandbox::new("workspace", &command).stdin(b"{\"n\": 1}").runtime_mount(&bun).run();
    assert_eq!(output.success(), r#"{"n":2}"#);
}

fn java() {
    if !Path::new("/usr/bin/java").exists() {
        return skip("java is not installed");
    }
    let program = "import java.net.*; import java.nio.file.*; import java.util.concurrent.*;\n\
        public class Main { public static void main(String[] a) throws Exception {\n\
        String in = new String(System.in.readAllBytes()).trim();\n\
        var pool = Executors.newFixedThreadPool(2); pool.submit(() -> 1).get(); pool.shutdown();\n\
        Files.writeString(Path.of(\"/workspace/x\"), in);\n\
        new ProcessBuilder(\"true\").start().waitFor();\n\
        javax.net.ssl.SSLContext.getDefault();\n\
        try (var s = new ServerSocket(0); var c = new Socket(InetAddress.getLoopbackAddress(), s.getLocalPort())) {}\n\
        System.out.println(Files.readString(Path.of(\"/workspace/x\")) + 1); } }";
    let script = format!("cat > /tmp/Main.java <<'END'\n{program}\nEND\njava /tmp/Main.java");
    let output = sh("build", &script).stdin(b"n").run();
    assert_eq!(output.success(), "n1", "{}", output.stderr);
}

fn java_speaks_http_over_loopback() {
    if !Path::new("/usr/bin/javac").exists() {
        return skip("javac is not installed");
    }
    let program = "import com.sun.net.httpserver.*; import java.net.*; import java.net.http.*;\n\
        public class Main { public static void main(String[] a) throws Exception {\n\
        var server = HttpServer.create(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0), 0);\n\
        server.createContext(\"/\", e -> { e.sendResponseHeaders(200, 2); e.getResponseBody().write(\"ok\".getBytes()); e.close(); });\n\
        server.start();\n\
        var uri = URI.create(\"http://127.0.0.1:\" + server.getAddress().getPort() + \"/\");\n\
        var reply = HttpClient.newHttpClient().send(HttpRequest.newBuilder(uri).build(), HttpResponse.BodyHandlers.ofString());\n\
        System.out.println(reply.body()); System.exit(0); } }";
    let script = format!("cat > Main.java <<'END'\n{program}\nEND\njavac Main.java && java Main");
    assert_eq!(sh("build", &script).run().success(), "ok");
}

fn shells_and_their_tools() {
    let script = "set -euo pipefail; diff <(echo a) <(echo a); printf 'b\\na\\n' | sort | tee /dev/stderr | head -1\n\
        tar -cf x.tar -C /etc hostname && tar -tf x.tar; find /workspace -name x.tar | xargs -n1 basename\n\
        mkfifo pipe; echo through > pipe & cat pipe; wait; awk 'BEGIN { print 1 + 1 }'; sed -n 1p <<< here";
    let output = Sandbox::new("workspace", &["bash", "-c", script]).run();
    assert_eq!(output.success(), "a\nhostname\nx.tar\nthrough\n2\nhere");
}

fn gcc() {
    if !Path::new("/usr/bin/gcc").exists() {
        return skip("gcc is not installed");
    }
    let script = "printf '#include <pthread.h>\\n#include <stdio.h>\\nvoid *f(void *p) { return p; }\\n\
        int main(void) { pthread_t t; pthread_create(&t, 0, f, 0); pthread_join(t, 0); puts(\"ran\"); }\\n' > a.c\n\
        gcc -O2 -pthread -o a a.c && ./a";
    assert_eq!(sh("workspace", script).run().success(), "ran");
}

fn git() {
    if !Path::new("/usr/bin/git").exists() {
        return skip("git is not installed");
    }
    let script = "set -e; export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b\n\
        /usr/bin/git init -q r; cd r; echo x > f; /usr/bin/git add f; /usr/bin/git commit -qm one\n\
        cd ..; /usr/bin/git clone -q r s; cd s; /usr/bin/git log --format=%s";
    assert_eq!(sh("workspace", script).run().success(), "one");
}
