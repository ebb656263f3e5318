//! The tree digest, computed a second time: by a Python script that was written from docs/receipts.md alone.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use sandbox::workspace::scan::{TreeLimits, scan};

const BLAKE3: &str = "blake3==1.0.11";

#[derive(Clone, Debug)]
enum Entry {
    File(Vec<u8>, u32),
    Link(Vec<u8>),
    Directory(Vec<(Vec<u8>, Entry)>, u32),
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop_oneof![4 => b'a'..b'd', 1 => any::<u8>()], 1..12)
        .prop_map(|name| name.into_iter().map(|byte| if byte == 0 || byte == b'/' { b'_' } else { byte }).collect())
        .prop_filter("neither . nor ..", |name: &Vec<u8>| name != b"." && name != b"..")
}

fn mode() -> impl Strategy<Value = u32> {
    (0o700u32..0o7777).prop_map(|mode| mode | 0o700)
}

fn tree() -> impl Strategy<Value = Entry> {
    let leaf = prop_oneof![
        (prop::collection::vec(any::<u8>(), 0..3000), mode()).prop_map(|(content, mode)| Entry::File(content, mode)),
        name().prop_map(Entry::Link),
    ];
    let any = leaf.prop_recursive(4, 60, 8, |inner| {
        (prop::collection::vec((name(), inner), 0..8), mode())
            .prop_map(|(entries, mode)| Entry::Directory(entries, mode))
    });
    (prop::collection::vec((name(), any), 0..10), mode()).prop_map(|(entries, mode)| Entry::Directory(entries, mode))
}

/// A second entry of the same name is left out.
fn make(path: &Path, entry: &Entry) {
    if fs::symlink_metadata(path).is_ok() {
        return;
    }
    let mode = match entry {
        Entry::Link(target) => return symlink(OsStr::from_bytes(target), path).unwrap(),
        Entry::File(content, mode) => {
            fs::write(path, content).unwrap();
            mode
        }
        Entry::Directory(entries, mode) => {
            fs::create_dir(path).unwrap();
            entries.iter().for_each(|(name, entry)| make(&path.join(OsStr::from_bytes(name)), entry));
            mode
        }
    };
    fs::set_permissions(path, Permissions::from_mode(*mode)).unwrap();
}

fn has_blake3(python: &Path) -> bool {
    Command::new(python).args(["-c", "import blake3"]).output().is_ok_and(|output| output.status.success())
}

/// A Python that has the `blake3` package, from the system or from an environment of the tests' own.
fn python() -> Result<PathBuf, String> {
    let system = PathBuf::from("/usr/bin/python3");
    let environment = Path::new(env!("CARGO_TARGET_TMPDIR")).join("blake3-python");
    let own = environment.join("bin/python3");
    if let Some(found) = [&system, &own].into_iter().find(|python| has_blake3(python)) {
        return Ok(found.clone());
    }
    let run = |command: &mut Command| match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Err(error.to_string()),
    };
    run(Command::new(&system).args(["-m", "venv"]).arg(&environment))?;
    run(Command::new(&own).args(["-m", "pip", "install", "--quiet", BLAKE3]))?;
    Ok(own)
}

#[test]
fn a_second_implementation_agrees_on_random_trees() {
    let python = match python() {
        Ok(python) => python,
        Err(reason) => {
            assert_ne!(std::env::var_os("AGENTD_TEST_MUST_RUN").as_deref(), Some(OsStr::new("1")), "{reason}");
            println!("skipped: no Python with the package {BLAKE3}: {reason}");
            return;
        }
    };
    let dir = tempfile::tempdir().unwrap();
    let mut runner = TestRunner::deterministic();
    let trees: Vec<PathBuf> = (0..200).map(|index| dir.path().join(format!("tree{index}"))).collect();
    for path in &trees {
        make(path, &tree().new_tree(&mut runner).unwrap().current());
    }
    // One that is large enough for several threads.
    let large = dir.path().join("large");
    for number in 0..3000 {
        let directory = large.join(format!("{}/{}", number / 500, number / 50));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join(number.to_string()), number.to_string()).unwrap();
    }
    let trees = [trees, vec![large]].concat();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/second_opinion/tree_digest.py");
    let output = Command::new(python).arg(script).args(&trees).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let second: Vec<String> = String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
    let first: Vec<String> = trees
        .iter()
        .map(|path| scan(File::open(path).unwrap().as_fd(), &TreeLimits::default()).unwrap().digest().to_string())
        .collect();
    assert_eq!(first, second);
}
