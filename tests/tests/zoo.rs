//! Misbehaving tools against a real daemon: each call ends with its code, in time, and leaves the daemon as it was.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use agentd_tests::daemon::Daemon;
use agentd_tests::site::{Site, ToolText};
use agentd_tests::zoo::{ANIMALS, Animal, Ends, PYTHON_PREAMBLE};
use agentd_tests::{needs, programs, requirement};
use serde_json::{Value, json};

/// What a call may take beyond its deadline: the grace, and what a busy machine adds.
const BEYOND: Duration = Duration::from_secs(10);
/// What the daemon may grow by: the largest answers, several at a time, and what the allocator keeps.
const GROWTH: u64 = 64 << 20;

fn add(site: &Site, animal: &Animal) {
    let code = match animal.runtime {
        "python" => format!("{PYTHON_PREAMBLE}\n{}\n", animal.program),
        _ => animal.program.to_owned(),
    };
    let entry = match animal.runtime {
        "python" => "main.py",
        "node" | "bun" => "main.js",
        _ => "main",
    };
    // Enough processes for those that fork, too few to hurt the host; a breaker that never opens, since each is called often.
    let manifest = format!(
        "[timeout]\nafter = \"{}ms\"\n\n[limits]\npids = 64\nmemory = \"512MiB\"\n\n[breaker]\nmin_calls = 1000\nwindow = 1000\n",
        animal.deadline_ms
    );
    site.tool(&ToolText {
        name: animal.name,
        runtime: animal.runtime,
        entry,
        code: code.as_bytes(),
        manifest: &manifest,
    });
}

/// Puts the Bun that `cargo ci` fetched where the site's sandboxes see it.
fn bun(site: &Site) -> Result<(), String> {
    if requirement::program("/usr/local/bin/bun").is_ok() {
        return Ok(());
    }
    let fetched = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../tools");
    let versions = fs::read_dir(fetched).into_iter().flatten().flatten();
    let found = versions.map(|version| version.path().join("bun")).find(|program| program.is_file());
    let program = found.ok_or("Bun is not there; `cargo ci` fetches it")?;
    let copy = site.path("bun");
    programs::copy(&program, &copy);
    site.configure(&format!("[runtimes.bun]\ncommand = \"{}\"\n", copy.display()));
    Ok(())
}

/// What is wrong with how a call of the animal ended.
fn fault(animal: &Animal, answer: &Value, took: Duration) -> Option<String> {
    let code = answer["error"]["code"].as_str();
    let message = answer["error"]["message"].as_str().unwrap_or_default();
    let is_expected = match animal.ends {
        Ends::Well => answer["ok"] == json!(true),
        Ends::With(expected, part) => code == Some(expected.as_str()) && message.contains(part),
        Ends::WithOneOf(expected) => expected.iter().any(|one| code == Some(one.as_str())),
    };
    if !is_expected {
        return Some(format!("{}: expected {:?}, got {answer:#}", animal.name, animal.ends));
    }
    let limit = Duration::from_millis(animal.deadline_ms) + BEYOND;
    (took > limit).then(|| format!("{}: took {took:?}, more than {limit:?}", animal.name))
}

fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn every_animal_gets_its_code_in_time() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let site = Site::new();
    let bun = bun(&site);
    let mut animals = Vec::new();
    for animal in ANIMALS {
        let runtime = match animal.runtime {
            "node" => requirement::program("/usr/bin/node"),
            "bun" => bun.clone(),
            _ => Ok(()),
        };
        match runtime {
            Ok(()) => animals.push(animal),
            Err(reason) => requirement::skip(&format!("{}: {reason}", animal.name)),
        }
    }
    assert!(animals.len() >= 40, "the zoo has {} animals", animals.len());

    animals.iter().for_each(|animal| add(&site, animal));
    let daemon = Daemon::start(&site);
    let pid = daemon.agentd_pid();
    // What the first calls allocate for good is not growth.
    for _ in 0..3 {
        daemon.call("ten_megabytes", &json!({}));
    }
    let before = resident(pid);

    let (next, faults) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while let Some(animal) = animals.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let start = Instant::now();
                    let answer = daemon.call(animal.name, &json!({}));
                    faults.lock().unwrap().extend(fault(animal, &answer, start.elapsed()));
                }
            });
        }
    });
    let faults = faults.into_inner().unwrap();
    assert!(faults.is_empty(), "{} animals:\n{}", faults.len(), faults.join("\n"));

    let grown = resident(pid).saturating_sub(before);
    assert!(grown < GROWTH, "the daemon grew by {} MiB", grown >> 20);
    assert_eq!(daemon.get("/v1/health").status, 200);
    daemon.stop();
}

#[test]
fn animals_have_names_of_their_own() {
    let names: BTreeSet<&str> = ANIMALS.iter().map(|animal| animal.name).collect();
    assert_eq!(names.len(), ANIMALS.len());
}
