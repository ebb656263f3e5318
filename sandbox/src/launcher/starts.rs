//! Which calls of a job were started: one append-only file per job, beside its kept grant, where only root reads.
//!
//! A call's line is written before anything of its tool runs for it: before the sandbox is born, or before a process that was
//! started ahead is brought the workspace. So after a crash a call without a line never started, whatever the ledger says of it,
//! and can be run as if it were new. A call with a line may have done anything.
//!
//! Whoever kills the launcher kills the tools with it and leaves the lines: the kernel has them. A power cut takes lines that are
//! not on disk, too. That matters only for a call of which something can outlast the cut: what it sent to a host, or wrote to the
//! workspace directly. The line of such a call is synced before its start. Of every other call nothing is left but a layer that is
//! thrown away, so that it does no harm to run it again for want of its line; its start does not wait for the disk.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::BorrowedFd;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use toolproto::ids::{CallId, JobId};

use super::kept::{DIRECTORY, Durable};

/// The largest file that is read: more calls than any budget allows.
const MAX_FILE: u64 = 16 << 20;

/// Begins a job's file, empty. What makes the grant durable syncs the directory that both lie in.
///
/// # Errors
/// As open(2).
pub fn begin(launcher: BorrowedFd<'_>, job: JobId) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(launcher, file_of(job), flags, Mode::RUSR | Mode::WUSR)?;
    Ok(())
}

/// Notes that a call is about to start. Of a job that has no file, since an earlier version granted it, nothing is noted.
///
/// # Errors
/// As open(2), write(2) and fsync(2): the call must not start then.
pub fn note(launcher: BorrowedFd<'_>, job: JobId, call: CallId, durable: Durable) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = match rustix::fs::openat(launcher, file_of(job), flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    file.write_all(format!("{call}\n").as_bytes())?;
    if durable == Durable::Now {
        file.sync_data()?;
    }
    Ok(())
}

/// Those among some calls of a job that are known never to have started: none where nothing was noted.
///
/// # Errors
/// When the file cannot be read, or holds what was not written into it: then nothing is known.
pub fn never_started(launcher: BorrowedFd<'_>, job: JobId, calls: &[CallId]) -> io::Result<Vec<CallId>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(launcher, file_of(job), flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let mut text = String::new();
    if file.take(MAX_FILE).read_to_string(&mut text)? as u64 == MAX_FILE {
        return Err(io::Error::other("the notes are longer than any job's"));
    }
    // A line without its end is of a call that did not start: writing it had failed, or was cut off.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let started = whole.lines().map(|line| line.parse::<CallId>().map_err(io::Error::other));
    let started = started.collect::<io::Result<Vec<_>>>()?;
    Ok(calls.iter().filter(|call| !started.contains(call)).copied().collect())
}

/// Forgets a job's notes.
///
/// # Errors
/// As unlink(2); what is not there is forgotten already.
pub fn forget(launcher: BorrowedFd<'_>, job: JobId) -> io::Result<()> {
    match rustix::fs::unlinkat(launcher, file_of(job), AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn file_of(job: JobId) -> String {
    format!("{DIRECTORY}/{job}.started")
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    const JOB: JobId = JobId::from_u128(7);

    fn call(number: u128) -> CallId {
        CallId::from_u128(number)
    }

    fn place() -> (tempfile::TempDir, File) {
        let top = tempfile::tempdir().unwrap();
        std::fs::create_dir(top.path().join(DIRECTORY)).unwrap();
        let launcher = File::open(top.path()).unwrap();
        (top, launcher)
    }

    #[test]
    fn a_call_without_a_note_never_started() {
        let (_top, launcher) = place();
        begin(launcher.as_fd(), JOB).unwrap();
        let asked = [call(1), call(2), call(3)];
        assert_eq!(never_started(launcher.as_fd(), JOB, &asked).unwrap(), asked);
        note(launcher.as_fd(), JOB, call(1), Durable::Later).unwrap();
        note(launcher.as_fd(), JOB, call(3), Durable::Now).unwrap();
        note(launcher.as_fd(), JOB, call(3), Durable::Now).unwrap();
        assert_eq!(never_started(launcher.as_fd(), JOB, &asked).unwrap(), [call(2)]);
        forget(launcher.as_fd(), JOB).unwrap();
        forget(launcher.as_fd(), JOB).unwrap();
        assert_eq!(never_started(launcher.as_fd(), JOB, &asked).unwrap(), []);
    }

    #[test]
    fn of_a_job_that_was_granted_before_there_were_notes_nothing_is_known() {
        let (_top, launcher) = place();
        note(launcher.as_fd(), JOB, call(1), Durable::Now).unwrap();
        assert_eq!(never_started(launcher.as_fd(), JOB, &[call(1), call(2)]).unwrap(), []);
    }

    #[test]
    fn a_note_that_is_cut_off_is_of_a_call_that_did_not_start_and_a_damaged_one_says_nothing() {
        let (top, launcher) = place();
        begin(launcher.as_fd(), JOB).unwrap();
        note(launcher.as_fd(), JOB, call(1), Durable::Later).unwrap();
        let path = top.path().join(file_of(JOB));
        let whole = std::fs::read_to_string(&path).unwrap();
        let cut = &call(2).to_string()[..9];
        std::fs::write(&path, format!("{whole}{cut}")).unwrap();
        assert_eq!(never_started(launcher.as_fd(), JOB, &[call(1), call(2)]).unwrap(), [call(2)]);
        for damaged in [format!("{cut}{whole}"), format!("{whole}\0\0\0\0\n")] {
            std::fs::write(&path, &damaged).unwrap();
            assert!(never_started(launcher.as_fd(), JOB, &[call(2)]).is_err(), "{damaged:?}");
        }
    }
}
