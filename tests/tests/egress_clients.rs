//! Programs of many kinds reach a listed host as they reach any other: no proxy settings, no arguments, no patches. Each brings
//! a way of its own to resolve names and to connect.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use agentd_tests::daemon::{Daemon, shown};
use agentd_tests::far_end::FarEnd;
use agentd_tests::site::{Site, chmod};
use agentd_tests::{needs, programs, requirement};
use serde_json::Value;

/// Pure Python, with all that it needs in wheels.
const REQUESTS: &str = "requests==2.34.2";
/// Linked statically against musl.
const UV: &str = "uv==0.13.9";
/// Written in Go, with its own resolver.
const BAZELISK: &str = "@bazel/bazelisk@1.28.1";

/// A web server and the same over TLS, both `web.test`, and a daemon that lets calls out to them.
struct Away {
    site: Site,
    plain: FarEnd,
    secure: FarEnd,
}

impl Away {
    fn new() -> Self {
        let site = Site::new();
        let mut command = Command::new("/usr/bin/openssl");
        command.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=web.test"]);
        command.args(["-addext", "subjectAltName=DNS:web.test"]);
        let (certificate, key) = (site.path("certificate.pem"), site.path("key.pem"));
        let output = command.arg("-out").arg(&certificate).arg("-keyout").arg(&key).output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
        let (plain, secure) = (FarEnd::http(), FarEnd::https(&certificate, &key));
        Self { site, plain, secure }
    }

    /// Writes the configuration and makes a workspace with the certificate in it.
    fn prepare(&self, tables: &str) -> PathBuf {
        self.site.configure(&format!("[network.hosts]\n\"web.test\" = [\"127.0.0.1\"]\n\n{tables}"));
        let policy = format!(
            "version = 1\nname = \"out\"\nextends = \"build\"\nadhoc = true\nnetwork_allow = [\"{}\", \"{}\"]\n",
            self.plain.rule(),
            self.secure.rule()
        );
        self.site.write("policies/out.toml", policy.as_bytes());
        let workspace = self.site.workspace("w", 0, 0);
        fs::copy(self.site.path("certificate.pem"), workspace.join("ca.pem")).unwrap();
        workspace
    }

    /// Runs a command that is to print what `/a` answers, first without TLS, then with.
    fn assert_both_answer(&self, options: &[&str], command: &[&str]) {
        let printed = self.run(options, command);
        let hosts: Vec<String> = printed
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|_| panic!("{printed}")))
            .map(|answer| answer["host"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(hosts, self.hosts());
    }

    fn hosts(&self) -> [String; 2] {
        [&self.plain, &self.secure].map(|end| format!("web.test:{}", end.port()))
    }

    fn urls(&self) -> [String; 2] {
        let [plain, secure] = self.hosts();
        [format!("http://{plain}/a"), format!("https://{secure}/a")]
    }

    fn run(&self, options: &[&str], command: &[&str]) -> String {
        let daemon = Daemon::start(&self.site);
        let [plain, secure] = self.hosts();
        let workspace = self.site.path("work/w");
        let mut all = vec!["--policy", "out", "--timeout", "90s", "--workspace", workspace.to_str().unwrap()];
        all.extend(["--network", &plain, "--network", &secure]);
        all.extend(options);
        let output = daemon.exec(&all, command, b"");
        assert!(output.status.success(), "{}\n{:?} {:?}", shown(&output), self.plain.seen(), self.secure.seen());
        daemon.stop();
        String::from_utf8(output.stdout).unwrap()
    }
}

fn requirements(program: &str) -> Result<(), String> {
    requirement::root()?;
    requirement::program("/usr/bin/openssl")?;
    requirement::program(program)
}

/// A directory that keeps what was fetched, filled by this command when it is not there yet.
fn fetched(name: &str, fetch: impl FnOnce(&Path) -> Command) -> Result<PathBuf, String> {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if place.exists() {
        return Ok(place);
    }
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).map_err(|error| error.to_string())?;
    let output = fetch(scratch.path()).output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    // Whole or absent; another test of the same kind may have been faster.
    let scratch = scratch.keep();
    if fs::rename(&scratch, &place).is_err() {
        let _ = fs::remove_dir_all(scratch);
    }
    Ok(place)
}

#[test]
fn curl() {
    needs!(requirements("/usr/bin/curl"));
    let away = Away::new();
    away.prepare("");
    let [plain, secure] = away.urls();
    let script = format!("curl -sS {plain} && echo && curl -sS --cacert /workspace/ca.pem {secure}");
    away.assert_both_answer(&[], &["sh", "-c", &script]);
}

#[test]
fn python_urllib() {
    needs!(requirements("/usr/bin/python3"));
    let away = Away::new();
    away.prepare("");
    let [plain, secure] = away.urls();
    let code = format!(
        "import ssl, urllib.request as r\nprint(r.urlopen('{plain}').read().decode())\n\
         print(r.urlopen('{secure}', context=ssl.create_default_context(cafile='/workspace/ca.pem')).read().decode())"
    );
    away.assert_both_answer(&[], &["/usr/bin/python3", "-c", &code]);
}

#[test]
fn python_requests() {
    needs!(requirements("/usr/bin/python3"));
    let pip = |place: &Path| {
        let mut command = Command::new("python3");
        command.args(["-m", "pip", "install", "--quiet", "--only-binary=:all:", "--target"]).arg(place).arg(REQUESTS);
        command
    };
    let library = match fetched("requests-python", pip) {
        Ok(library) => library,
        Err(reason) => return requirement::skip(&format!("{REQUESTS} cannot be had: {reason}")),
    };
    let away = Away::new();
    let workspace = away.prepare("");
    let copied = Command::new("cp").arg("-r").arg(library).arg(workspace.join("lib")).status().unwrap();
    assert!(copied.success());
    let [plain, secure] = away.urls();
    let code = format!(
        "import sys; sys.path.insert(0, '/workspace/lib')\nimport requests\nprint(requests.get('{plain}').text)\n\
         print(requests.get('{secure}', verify='/workspace/ca.pem').text)"
    );
    away.assert_both_answer(&[], &["/usr/bin/python3", "-c", &code]);
}

/// What Node and Bun run alike.
fn fetch_script(away: &Away) -> String {
    let [plain, secure] = away.urls();
    format!(
        "for (const url of ['{plain}', '{secure}']) {{ const answer = await fetch(url); console.log(await answer.text()); }}"
    )
}

#[test]
fn node_fetch() {
    needs!(requirements("/usr/bin/node"));
    let away = Away::new();
    let workspace = away.prepare("");
    fs::write(workspace.join("fetch.mjs"), fetch_script(&away)).unwrap();
    away.assert_both_answer(&[], &["sh", "-c", "NODE_EXTRA_CA_CERTS=/workspace/ca.pem exec node /workspace/fetch.mjs"]);
}

#[test]
fn bun_fetch() {
    needs!(requirements("/usr/bin/openssl"));
    let Some(bun) = bun() else {
        return requirement::skip("no Bun: `cargo demo` fetches it, or AGENTD_TEST_BUN names it");
    };
    let away = Away::new();
    // Beside the site's own files, so that nobody else can write where it lies.
    fs::create_dir(away.site.path("bun")).unwrap();
    chmod(&away.site.path("bun"), 0o755);
    programs::copy(&bun, &away.site.path("bun/bun"));
    let command = away.site.path("bun/bun");
    let workspace = away.prepare(&format!("[runtimes.bun]\ncommand = \"{}\"\n", command.display()));
    let script =
        fetch_script(&away).replace("fetch(url)", "fetch(url, { tls: { ca: Bun.file('/workspace/ca.pem') } })");
    fs::write(workspace.join("fetch.ts"), script).unwrap();
    away.assert_both_answer(&["--runtime", "bun"], &["/workspace/fetch.ts"]);
}

/// Where `cargo demo` puts it, or where a variable says.
fn bun() -> Option<PathBuf> {
    let named = std::env::var_os("AGENTD_TEST_BUN").map(PathBuf::from);
    let tools = Path::new(env!("CARGO_TARGET_TMPDIR")).parent()?.join("tools");
    let fetched = fs::read_dir(tools).into_iter().flatten().flatten().map(|entry| entry.path().join("bun"));
    named.into_iter().chain(fetched).find(|path| path.is_file())
}

#[test]
fn java_http_client() {
    needs!(requirements("/usr/bin/javac"));
    let away = Away::new();
    let workspace = away.prepare("");
    let [plain, secure] = away.urls();
    let program = format!(
        "import java.io.*; import java.net.URI; import java.net.http.*; import java.security.*; import java.security.cert.*; import javax.net.ssl.*;\n\
         public class Fetch {{ public static void main(String[] a) throws Exception {{\n\
         var store = KeyStore.getInstance(KeyStore.getDefaultType()); store.load(null);\n\
         try (var in = new FileInputStream(\"/workspace/ca.pem\")) {{\n\
         store.setCertificateEntry(\"ca\", CertificateFactory.getInstance(\"X.509\").generateCertificate(in)); }}\n\
         var trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm()); trust.init(store);\n\
         var tls = SSLContext.getInstance(\"TLS\"); tls.init(null, trust.getTrustManagers(), null);\n\
         var client = HttpClient.newBuilder().sslContext(tls).build();\n\
         for (var url : new String[] {{\"{plain}\", \"{secure}\"}})\n\
         System.out.println(client.send(HttpRequest.newBuilder(URI.create(url)).build(), HttpResponse.BodyHandlers.ofString()).body());\n\
         System.exit(0); }} }}"
    );
    fs::write(workspace.join("Fetch.java"), program).unwrap();
    away.assert_both_answer(&[], &["java", "/workspace/Fetch.java"]);
}

#[test]
fn git_over_http() {
    needs!(requirements("/usr/bin/git"));
    let mut away = Away::new();
    let folder = tempfile::tempdir().unwrap();
    let make = "git init -q -b main w && cd w && echo hello > a && git add a && \
                git -c user.name=n -c user.email=e@example.com commit -q -m first && \
                git clone -q --bare . ../repository.git && cd ../repository.git && git update-server-info";
    let made = Command::new("sh").args(["-c", make]).current_dir(folder.path()).output().unwrap();
    assert!(made.status.success(), "{}", shown(&made));
    away.plain = FarEnd::files(folder.path().to_owned());
    away.prepare("");
    let [plain, _] = away.hosts();
    let script = format!("git clone -q http://{plain}/repository.git /tmp/clone && cat /tmp/clone/a");
    assert_eq!(away.run(&[], &["sh", "-c", &script]), "hello\n");
}

/// musl's resolver sends both questions at once and takes no answer but from the server that it asked.
#[test]
fn a_static_program_with_musl() {
    needs!(requirements("/usr/bin/python3"));
    if std::env::consts::ARCH != "x86_64" {
        return requirement::skip("the static program is there for x86-64 only");
    }
    let pip = |place: &Path| {
        let mut command = Command::new("python3");
        command.args(["-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]);
        command.args(["--platform", "musllinux_1_1_x86_64", "--target"]).arg(place).arg(UV);
        command
    };
    let uv = match fetched("uv-musl", pip) {
        Ok(place) => place.join("bin/uv"),
        Err(reason) => return requirement::skip(&format!("{UV} cannot be had: {reason}")),
    };
    let mut away = Away::new();
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("simple/nothing")).unwrap();
    fs::write(folder.path().join("answer"), "").unwrap();
    away.plain = FarEnd::files(folder.path().to_owned());
    let workspace = away.prepare("");
    programs::copy(&uv, &workspace.join("uv"));
    let [plain, _] = away.hosts();
    // The package is not there, and saying so takes an answer of the server.
    let script = format!(
        "/workspace/uv --no-cache pip install --python /usr/bin/python3 --target /tmp/t --index-url http://{plain}/simple nothing 2>&1; true"
    );
    let printed = away.run(&[], &["sh", "-c", &script]);
    let asked = away.plain.seen();
    assert!(asked.iter().any(|line| line.starts_with("GET /simple/nothing/")), "{asked:?} {printed}");
}

/// Go reads resolv.conf itself.
#[test]
fn a_go_program() {
    needs!(requirements("/usr/bin/npm"));
    if std::env::consts::ARCH != "x86_64" {
        return requirement::skip("the Go program is taken for x86-64 only");
    }
    let npm = |place: &Path| {
        let mut command = Command::new("sh");
        let script = format!(
            "npm pack --silent --cache npm-cache {BAZELISK} && tar -xzf bazel-bazelisk-*.tgz && rm -rf npm-cache"
        );
        command.args(["-c", &script]).current_dir(place);
        command
    };
    let program = match fetched("bazelisk", npm) {
        Ok(place) => place.join("package/bazelisk-linux_amd64"),
        Err(reason) => return requirement::skip(&format!("{BAZELISK} cannot be had: {reason}")),
    };
    let away = Away::new();
    let workspace = away.prepare("");
    programs::copy(&program, &workspace.join("bazelisk"));
    let [plain, _] = away.hosts();
    let script = format!(
        "HOME=/tmp USE_BAZEL_VERSION=7.0.0 BAZELISK_BASE_URL=http://{plain}/bazel /workspace/bazelisk version 2>&1; true"
    );
    let printed = away.run(&[], &["sh", "-c", &script]);
    let asked = away.plain.seen();
    assert!(asked.iter().any(|line| line.starts_with("GET /bazel/7.0.0/")), "{asked:?} {printed}");
}
