//! What a worker gives up before it reads a file: root's rights first, then, with the workspace open, everything outside it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;

use caps::CapSet;
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, Compatible as _, PathBeneath, Ruleset, RulesetAttr as _,
    RulesetCreatedAttr as _, RulesetStatus, Scope,
};
use nix::sys::signal::SigSet;
use nix::unistd::{Gid, Uid};
use rustix::process::{DumpableBehavior, Pid, Resource, Rlimit};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

use super::Credentials;
use crate::privileges;

/// A worker that could not be confined; it ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConfineError {
    #[error("failed to {step}")]
    Step {
        step: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("failed to drop capabilities")]
    Capabilities(#[from] caps::errors::CapsError),
    #[error("capabilities are left after they were dropped")]
    CapabilitiesLeft,
    #[error("failed to bind the worker to the launcher's life")]
    Bind(#[source] io::Error),
    #[error("failed to restrict the worker by Landlock")]
    Landlock(#[from] landlock::RulesetError),
    #[error("failed to restrict the worker by seccomp")]
    Seccomp(#[from] seccompiler::Error),
    #[error("failed to build the worker's seccomp filter")]
    Filter(#[from] seccompiler::BackendError),
}

/// Above the deepest tree that is read, by a factor.
const OPEN_FILES: u64 = 8192;

/// Becomes the caller, for good: no capability is left, not even when the caller is root.
pub(super) fn become_caller(credentials: &Credentials, parent: Pid) -> Result<(), ConfineError> {
    // Only SIGKILL, SIGSTOP and the launcher end or stop a worker; a service manager's SIGTERM to the whole unit does not.
    SigSet::all().thread_set_mask().map_err(step("block signals"))?;
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(Resource::Core, none).map_err(step("forbid core dumps"))?;
    // One per directory level while a call's layer is cleaned.
    let files = Rlimit { current: Some(OPEN_FILES), maximum: Some(OPEN_FILES) };
    rustix::process::setrlimit(Resource::Nofile, files).map_err(step("limit open files"))?;
    rustix::process::umask(rustix::fs::Mode::empty());
    caps::clear(None, CapSet::Ambient)?;
    caps::clear(None, CapSet::Bounding)?;
    let groups: Vec<Gid> = credentials.groups.iter().copied().map(Gid::from_raw).collect();
    let (uid, gid) = (Uid::from_raw(credentials.uid), Gid::from_raw(credentials.gid));
    nix::unistd::setgroups(&groups).map_err(step("set the groups"))?;
    nix::unistd::setresgid(gid, gid, gid).map_err(step("set the gid"))?;
    nix::unistd::setresuid(uid, uid, uid).map_err(step("set the uid"))?;
    caps::clear(None, CapSet::Effective)?;
    caps::clear(None, CapSet::Permitted)?;
    caps::clear(None, CapSet::Inheritable)?;
    for set in [CapSet::Effective, CapSet::Permitted, CapSet::Inheritable, CapSet::Ambient, CapSet::Bounding] {
        if !caps::read(None, set)?.is_empty() {
            return Err(ConfineError::CapabilitiesLeft);
        }
    }
    rustix::thread::set_no_new_privs(true).map_err(step("set no_new_privs"))?;
    // Changing ids has cleared both of these.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(step("become undumpable"))?;
    privileges::die_with(parent).map_err(ConfineError::Bind)
}

/// Leaves only what lies beneath the workspace and the staging directory, and the syscalls that work on them takes. Yields
/// whether Landlock, which the kernel may lack, is in force; seccomp always is.
pub(super) fn restrict(workspace: BorrowedFd<'_>, staging: Option<BorrowedFd<'_>>) -> Result<bool, ConfineError> {
    let abi = ABI::V7;
    let allowed = AccessFs::ReadFile
        | AccessFs::ReadDir
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::RemoveFile
        | AccessFs::RemoveDir
        | AccessFs::MakeReg
        | AccessFs::MakeDir
        | AccessFs::MakeSym
        | AccessFs::MakeFifo
        | AccessFs::MakeSock
        | AccessFs::Refer;
    let beneath = [Some(workspace), staging].into_iter().flatten().map(|dir| Ok(PathBeneath::new(dir, allowed)));
    let status = Ruleset::default()
        .set_compatibility(landlock::CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?
        .add_rules(beneath.map(|rule: Result<_, landlock::RulesetError>| rule))?
        .restrict_self()?;
    seccompiler::apply_filter(&filter()?)?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

/// An allow-list; everything else is ENOSYS, so that the C library falls back where it can.
fn filter() -> Result<BpfProgram, ConfineError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = ALLOWED.iter().map(|number| (*number, Vec::new())).collect();
    // Threads of the worker's own, for reading a large tree, and no processes.
    let thread = SeccompCondition::new(
        0,
        SeccompCmpArgLen::Qword,
        SeccompCmpOp::MaskedEq(libc::CLONE_THREAD.unsigned_abs().into()),
        libc::CLONE_THREAD.unsigned_abs().into(),
    )?;
    rules.insert(libc::SYS_clone, vec![SeccompRule::new(vec![thread])?]);
    let unknown = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    let filter = SeccompFilter::new(rules, unknown, SeccompAction::Allow, std::env::consts::ARCH.try_into()?)?;
    Ok(filter.try_into()?)
}

const ALLOWED: &[i64] = &[
    // Files, by descriptor.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_getdents64,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_rm_watch,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_readlinkat,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_syncfs,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_renameat2,
    libc::SYS_unlinkat,
    libc::SYS_mkdirat,
    libc::SYS_symlinkat,
    libc::SYS_linkat,
    libc::SYS_fgetxattr,
    libc::SYS_flistxattr,
    libc::SYS_fsetxattr,
    libc::SYS_fremovexattr,
    libc::SYS_lgetxattr,
    libc::SYS_llistxattr,
    libc::SYS_lsetxattr,
    libc::SYS_lremovexattr,
    // The socket to the launcher.
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_ppoll,
    // Memory, threads, time and the end.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_geteuid,
    libc::SYS_tgkill,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_getrandom,
    libc::SYS_prctl,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

fn step<E: Into<io::Error>>(step: &'static str) -> impl Fn(E) -> ConfineError {
    move |error| ConfineError::Step { step, source: error.into() }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;

    use rustix::process::{WaitId, WaitIdOptions};

    use super::*;
    use crate::sys::worker_process::fork_running;

    /// Runs `attempt` in a confined process; yields its exit status.
    fn confined(uid: u32, workspace: &std::path::Path, attempt: impl FnOnce() -> i32) -> Option<i32> {
        let parent = rustix::process::getpid();
        let credentials = Credentials { uid, gid: uid, groups: Vec::new() };
        let pidfd = fork_running(|| {
            become_caller(&credentials, parent).unwrap();
            let dir = File::open(workspace).unwrap();
            assert!(restrict(dir.as_fd(), None).unwrap());
            attempt()
        })
        .unwrap();
        let id = WaitId::PidFd(pidfd.as_fd());
        rustix::process::waitid(id, WaitIdOptions::EXITED).unwrap().unwrap().exit_status()
    }

    #[test]
    fn nothing_outside_the_workspace_can_be_opened_not_even_by_root() {
        let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for uid in [0, 61_242] {
            for dir in [&inside, &outside] {
                fs::write(dir.path().join("file"), "x").unwrap();
                for path in [dir.path().to_owned(), dir.path().join("file")] {
                    std::os::unix::fs::chown(path, Some(uid), Some(uid)).unwrap();
                }
            }
            let (in_file, out_file) = (inside.path().join("file"), outside.path().join("file"));
            let status = confined(uid, inside.path(), || {
                let outcomes = [
                    File::open(&in_file).is_ok(),
                    fs::write(&in_file, "y").is_ok(),
                    File::open(&out_file).is_err(),
                    fs::write(outside.path().join("new"), "x").is_err(),
                    fs::rename(&in_file, outside.path().join("moved")).is_err(),
                    fs::hard_link(&out_file, inside.path().join("link")).is_err(),
                    File::open("/etc/passwd").is_err(),
                    fs::read_dir("/").is_err(),
                ];
                outcomes.iter().position(|outcome| !outcome).map_or(0, |index| 10 + index as i32)
            });
            assert_eq!(status, Some(0), "uid {uid}");
        }
    }

    #[test]
    fn neither_programs_nor_sockets_nor_signals_are_left() {
        let inside = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let status = confined(0, inside.path(), || {
            let outcomes = [
                TcpStream::connect(address).is_err(),
                std::os::unix::net::UnixDatagram::unbound().is_err(),
                std::process::Command::new("/bin/true").status().is_err(),
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::CONT).is_err(),
                nix::unistd::setuid(Uid::from_raw(61_243)).is_err(),
                // Threads are allowed.
                std::thread::spawn(|| ()).join().is_ok(),
            ];
            outcomes.iter().position(|outcome| !outcome).map_or(0, |index| 10 + index as i32)
        });
        assert_eq!(status, Some(0));
    }
}
