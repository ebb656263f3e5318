//! Other processes, namespaces, and the ways out of one's own.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};

use crate::raw::{Argument, call};
use crate::{Attempt, CLOSED, FILTERED, Outcome, Refused, allowed, refused};

const NOBODY: &[i32] = &[libc::ESRCH, libc::EPERM];

pub(crate) const ALL: &[Attempt] = &[
    refused("see_host_processes", &[], "see_own_process", |_| {
        // PID 1 is the sandbox's own. Of a stranger not even the program's name can be read.
        let is_own = |number: &u32| {
            *number == 1
                || fs::read_link(format!("/proc/{number}/exe")).is_ok_and(|program| program.ends_with("probe"))
                || fs::metadata(format!("/proc/{number}")).is_err()
        };
        if numbers()?.iter().all(is_own) { Err(Refused::Absent) } else { Ok(()) }
    }),
    refused("signal_host_process", NOBODY, "signal_own_child", |facts| kill(facts.number("pid")?, 0)),
    refused("signal_everyone_outside", NOBODY, "signal_own_child", |_| kill(-(i32::MAX), 0)),
    refused("kill_pid_one", &[], "signal_own_child", |_| {
        // A namespace's first process gets no signal from within that it does not handle, so success proves nothing.
        let _ = kill(1, libc::SIGKILL);
        std::thread::sleep(std::time::Duration::from_millis(20));
        // Its end would have been ours.
        Err(Refused::Absent)
    }),
    refused("read_environment_of_pid_one", CLOSED, "read_own_environment", |_| first_byte("/proc/1/environ")),
    refused("read_maps_of_pid_one", CLOSED, "read_own_maps", |_| first_byte("/proc/1/maps")),
    refused("read_memory_of_pid_one", CLOSED, "read_own_maps", |_| {
        fs::File::open("/proc/1/mem")?;
        Ok(())
    }),
    refused("list_descriptors_of_pid_one", CLOSED, "list_own_descriptors", |_| {
        fs::read_dir("/proc/1/fd")?.next().transpose()?;
        Ok(())
    }),
    refused("open_program_of_pid_one", CLOSED, "open_own_program", |_| {
        fs::File::open("/proc/1/exe")?;
        Ok(())
    }),
    refused("follow_root_of_pid_one", CLOSED, "read_passwd_by_magic_root", |_| first_byte("/proc/1/root/etc/passwd")),
    refused("attach_to_pid_one", FILTERED, "wait_for_child", |_| {
        call(libc::SYS_ptrace, vec![(libc::PTRACE_ATTACH as i32).into(), 1.into()])?;
        Ok(())
    }),
    refused("seize_own_child", FILTERED, "wait_for_child", |_| {
        with_child(|child| call(libc::SYS_ptrace, vec![(libc::PTRACE_SEIZE as i32).into(), child.into()]))
    }),
    refused("read_memory_of_own_child", FILTERED, "read_own_maps", |_| {
        with_child(|child| {
            let mut buffer = [0u8; 8];
            let local = [buffer.as_mut_ptr() as u64, 8];
            let remote = [0x1000u64, 8];
            let bytes = |vector: [u64; 2]| vector.map(u64::to_ne_bytes).concat();
            call(
                libc::SYS_process_vm_readv,
                vec![
                    child.into(),
                    Argument::Bytes(&bytes(local)),
                    1.into(),
                    Argument::Bytes(&bytes(remote)),
                    1.into(),
                    0.into(),
                ],
            )
        })
    }),
    refused("write_memory_of_own_child", FILTERED, "read_own_maps", |_| {
        with_child(|child| {
            call(libc::SYS_process_vm_writev, vec![child.into(), 0.into(), 0.into(), 0.into(), 0.into(), 0.into()])
        })
    }),
    refused("take_a_descriptor_of_own_child", FILTERED, "open_own_pidfd", |_| {
        with_child(|child| {
            let pidfd = call(libc::SYS_pidfd_open, vec![child.into(), 0.into()])?;
            call(libc::SYS_pidfd_getfd, vec![pidfd.into(), 0.into(), 0.into()])
        })
    }),
    refused("advise_another_process", FILTERED, "open_own_pidfd", |_| {
        call(libc::SYS_process_madvise, vec![(-1).into(), 0.into(), 0.into(), 4.into(), 0.into()])?;
        Ok(())
    }),
    refused("compare_processes", FILTERED, "open_own_pidfd", |_| {
        let own = call(libc::SYS_getpid, vec![])?;
        call(libc::SYS_kcmp, vec![own.into(), own.into(), 0.into(), 0.into(), 0.into()])?;
        Ok(())
    }),
    refused("unshare_user_namespace", FILTERED, "unshare_nothing_shared", |_| unshare(libc::CLONE_NEWUSER)),
    refused("unshare_user_and_mount_namespace", FILTERED, "unshare_nothing_shared", |_| {
        unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS)
    }),
    refused("unshare_mount_namespace", FILTERED, "unshare_nothing_shared", |_| unshare(libc::CLONE_NEWNS)),
    refused("unshare_pid_namespace", FILTERED, "unshare_nothing_shared", |_| unshare(libc::CLONE_NEWPID)),
    refused("unshare_net_namespace", FILTERED, "unshare_nothing_shared", |_| unshare(libc::CLONE_NEWNET)),
    refused("unshare_ipc_namespace", FILTERED, "unshare_nothing_shared", |_| unshare(libc::CLONE_NEWIPC)),
    refused("unshare_uts_namespace", FILTERED, "unshare_nothing_shared", |_| unshare(libc::CLONE_NEWUTS)),
    refused("unshare_cgroup_namespace", FILTERED, "unshare_nothing_shared", |_| unshare(libc::CLONE_NEWCGROUP)),
    refused("unshare_time_namespace", FILTERED, "unshare_nothing_shared", |_| unshare(0x80)),
    refused(
        "unshare_user_namespace_with_high_bits",
        &[libc::EPERM, libc::ENOSYS, libc::EINVAL],
        "unshare_nothing_shared",
        |_| {
            call(libc::SYS_unshare, vec![(i64::from(libc::CLONE_NEWUSER) | 1 << 32).into()])?;
            Ok(())
        },
    ),
    refused("clone_into_user_namespace", FILTERED, "clone_plainly", |_| clone(libc::CLONE_NEWUSER)),
    refused("clone_into_mount_namespace", FILTERED, "clone_plainly", |_| clone(libc::CLONE_NEWNS)),
    refused("clone_into_pid_namespace", FILTERED, "clone_plainly", |_| clone(libc::CLONE_NEWPID)),
    refused("clone_into_net_namespace", FILTERED, "clone_plainly", |_| clone(libc::CLONE_NEWNET)),
    refused("clone_into_all_namespaces", FILTERED, "clone_plainly", |_| {
        clone(libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWNET | libc::CLONE_NEWIPC)
    }),
    // glibc falls back to clone(2) on ENOSYS only; EPERM would break every thread.
    refused("clone3", &[libc::ENOSYS], "start_threads", |_| {
        let mut arguments = [0u8; 88];
        arguments[..8].copy_from_slice(&(libc::CLONE_NEWUSER as u64).to_ne_bytes());
        arguments[32..40].copy_from_slice(&(libc::SIGCHLD as u64).to_ne_bytes());
        end_if_child(call(libc::SYS_clone3, vec![Argument::Bytes(&arguments), 88.into()])?)
    }),
    refused("join_a_namespace_by_file", FILTERED, "see_own_namespaces", |_| {
        let file = fs::File::open("/proc/self/ns/net")?;
        call(libc::SYS_setns, vec![std::os::fd::AsRawFd::as_raw_fd(&file).into(), 0.into()])?;
        Ok(())
    }),
    refused("join_namespaces_of_pid_one", &[libc::EPERM, libc::ENOSYS, libc::EACCES], "see_own_namespaces", |_| {
        let pidfd = call(libc::SYS_pidfd_open, vec![1.into(), 0.into()])?;
        call(libc::SYS_setns, vec![pidfd.into(), (libc::CLONE_NEWNS | libc::CLONE_NEWNET).into()])?;
        Ok(())
    }),
    refused("share_a_namespace_with_the_host", &[], "see_own_namespaces", |facts| {
        for kind in ["mnt", "net", "ipc", "uts", "pid", "cgroup"] {
            let own = fs::read_link(format!("/proc/self/ns/{kind}"))?;
            if own.to_string_lossy() == facts.get(&format!("ns_{kind}"))? {
                return Ok(());
            }
        }
        Err(Refused::Absent)
    }),
    refused("protect_itself_from_the_killer", CLOSED, "read_own_oom_score", |_| {
        Ok(fs::write("/proc/self/oom_score_adj", "-1000")?)
    }),
    refused(
        "map_itself_to_root",
        &[libc::EPERM, libc::EACCES, libc::ENOENT, libc::EROFS, libc::EINVAL],
        "read_own_uid_map",
        |_| Ok(fs::write("/proc/self/uid_map", "0 0 1")?),
    ),
    allowed("see_own_process", |_| {
        let own = call(libc::SYS_getpid, vec![])?;
        if numbers()?.iter().any(|number| i64::from(*number) == own) { Ok(()) } else { Err(Refused::Absent) }
    }),
    allowed("signal_own_child", |_| {
        let mut child =
            Command::new("/proc/self/exe").args(["one", "{}", "wait_a_while"]).stdout(Stdio::null()).spawn()?;
        kill(child.id() as i32, libc::SIGTERM)?;
        let status = child.wait()?;
        if status.signal() == Some(libc::SIGTERM) { Ok(()) } else { Err(Refused::Odd(status.to_string())) }
    }),
    allowed("wait_a_while", |_| {
        std::thread::sleep(std::time::Duration::from_millis(500));
        Ok(())
    }),
    allowed("wait_for_child", |_| {
        let status = Command::new("/usr/bin/true").status()?;
        if status.success() { Ok(()) } else { Err(Refused::Odd(status.to_string())) }
    }),
    allowed("read_own_environment", |_| first_byte("/proc/self/environ")),
    allowed("read_own_maps", |_| first_byte("/proc/self/maps")),
    allowed("list_own_descriptors", |_| {
        fs::read_dir("/proc/self/fd")?.next().transpose()?;
        Ok(())
    }),
    allowed("open_own_program", |_| {
        fs::File::open("/proc/self/exe")?;
        Ok(())
    }),
    allowed("open_own_pidfd", |_| {
        let own = call(libc::SYS_getpid, vec![])?;
        call(libc::SYS_pidfd_open, vec![own.into(), 0.into()])?;
        Ok(())
    }),
    allowed("unshare_nothing_shared", |_| unshare(libc::CLONE_FILES)),
    allowed("clone_plainly", |_| clone(0)),
    allowed("see_own_namespaces", |_| {
        fs::read_link("/proc/self/ns/net")?;
        Ok(())
    }),
    allowed("read_own_oom_score", |_| first_byte("/proc/self/oom_score_adj")),
    allowed("read_own_uid_map", |_| first_byte("/proc/self/uid_map")),
];

fn numbers() -> Result<Vec<u32>, Refused> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        if let Ok(number) = entry?.file_name().to_string_lossy().parse() {
            found.push(number);
        }
    }
    Ok(found)
}

fn first_byte(path: &str) -> Outcome {
    if fs::read(path)?.is_empty() { Err(Refused::Absent) } else { Ok(()) }
}

fn kill(process: i32, signal: i32) -> Outcome {
    call(libc::SYS_kill, vec![process.into(), signal.into()])?;
    Ok(())
}

fn unshare(flags: i32) -> Outcome {
    call(libc::SYS_unshare, vec![flags.into()])?;
    Ok(())
}

/// A plain fork by clone(2), with these flags too.
fn clone(flags: i32) -> Outcome {
    end_if_child(call(libc::SYS_clone, vec![(flags | libc::SIGCHLD).into(), 0.into(), 0.into(), 0.into(), 0.into()])?)
}

fn end_if_child(process: i64) -> Outcome {
    if process == 0 {
        std::process::exit(0);
    }
    Ok(())
}

fn with_child(attempt: impl FnOnce(i32) -> Result<i64, i32>) -> Outcome {
    let mut child = Command::new("/proc/self/exe").args(["one", "{}", "wait_a_while"]).stdout(Stdio::null()).spawn()?;
    let outcome = attempt(child.id() as i32);
    child.kill()?;
    child.wait()?;
    outcome?;
    Ok(())
}
