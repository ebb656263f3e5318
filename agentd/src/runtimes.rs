//! Whether what tools run on works: tried in a sandbox before the first call, and remembered for a while.
//!
//! ```text
//!   call ──▶ tried, and still the same file, and not too long ago? ──yes──▶ works: go on · broken: TOOL_UNAVAILABLE
//!                      │no
//!                      ▼
//!         one probe; who else calls meanwhile waits for it ──▶ works: for an hour · broken: for half a minute
//! ```
//!
//! Nothing is tried at start, which must be fast, and a call whose runtime is known to work pays for one look at the program's
//! file. A probe leaves no receipt: it is no call of any job.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sandbox::protocol::{EXEC_STEP, LaunchFailure};
use serde_json::json;
use tokio::time::Instant;
use toolproto::api::CallError;
use toolproto::code::Code;
use toolproto::receipt::OutcomeKind;

use crate::call;
use crate::launch::{Ended, Launch, LinkError};

/// How long a probe may take: a cold JVM on a busy host needs some seconds.
const TIME: Duration = Duration::from_secs(20);
/// How long a runtime counts as working. What changes its program is seen at once; this is for what it depends on besides.
const WORKS_FOR: Duration = Duration::from_secs(3600);
/// How long it counts as broken: long enough that a burst of calls does not try it again and again, and short enough that
/// whoever mends something beside the program need not restart agentd.
const BROKEN_FOR: Duration = Duration::from_secs(30);
/// How many characters of a probe's words are shown.
const WORDS: usize = 200;

/// A runtime whose program can be tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// Its name.
    pub name: String,
    /// Its program.
    pub program: PathBuf,
    /// The arguments with which it shows that it works.
    pub probe: Vec<String>,
    /// How to install or configure it.
    pub advice: String,
}

impl Runtime {
    /// A runtime of the catalogue; nothing when there is nothing to be tried.
    #[must_use]
    pub fn of(runtime: &sandbox::catalog::Runtime) -> Option<Self> {
        let program = runtime.command.clone().filter(|_| !runtime.probe.is_empty())?;
        let (name, probe) = (runtime.name.clone(), runtime.probe.clone());
        let configure = format!("set command, mounts and probe in [runtimes.{name}] of agentd.toml");
        let advice = match runtime.install.as_str() {
            "" => configure,
            install => format!("{install}, or {configure}"),
        };
        Some(Self { name, program, probe, advice })
    }
}

/// A runtime, and what its last probe came to.
#[derive(Debug)]
pub struct Probe {
    runtime: Runtime,
    known: Mutex<Option<Known>>,
    /// Held by whoever tries it. One who gives up leaves the turn to the next.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Clone, Debug)]
struct Known {
    file: Option<FileIdentity>,
    until: Instant,
    found: Found,
}

/// What a probe says of its runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Found {
    /// It works, and this is what it says of its version.
    Works(String),
    /// It does not.
    Broken(String),
}

/// Which file a program is. Another one has another identity, and so has one that was written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileIdentity {
    /// Of what a path leads to; nothing where agentd cannot look.
    fn of(program: &Path) -> Option<Self> {
        let found = std::fs::metadata(program).ok()?;
        Some(Self {
            device: found.dev(),
            inode: found.ino(),
            bytes: found.size(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }
}

impl Probe {
    /// A runtime that nobody has tried yet.
    #[must_use]
    pub const fn new(runtime: Runtime) -> Self {
        Self { runtime, known: Mutex::new(None), turn: tokio::sync::Mutex::const_new(()) }
    }

    /// The runtime.
    #[must_use]
    pub const fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// What the runtime said of its version, once it is known to work.
    #[must_use]
    pub fn version(&self) -> Option<String> {
        match self.known().as_ref()?.found.clone() {
            Found::Works(version) => Some(version),
            Found::Broken(_) => None,
        }
    }

    /// Makes sure that the runtime works: by what is remembered, else by trying it.
    ///
    /// # Errors
    /// When the launcher cannot be spoken with. The failure of calls on a runtime that does not work is no error.
    pub async fn check<L: Launch>(&self, launch: &L) -> Result<Result<(), CallError>, LinkError> {
        if let Some(found) = self.remembered() {
            return Ok(self.judgement(found));
        }
        let _turn = self.turn.lock().await;
        // Somebody else may have tried it meanwhile.
        if let Some(found) = self.remembered() {
            return Ok(self.judgement(found));
        }
        // Looked at before it is tried: what is put in its place meanwhile is tried anew.
        let file = FileIdentity::of(&self.runtime.program);
        let ended = launch.probe(self.runtime.name.clone(), TIME).await?;
        let Some(found) = found(&ended) else {
            // The call meets the same, and says so better.
            tracing::debug!(runtime = self.runtime.name, failure = ?ended.failure, "a runtime could not be tried");
            return Ok(Ok(()));
        };
        let lifetime = match &found {
            Found::Works(version) => {
                tracing::info!(runtime = self.runtime.name, version, "the runtime works");
                WORKS_FOR
            }
            Found::Broken(reason) => {
                tracing::warn!(runtime = self.runtime.name, reason, "the runtime does not work");
                BROKEN_FOR
            }
        };
        *self.known() = Some(Known { file, until: Instant::now() + lifetime, found: found.clone() });
        Ok(self.judgement(found))
    }

    /// What is known, if it still counts.
    fn remembered(&self) -> Option<Found> {
        let known = self.known().clone()?;
        let counts = Instant::now() < known.until && known.file == FileIdentity::of(&self.runtime.program);
        counts.then_some(known.found)
    }

    fn judgement(&self, found: Found) -> Result<(), CallError> {
        let Found::Broken(reason) = found else { return Ok(()) };
        let Runtime { name, program, probe, advice } = &self.runtime;
        let command = [program.display().to_string()].iter().chain(probe).cloned().collect::<Vec<_>>().join(" ");
        let message = format!("runtime `{name}` does not work: its probe `{command}` {reason}; {advice}");
        Err(call::failure(Code::ToolUnavailable, message, json!({"runtime": name})))
    }

    /// What a panic under the lock leaves is still what was known.
    fn known(&self) -> MutexGuard<'_, Option<Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a probe's end says of the runtime; nothing where it is the host's, not the runtime's, that it did not run.
fn found(ended: &Ended) -> Option<Found> {
    let stdout = String::from_utf8_lossy(&ended.stdout);
    // A JVM tells its version on stderr.
    let said = || [stdout.as_ref(), &ended.stderr_tail].into_iter().find_map(words);
    let with_words = |how: String| {
        let words = [ended.stderr_tail.as_str(), &stdout].into_iter().find_map(words);
        Found::Broken(words.map_or_else(|| how.clone(), |words| format!("{how}: {words}")))
    };
    if let Some(LaunchFailure { step, message, .. }) = &ended.failure {
        return (step == EXEC_STEP).then(|| Found::Broken(format!("could not be executed: {message}")));
    }
    let outcome = &ended.outcome;
    Some(match (outcome.kind, outcome.exit_status, outcome.signal) {
        (OutcomeKind::Exited, Some(0), _) => Found::Works(said().unwrap_or_else(|| "unknown version".to_owned())),
        (OutcomeKind::Exited, status, _) => with_words(format!("ended with status {}", status.unwrap_or(-1))),
        (OutcomeKind::Signalled, _, signal) => with_words(format!("was ended by signal {}", signal.unwrap_or(0))),
        (OutcomeKind::TimedOut, ..) => with_words(format!("did not end within {} s", TIME.as_secs())),
        (OutcomeKind::OutOfMemory, ..) => with_words("reached its memory limit".to_owned()),
        (OutcomeKind::Cancelled | OutcomeKind::Interrupted | OutcomeKind::LaunchFailed | OutcomeKind::Refused, ..) => {
            return None;
        }
    })
}

/// The first line that says something, made fit to be shown.
fn words(text: &str) -> Option<String> {
    let line = text.lines().map(str::trim).find(|line| !line.is_empty())?;
    Some(line.chars().filter(|one| !one.is_control()).take(WORDS).collect())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use serde_json::Value;

    use super::*;
    use crate::scripted::{Behaviour, ScriptedLaunch};

    struct Stage {
        folder: tempfile::TempDir,
        launch: Arc<ScriptedLaunch>,
        probe: Probe,
    }

    impl Stage {
        fn new(behaviour: Behaviour) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let program = folder.path().join("bun");
            fs::write(&program, "one").unwrap();
            let (name, probe) = ("bun".to_owned(), vec!["--version".to_owned()]);
            let runtime = Runtime { name, program, probe, advice: "install it from npm".to_owned() };
            let stage = Self { folder, launch: ScriptedLaunch::new(&[]), probe: Probe::new(runtime) };
            stage.now(behaviour);
            stage
        }

        fn now(&self, behaviour: Behaviour) {
            self.launch.log.lock().unwrap().runtime = Some(behaviour);
        }

        fn replace(&self, text: &str) {
            let new = self.folder.path().join("new");
            fs::write(&new, text).unwrap();
            fs::rename(&new, &self.probe.runtime.program).unwrap();
        }

        async fn check(&self) -> Result<(), String> {
            self.probe.check(&self.launch).await.unwrap().map_err(|error| {
                assert_eq!(error.code, Code::ToolUnavailable);
                error.message
            })
        }

        fn probed(&self) -> usize {
            self.launch.log.lock().unwrap().probed
        }
    }

    fn works() -> Behaviour {
        Behaviour::Answers(Value::from("\n1.3.0 \u{7}\nmore"), Duration::from_secs(1))
    }

    #[tokio::test(start_paused = true)]
    async fn a_working_runtime_is_tried_once_an_hour() {
        let stage = Stage::new(works());
        assert_eq!(stage.probe.version(), None, "it was tried before it was needed");
        for _ in 0..3 {
            stage.check().await.unwrap();
        }
        assert_eq!((stage.probed(), stage.probe.version().as_deref()), (1, Some("1.3.0 ")));
        tokio::time::advance(WORKS_FOR - Duration::from_secs(1)).await;
        stage.check().await.unwrap();
        assert_eq!(stage.probed(), 1);
        tokio::time::advance(Duration::from_secs(1)).await;
        stage.now(Behaviour::Fails("gone"));
        assert!(stage.check().await.is_err());
        assert_eq!((stage.probed(), stage.probe.version()), (2, None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_broken_one_is_tried_again_sooner_and_says_what_to_do() {
        let stage = Stage::new(Behaviour::Fails("no licence"));
        for _ in 0..3 {
            let message = stage.check().await.unwrap_err();
            let expected = "/bun --version` ended with status 1: no licence; install it from npm";
            assert!(message.starts_with("runtime `bun` does not work") && message.ends_with(expected), "{message}");
        }
        assert_eq!(stage.probed(), 1);
        tokio::time::advance(BROKEN_FOR).await;
        stage.now(works());
        stage.check().await.unwrap();
        assert_eq!(stage.probed(), 2);
        tokio::time::advance(WORKS_FOR).await;
        stage.now(Behaviour::Hangs);
        let message = stage.check().await.unwrap_err();
        assert!(message.contains("did not end within 20 s"), "{message}");
    }

    #[tokio::test(start_paused = true)]
    async fn another_program_is_tried_at_once() {
        let stage = Stage::new(Behaviour::Fails("no licence"));
        stage.check().await.unwrap_err();
        stage.now(works());
        stage.replace("two");
        stage.check().await.unwrap();
        stage.check().await.unwrap();
        assert_eq!(stage.probed(), 2);
        fs::remove_file(&stage.probe.runtime.program).unwrap();
        stage.check().await.unwrap();
        assert_eq!(stage.probed(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn all_who_call_at_once_wait_for_one_probe() {
        let stage = Stage::new(works());
        let mut first = Box::pin(stage.check());
        // Who tries it goes away in the middle; the next one takes the turn, and the others have its answer.
        assert!(tokio::time::timeout(Duration::from_millis(500), &mut first).await.is_err());
        let others = futures_util::future::join_all((0..5).map(|_| stage.check()));
        let gone = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            drop(first);
        };
        let (checked, ()) = tokio::join!(others, gone);
        assert!(checked.iter().all(Result::is_ok), "{checked:?}");
        assert_eq!(stage.probed(), 2);
    }

    #[test]
    fn what_is_the_hosts_fault_says_nothing_of_the_runtime() {
        let ended = |kind, failure: Option<(&str, &str)>| Ended {
            outcome: toolproto::receipt::Outcome { kind, code: None, exit_status: None, signal: Some(9) },
            failure: failure.map(|(step, message)| LaunchFailure {
                code: Code::LaunchFailed,
                step: step.to_owned(),
                errno: None,
                message: message.to_owned(),
            }),
            stdout: Vec::new(),
            stdout_overflowed: false,
            stderr_tail: String::new(),
            usage: toolproto::receipt::Usage::default(),
            denied: Vec::new(),
            network: None,
        };
        assert_eq!(found(&ended(OutcomeKind::LaunchFailed, Some(("prepare", "every uid is in use")))), None);
        assert_eq!(found(&ended(OutcomeKind::Cancelled, None)), None);
        for (broken, words) in [
            (
                ended(OutcomeKind::LaunchFailed, Some((EXEC_STEP, "no such file"))),
                "could not be executed: no such file",
            ),
            (ended(OutcomeKind::Signalled, None), "was ended by signal 9"),
            (ended(OutcomeKind::OutOfMemory, None), "reached its memory limit"),
        ] {
            assert_eq!(found(&broken), Some(Found::Broken(words.to_owned())));
        }
    }
}
