//! `cargo xtask fuzz`: coverage-guided fuzzing, with libFuzzer, of what meets hostile or mistaken bytes first.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::process;
use crate::project;

/// A program below `tests/fuzz/targets/` and the files that it begins with.
struct Target {
    name: &'static str,
    /// Folders of the repository and the ending of the files in them that are taken, folders below included.
    seeds: &'static [(&'static str, &'static str)],
    /// Beginnings that are in no file.
    words: &'static [&'static [u8]],
}

const TARGETS: [Target; 6] = [
    Target {
        name: "packets",
        seeds: &[],
        words: &[
            b"\0{\"reload\":{}}",
            b"\0\"ready\"",
            b"\0{\"end\":{\"call\":\"06h2i35q1tof184i55nbb3ggk4\"}}",
            b"\0{\"admit\":{\"job\":\"06h2i35q1tof184i55nbb3ggk4\",\"workspace\":\"none\",\"agent\":null,\"limits\":{}}}",
            b"\x01",
        ],
    },
    Target {
        name: "worker_frames",
        seeds: &[],
        words: &[b"\x06\0\0\0\"done\"", b"\x08\0\0\0\"opened\"", b"\x35\0\0\0{\"failed\":{\"code\":\"CANCELLED\",\"message\":\"\",\"denied\":[]}}"],
    },
    Target { name: "configuration", seeds: &[("examples/config", "agentd.toml")], words: &[b"version = 1\n"] },
    Target { name: "policies", seeds: &[("policies", ".toml")], words: &[] },
    Target { name: "manifests", seeds: &[("examples/config/tools", "tool.toml")], words: &[] },
    Target { name: "replies", seeds: &[], words: &[b"\0{\"protocol\":1,\"call_id\":\"00000000000000000000000000\",\"ok\":true,\"result\":{}}"] },
];

/// libFuzzer's coverage without a sanitizer, as a stable compiler can make it: the programs have no unsafe code to sanitize but
/// what calls the kernel.
const INSTRUMENTED: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
     -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing";

/// Fuzzes all targets, or the named one, for so long in all.
pub(crate) fn run(only: Option<&str>, time: Duration) -> Result<()> {
    let targets: Vec<&Target> = TARGETS.iter().filter(|target| only.is_none_or(|name| name == target.name)).collect();
    if targets.is_empty() {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        bail!("there is no target `{}`; there are {}", only.unwrap_or_default(), names.join(", "));
    }
    let programs = build()?;
    let each = (time.as_secs() / targets.len() as u64).max(1);
    for target in targets {
        let corpus = project::target()?.join("fuzz/corpus").join(target.name);
        let finds = project::target()?.join("fuzz/finds").join(target.name);
        fs::create_dir_all(&corpus).and_then(|()| fs::create_dir_all(&finds))?;
        target.plant(&corpus)?;
        let program = programs.join(target.name);
        let mut fuzz = std::process::Command::new(&program);
        fuzz.arg(&corpus)
            .args([format!("-max_total_time={each}"), format!("-artifact_prefix={}/", finds.display())])
            .args(["-timeout=20", "-rss_limit_mb=2048", "-max_len=16384", "-verbosity=0", "-print_final_stats=1"]);
        println!("fuzzing {} for {each} s", target.name);
        process::run(&mut fuzz).with_context(|| {
            let (finds, program) = (finds.display(), program.display());
            format!("{} has a find below {finds}: `{program} FILE` plays it", target.name)
        })?;
    }
    Ok(())
}

impl Target {
    /// Puts the beginnings into its corpus.
    fn plant(&self, corpus: &Path) -> Result<()> {
        let mut texts: Vec<Vec<u8>> = self.words.iter().map(|word| word.to_vec()).collect();
        for (folder, ending) in self.seeds {
            let folder = project::root().join(folder);
            for file in files(&folder).with_context(|| format!("reading {}", folder.display()))? {
                if file.to_string_lossy().ends_with(ending) {
                    texts.push(fs::read(&file).with_context(|| format!("reading {}", file.display()))?);
                }
            }
        }
        for (number, text) in texts.iter().enumerate() {
            fs::write(corpus.join(format!("seed-{number}")), text)?;
        }
        Ok(())
    }
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.extend(files(&entry.path())?);
        } else {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Builds the programs and returns their folder.
fn build() -> Result<PathBuf> {
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let into = project::target()?.join("fuzz/build");
    // A named target keeps the flags away from what runs while building.
    let mut cargo =
        project::cargo(["build", "--bins", "--manifest-path", "tests/fuzz/Cargo.toml", "--target", &triple]);
    cargo.arg("--target-dir").arg(&into).env("RUSTFLAGS", INSTRUMENTED);
    process::run(&mut cargo)?;
    Ok(into.join(triple).join("debug"))
}
