//! What the example's tools run on: python3 and java of the host, Bun from npm at a pinned version.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use data_encoding::{BASE64, HEXLOWER};
use sha2::{Digest as _, Sha256, Sha512};

use crate::process;
use crate::project;

/// Where agentd looks for runtimes; PATH may hold shims that lie where no sandbox looks.
const RUNTIME_DIRECTORIES: [&str; 3] = ["/usr/local/bin", "/usr/bin", "/bin"];

const BUN_VERSION: &str = "1.4.5";

/// The npm package that holds Bun for a kind of machine, and the digest of its archive.
struct BunPackage {
    name: &'static str,
    sha512: &'static str,
}

const BUN_X64: BunPackage = BunPackage {
    name: "@oven/bun-linux-x64",
    sha512: "IWX9BELoGHAUtMonkeSaNaZwXzRk+oDw6Mk+HBFXd3KHYIBNBsIGRupMZPcgNoDbJpLu6gAJjIoIVPZtt1aJ1g==",
};
const BUN_X64_BASELINE: BunPackage = BunPackage {
    name: "@oven/bun-linux-x64-baseline",
    sha512: "s8yMwYcFnnrA178gji0gZbkE2WVDej/Ti1x770oPfihxyRxSMNhGhiAQNXV53aDeraZxksdvKV/RAdQBCd0qPA==",
};
const BUN_ARM64: BunPackage = BunPackage {
    name: "@oven/bun-linux-aarch64",
    sha512: "4BXmsSKnjOrlGWqZV4x/oWa7AVoR+B6lCXddMzOAXBIm3t50eslg9wb66gmtW1AamEQ1l1CDvmmruysEhqOWMg==",
};

/// Fails with the list of what to install when the host lacks something that the example needs.
pub(crate) fn check_host() -> Result<()> {
    let on_path = |name: &str| {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).any(|directory| is_program(&directory.join(name)))
    };
    let for_tools =
        |name: &str| RUNTIME_DIRECTORIES.iter().any(|directory| is_program(&Path::new(directory).join(name)));
    let needs = [
        (for_tools("python3"), "python3 (in /usr/bin or /usr/local/bin)", "python3"),
        (for_tools("java"), "java (in /usr/bin or /usr/local/bin)", "default-jdk-headless"),
        (on_path("javac") && on_path("jar"), "javac and jar", "default-jdk-headless"),
        (bun_file()?.exists() || on_path("npm"), "npm, to fetch Bun", "npm"),
    ];
    let missing: Vec<_> = needs.iter().filter(|(there, ..)| !there).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing.iter().map(|(_, name, _)| *name).collect::<Vec<_>>().join("; ");
    let mut packages: Vec<_> = missing.iter().map(|(.., package)| *package).collect();
    packages.dedup();
    bail!("missing: {names}.\nOn Debian and Ubuntu: apt-get install {}", packages.join(" "));
}

/// Bun's program, fetched when it is not there yet.
pub(crate) fn bun() -> Result<PathBuf> {
    let program = bun_file()?;
    if !program.exists() {
        let package = bun_package()?;
        eprintln!("fetching Bun {BUN_VERSION} from npm ({})", package.name);
        fetch_bun(&package, &program).with_context(|| format!("fetching {} {BUN_VERSION}", package.name))?;
    }
    Ok(program)
}

fn bun_file() -> Result<PathBuf> {
    Ok(project::target()?.join(format!("tools/bun-{BUN_VERSION}/bun")))
}

fn bun_package() -> Result<BunPackage> {
    match std::env::consts::ARCH {
        "x86_64" => {
            let cpu = fs::read_to_string("/proc/cpuinfo").context("reading /proc/cpuinfo")?;
            Ok(if cpu.contains(" avx2") { BUN_X64 } else { BUN_X64_BASELINE })
        }
        "aarch64" => Ok(BUN_ARM64),
        other => bail!("npm carries no Bun for {other}"),
    }
}

fn fetch_bun(package: &BunPackage, program: &Path) -> Result<()> {
    let tools = project::target()?.join("tools");
    fs::create_dir_all(&tools)?;
    let scratch = tempfile::tempdir_in(&tools)?;
    let archive = process::output(
        Command::new("npm")
            .current_dir(scratch.path())
            .args(["pack", "--silent", "--cache", "npm-cache", &format!("{}@{BUN_VERSION}", package.name)])
            .stdin(Stdio::null()),
    )?;
    let archive = archive.lines().last().context("npm named no archive")?.to_owned();
    let found = BASE64.encode(&Sha512::digest(fs::read(scratch.path().join(&archive))?));
    if found != package.sha512 {
        bail!("the archive's sha512 is {found}, not {}", package.sha512);
    }
    process::run(Command::new("tar").current_dir(scratch.path()).args(["-xzf", &archive, "package/bin/bun"]))?;
    let unpacked = scratch.path().join("package/bin/bun");
    fs::set_permissions(&unpacked, fs::Permissions::from_mode(0o755))?;
    let folder = program.parent().context("Bun's program has no folder")?;
    fs::create_dir_all(folder)?;
    // The rename makes it whole or absent, so an interrupted fetch is simply done again.
    fs::rename(&unpacked, program)?;
    Ok(())
}

/// agentd's library for tools in Java.
pub(crate) fn java_library() -> PathBuf {
    project::root().join("toolproto/sdk/java/src/main/java/dev/agentd/tool")
}

/// A jar from folders of sources, compiled when the sources differ from the last time.
pub(crate) fn jar(folders: &[&Path], main_class: &str) -> Result<PathBuf> {
    let mut files: Vec<PathBuf> = Vec::new();
    for folder in folders {
        for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
            files.push(entry?.path());
        }
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == "java"));
    files.sort();
    let mut hash = Sha256::new();
    for file in &files {
        hash.update(fs::read(file)?);
    }
    let digest = HEXLOWER.encode(&hash.finalize()[..8]);
    let tools = project::target()?.join("tools");
    let jar = tools.join(format!("{main_class}-{digest}.jar"));
    if !jar.exists() {
        eprintln!("compiling {main_class}");
        fs::create_dir_all(&tools)?;
        let scratch = tempfile::tempdir_in(&tools)?;
        let classes = scratch.path().join("classes");
        process::run(
            Command::new("javac").args(["--release", "17", "-Xlint:all", "-Werror", "-d"]).arg(&classes).args(&files),
        )?;
        let fresh = scratch.path().join("fresh.jar");
        process::run(
            Command::new("jar")
                .args(["--create", "--main-class", main_class, "--file"])
                .arg(&fresh)
                .arg("-C")
                .arg(&classes)
                .arg("."),
        )?;
        fs::rename(&fresh, &jar)?;
    }
    Ok(jar)
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}
