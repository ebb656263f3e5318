//! Narrowing never allows more: random policies and random narrowings of them, tried by the probe in real sandboxes. What the
//! wider one refuses, the narrower one refuses.
//!
//! A failure names its seed; `AGENTD_TEST_SEED` plays it again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use agentd_tests::daemon::Daemon;
use agentd_tests::outside::Outside;
use agentd_tests::site::{Site, ToolText, chmod};
use agentd_tests::{needs, programs, requirement};
use serde_json::{Value, json};
use toml::{Table, Value as Toml};

/// How many pairs are tried.
const PAIRS: usize = 4;
/// System calls that no shipped policy allows, and that do no harm by an unprivileged process.
const CALLS: [&str; 14] = [
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "kcmp",
    "keyctl",
    "add_key",
    "request_key",
    "userfaultfd",
    "io_uring_setup",
    "perf_event_open",
    "bpf",
    "syslog",
    "name_to_handle_at",
    "memfd_secret",
];
/// Paths that can be shown whole, besides what the host's secret lies in.
const SHOWN: [&str; 4] = ["/home", "/opt", "/srv", "/var/lib/dpkg"];
/// Paths below what strict shows that can be hidden, without which the probe itself still runs.
const HIDDEN: [&str; 4] = ["/usr/share", "/usr/bin/python3", "/usr/bin/env", "/usr/include"];
/// What no program runs without.
const KEPT: [&str; 3] = ["@base", "@files", "@processes"];
/// The hosts that a tool may list.
const HOSTS: [&str; 3] = ["web.test", "inner.test", "meta.test"];

/// A deterministic sequence (SplitMix64).
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn one_in(&mut self, sides: u64) -> bool {
        self.next().is_multiple_of(sides)
    }

    fn below(&mut self, most: u64) -> u64 {
        self.next() % most
    }

    fn some_of<T: Clone>(&mut self, all: &[T]) -> Vec<T> {
        all.iter().filter(|_| self.one_in(2)).cloned().collect()
    }
}

/// A policy and what a tool's manifest narrows it by.
#[derive(Clone, Debug, PartialEq)]
struct Rules {
    /// 0 read_only, 1 overlay, 2 direct.
    workspace: u64,
    loopback: bool,
    hosts: Vec<&'static str>,
    shown: Vec<String>,
    hidden: Vec<&'static str>,
    groups: Vec<String>,
    calls: Vec<&'static str>,
    /// Of /tmp and /dev/shm, in MiB, and processes.
    tmp: u64,
    shm: u64,
    pids: u64,
    declares_read_only: bool,
    own_pids: Option<u64>,
}

impl Rules {
    fn random(dice: &mut Dice, secret: &Path, strict: &Table) -> Self {
        let pool: Vec<String> = strings(strict, "path", "path").into_iter().collect();
        let mut shown: Vec<String> = pool.into_iter().filter(|path| is_needed(path) || !dice.one_in(4)).collect();
        shown.extend(dice.some_of(&SHOWN).into_iter().map(str::to_owned));
        if !dice.one_in(3) {
            shown.push(secret.display().to_string());
        }
        Self {
            workspace: dice.below(3),
            loopback: dice.one_in(2),
            hosts: dice.some_of(&HOSTS),
            shown,
            hidden: dice.some_of(&HIDDEN[..2]),
            groups: KEPT.iter().chain(&dice.some_of(&["@ipc", "@sockets"])).map(|group| (*group).to_owned()).collect(),
            calls: dice.some_of(&CALLS),
            tmp: 32 + dice.below(64),
            shm: 32 + dice.below(64),
            pids: 100 + dice.below(100),
            declares_read_only: false,
            own_pids: None,
        }
    }

    /// One that allows no more: by the policy, by the manifest, or by both.
    fn narrowed(&self, dice: &mut Dice) -> Self {
        let mut narrower = self.clone();
        if !dice.one_in(4) {
            narrower.workspace = dice.below(self.workspace + 1);
            narrower.loopback &= dice.one_in(2);
            narrower.shown.retain(|path| is_needed(path) || dice.one_in(2));
            narrower.hidden.extend(HIDDEN.iter().filter(|path| !self.hidden.contains(*path) && dice.one_in(3)));
            narrower.groups.retain(|group| KEPT.contains(&group.as_str()) || dice.one_in(2));
            narrower.calls.retain(|_| dice.one_in(2));
            narrower.tmp -= dice.below(16);
            narrower.shm -= dice.below(16);
            narrower.pids -= dice.below(32);
        }
        if !dice.one_in(4) {
            narrower.hosts.retain(|_| dice.one_in(2));
            narrower.declares_read_only = dice.one_in(2);
            narrower.own_pids = dice.one_in(2).then(|| 64 + dice.below(32));
        }
        narrower
    }

    fn policy(&self, name: &str, strict: &Table, listed: &str) -> String {
        let mut text = format!(
            "version = 1\nname = \"{name}\"\nworkspace = \"{}\"\nnetwork = \"listed\"\nloopback = {}\nnetwork_allow = [\"*:*\", \"{listed}\"]\n",
            ["read_only", "overlay", "direct"][usize::try_from(self.workspace).unwrap()],
            self.loopback,
        );
        let mut rule = |table: &str, body: String| write!(text, "[[{table}]]\n{body}\nwhy = \"x\"\n").unwrap();
        for path in &self.shown {
            rule("path", format!("path = \"{path}\"\naccess = \"read\""));
        }
        for path in &self.hidden {
            rule("path", format!("path = \"{path}\"\naccess = \"hide\""));
        }
        for call in self.groups.iter().map(String::as_str).chain(self.calls.iter().copied()).collect::<BTreeSet<_>>() {
            rule("syscall", format!("allow = [\"{call}\"]"));
        }
        let (tmp, shm, pids) = (self.tmp, self.shm, self.pids);
        write!(text, "[limits]\nwhy = \"x\"\npids = {pids}\ntmp = \"{tmp}MiB\"\nshm = \"{shm}MiB\"\n").unwrap();
        let required = Table::from_iter([("require".to_owned(), strict["require"].clone())]);
        text + &toml::to_string(&required).unwrap()
    }

    fn manifest(&self, policy: &str, port: u16) -> String {
        let hosts: Vec<String> = self.hosts.iter().map(|host| format!("{host}:{port}")).collect();
        let mut text = format!(
            "[timeout]\nafter = \"300s\"\n[breaker]\nmin_calls = 1000\nwindow = 1000\n[sandbox]\npolicy = \"{policy}\"\nhosts = {hosts:?}\n"
        );
        if self.declares_read_only {
            text += "[execution]\nread_only = true\n";
        }
        if let Some(pids) = self.own_pids {
            write!(text, "[limits]\npids = {pids}\n").unwrap();
        }
        text
    }
}

/// Without these the probe's program itself would not start.
fn is_needed(path: &str) -> bool {
    ["/usr", "/bin", "/sbin"].contains(&path) || path.starts_with("/lib") || path.contains("ld.so")
}

fn strings(table: &Table, list: &str, field: &str) -> BTreeSet<String> {
    let entries = table[list].as_array().unwrap().iter();
    entries.filter_map(|entry| Some(entry.get(field).and_then(Toml::as_str)?.to_owned())).collect()
}

/// A file of the host that everybody may read, at a place that a policy can name. It goes with this value.
struct Secret(PathBuf);

impl Secret {
    fn new(site: &Site) -> Self {
        let folder = Path::new("/var/lib").join(site.folder().file_name().unwrap());
        fs::create_dir(&folder).unwrap();
        chmod(&folder, 0o755);
        fs::write(folder.join("secret"), "the host's secret").unwrap();
        Self(folder)
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What comes of each attempt under these rules, by its name.
fn tried(daemon: &Daemon<'_>, name: &str, outside: &Outside) -> BTreeMap<String, String> {
    let site = daemon.site();
    let workspace = site.workspace(name, 0, 0);
    fs::write(workspace.join("readable"), "x").unwrap();
    symlink(&outside.facts["secret"], workspace.join("planted")).unwrap();
    let body = json!({"version": 1, "tool": name, "arguments": {"facts": outside.facts}, "workspace": workspace});
    let reply = daemon.post("/v1/calls", &body).json();
    let lines = reply["result"]["lines"].as_array().unwrap_or_else(|| panic!("{reply}\n{}", daemon.log()));
    let word = |line: &Value, field: &str| line[field].as_str().unwrap().to_owned();
    lines.iter().map(|line| (word(line, "name"), word(line, "outcome"))).collect()
}

fn seed() -> u64 {
    match std::env::var("AGENTD_TEST_SEED") {
        Ok(given) => given.parse().expect("AGENTD_TEST_SEED is a number"),
        Err(_) => {
            u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() % 1_000_000_007).unwrap()
        }
    }
}

#[test]
fn what_the_wider_policy_refuses_the_narrower_refuses() {
    needs!(requirement::root());
    let seed = seed();
    println!("AGENTD_TEST_SEED={seed}");
    let mut dice = Dice(seed);
    let site = Site::new();
    let secret = Secret::new(&site);
    let mut outside = Outside::new(&site);
    outside.facts.insert("secret".to_owned(), secret.0.join("secret").display().to_string());
    site.configure(
        "[network.hosts]\n\"web.test\" = [\"127.0.0.1\"]\n\"inner.test\" = [\"10.1.2.3\"]\n\"meta.test\" = [\"169.254.169.254\"]\n",
    );
    let strict: Table = toml::from_str(include_str!("../../policies/strict.toml")).unwrap();
    let mut pairs = Vec::new();
    for number in 0..PAIRS {
        let wider = Rules::random(&mut dice, &secret.0, &strict);
        let narrower = wider.narrowed(&mut dice);
        let names = [format!("wider{number}"), format!("narrower{number}")];
        for (name, rules) in names.iter().zip([&wider, &narrower]) {
            let policy = rules.policy(name, &strict, &outside.listed.rule());
            site.write(&format!("policies/{name}.toml"), policy.as_bytes());
            let manifest = rules.manifest(name, outside.listed.port());
            let code = b"#!/bin/sh\nexec /tool/probe serve\n";
            site.tool(&ToolText { name, runtime: "exec", entry: "run", code, manifest: &manifest });
            programs::copy(&programs::find("probe"), &site.path(&format!("config/tools/{name}/probe")));
        }
        pairs.push((names, wider, narrower));
    }
    let daemon = Daemon::start_with(&site, &["--limits", "best-effort"]);
    let mut taken = BTreeSet::new();
    for ([wide, narrow], wider, narrower) in &pairs {
        let (before, after) = (tried(&daemon, wide, &outside), tried(&daemon, narrow, &outside));
        let of = |outcome: &str, seen: &BTreeMap<String, String>| {
            seen.iter().filter(|(_, one)| *one == outcome).map(|(name, _)| name.clone()).collect::<BTreeSet<_>>()
        };
        let (refused, allowed) = (of("refused", &before), of("allowed", &after));
        let more: Vec<&String> = refused.intersection(&allowed).collect();
        assert!(more.is_empty(), "AGENTD_TEST_SEED={seed}: {more:?}\nwider: {wider:#?}\nnarrower: {narrower:#?}");
        assert!(refused.len() >= 100, "only {} attempts were refused: {before:?}", refused.len());
        taken.extend(of("allowed", &before).difference(&allowed).cloned());
    }
    // Narrowings that take nothing away would prove nothing.
    assert!(taken.len() >= 3, "AGENTD_TEST_SEED={seed}: only {taken:?} was taken away by {PAIRS} narrowings");
    println!("taken away: {taken:?}");
    daemon.stop();
}
