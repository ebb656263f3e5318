//! Who a process is, what it was left, and how it might become somebody else.

use std::fs;

use crate::raw::{Argument, call};
use crate::{Attempt, Outcome, Refused, allowed, refused};

const KEPT: &[i32] = &[libc::EPERM, libc::ENOSYS, libc::EINVAL];

pub(crate) const ALL: &[Attempt] = &[
    refused("become_root", KEPT, "stay_oneself", |_| numbered(libc::SYS_setuid, vec![0.into()])),
    refused("become_root_by_parts", KEPT, "stay_oneself", |_| {
        numbered(libc::SYS_setresuid, vec![0.into(), 0.into(), 0.into()])
    }),
    refused("become_group_root", KEPT, "stay_oneself", |_| numbered(libc::SYS_setgid, vec![0.into()])),
    refused("become_somebody_else", KEPT, "stay_oneself", |_| numbered(libc::SYS_setuid, vec![1000.into()])),
    refused("join_groups", KEPT, "stay_oneself", |_| {
        numbered(libc::SYS_setgroups, vec![1.into(), Argument::Bytes(&0u32.to_ne_bytes())])
    }),
    refused("become_root_for_files", &[], "stay_oneself", |_| {
        // The call always returns the previous value; asking again tells whether it worked.
        let _ = call(libc::SYS_setfsuid, vec![0.into()]);
        if call(libc::SYS_setfsuid, vec![(-1).into()])? == 0 { Ok(()) } else { Err(Refused::Absent) }
    }),
    refused("take_capabilities", KEPT, "ask_for_capabilities", |_| {
        let header = [0x2008_0522u32.to_ne_bytes(), 0u32.to_ne_bytes()].concat();
        let wanted = [u32::MAX.to_ne_bytes(); 6].concat();
        numbered(libc::SYS_capset, vec![Argument::Bytes(&header), Argument::Bytes(&wanted)])
    }),
    refused("raise_ambient_capability", KEPT, "name_itself", |_| {
        prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE as i64, 21)
    }),
    refused("unlock_securebits", KEPT, "name_itself", |_| prctl(libc::PR_SET_SECUREBITS, 0, 0)),
    refused("allow_new_privileges_again", KEPT, "name_itself", |_| prctl(libc::PR_SET_NO_NEW_PRIVS, 0, 0)),
    refused("change_own_memory_map_records", KEPT, "name_itself", |_| {
        prctl(libc::PR_SET_MM, libc::PR_SET_MM_START_CODE as i64, 0x1000)
    }),
    refused("leave_seccomp", KEPT, "name_itself", |_| prctl(libc::PR_SET_SECCOMP, 0, 0)),
    refused("hold_any_capability", &[], "ask_for_capabilities", |_| {
        let held = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"]
            .into_iter()
            .any(|name| status(name).is_ok_and(|value| !value.trim_start_matches('0').is_empty()));
        if held { Ok(()) } else { Err(Refused::Absent) }
    }),
    refused("be_root", &[], "have_a_name", |_| {
        let ids = format!("{} {}", status("Uid")?, status("Gid")?);
        if ids.split_whitespace().any(|id| id == "0") { Ok(()) } else { Err(Refused::Absent) }
    }),
    refused("be_in_other_groups", &[], "have_a_name", |_| {
        let own = status("Gid")?.split_whitespace().next().unwrap_or_default().to_owned();
        if status("Groups")?.split_whitespace().any(|group| group != own) { Ok(()) } else { Err(Refused::Absent) }
    }),
    refused("run_unfiltered", &[], "name_itself", |_| is("Seccomp", "2")),
    refused("run_with_new_privileges", &[], "name_itself", |_| is("NoNewPrivs", "1")),
    refused("raise_open_files", KEPT, "lower_open_files", |_| limit(libc::RLIMIT_NOFILE as i32, |hard| hard + 1)),
    refused("dump_core", &[], "lower_open_files", |_| {
        let (_, hard) = limits(libc::RLIMIT_CORE as i32)?;
        if hard > 1 { Ok(()) } else { Err(Refused::Absent) }
    }),
    refused("raise_priority", &[libc::EACCES, libc::EPERM], "lower_priority", |_| {
        numbered(libc::SYS_setpriority, vec![0.into(), 0.into(), (-5).into()])
    }),
    refused("run_in_real_time", KEPT, "lower_priority", |_| {
        numbered(
            libc::SYS_sched_setscheduler,
            vec![0.into(), libc::SCHED_FIFO.into(), Argument::Bytes(&1i32.to_ne_bytes())],
        )
    }),
    refused("lock_much_memory", &[libc::EPERM, libc::ENOMEM, libc::EAGAIN], "lock_a_page", |_| {
        numbered(libc::SYS_mlock2, vec![0x1000.into(), (1i64 << 40).into(), 0.into()])
    }),
    refused("find_leaked_descriptors", &[], "open_the_next_descriptor", |_| {
        for entry in fs::read_dir("/proc/self/fd")? {
            let name = entry?.file_name();
            let number: i32 = name.to_string_lossy().parse().unwrap_or(0);
            let target = fs::read_link(format!("/proc/self/fd/{number}")).unwrap_or_default();
            if number > 2 && !target.starts_with("/proc") {
                return Ok(());
            }
        }
        Err(Refused::Absent)
    }),
    refused("find_leaked_environment", &[], "have_a_search_path", |facts| {
        let secret = facts.get("environment")?;
        let leaked = std::env::vars()
            .any(|(name, value)| name.contains(secret) || value.contains(secret) || name.starts_with("AGENTD"));
        if leaked { Ok(()) } else { Err(Refused::Absent) }
    }),
    refused("see_the_host_name", &[], "ask_about_the_kernel", |facts| {
        let own = fs::read_to_string("/proc/sys/kernel/hostname")?;
        if own.trim() == facts.get("hostname")? { Ok(()) } else { Err(Refused::Absent) }
    }),
    refused("see_users_of_the_host", &[], "have_a_name", |facts| {
        let wanted: usize = facts.number("users")?;
        let seen = fs::read_to_string("/etc/passwd")?.lines().count();
        if wanted > 3 && seen >= wanted { Ok(()) } else { Err(Refused::Absent) }
    }),
    refused("see_mounts_of_the_host", &[], "see_own_mounts", |_| {
        let table = fs::read_to_string("/proc/self/mountinfo")?;
        // The fifth field is where a mount stands: nothing may stand where only the host has something.
        let strange = table.lines().filter_map(|line| line.split(' ').nth(4)).any(|place| {
            ["/root", "/home", "/srv", "/opt", "/boot", "/mnt", "/media", "/var/lib"]
                .iter()
                .any(|root| place.starts_with(root))
        });
        if strange { Ok(()) } else { Err(Refused::Absent) }
    }),
    allowed("stay_oneself", |_| {
        let own = call(libc::SYS_getuid, vec![])?;
        numbered(libc::SYS_setuid, vec![own.into()])
    }),
    allowed("ask_for_capabilities", |_| {
        let header = [0x2008_0522u32.to_ne_bytes(), 0u32.to_ne_bytes()].concat();
        numbered(libc::SYS_capget, vec![Argument::Bytes(&header), Argument::Buffer(&mut [0; 24])])
    }),
    allowed("name_itself", |_| {
        numbered(libc::SYS_prctl, vec![libc::PR_SET_NAME.into(), c"probe-x".into(), 0.into(), 0.into(), 0.into()])
    }),
    allowed("have_a_name", |_| {
        let own = call(libc::SYS_getuid, vec![])?.to_string();
        let known = fs::read_to_string("/etc/passwd")?.lines().any(|line| line.split(':').nth(2) == Some(&own));
        if known { Ok(()) } else { Err(Refused::Absent) }
    }),
    allowed("lower_open_files", |_| limit(libc::RLIMIT_NOFILE as i32, |hard| hard - 1)),
    // The lowest there is: whoever runs the tests may have lowered it already.
    allowed("lower_priority", |_| numbered(libc::SYS_setpriority, vec![0.into(), 0.into(), 19.into()])),
    allowed("lock_a_page", |_| {
        let page = vec![0u8; 8192];
        numbered(libc::SYS_mlock2, vec![Argument::Bytes(&page), 4096.into(), 0.into()])
    }),
    allowed("open_the_next_descriptor", |_| {
        fs::File::open("/etc/passwd")?;
        Ok(())
    }),
    allowed("have_a_search_path", |_| {
        let path = std::env::var("PATH").map_err(|error| Refused::Odd(error.to_string()))?;
        if path.contains("/usr/bin") { Ok(()) } else { Err(Refused::Odd(path)) }
    }),
    allowed("see_own_mounts", |_| {
        let table = fs::read_to_string("/proc/self/mountinfo")?;
        let is_there = |own: &str| table.lines().any(|line| line.split(' ').nth(4) == Some(own));
        if is_there("/workspace") || is_there("/job/workspace") { Ok(()) } else { Err(Refused::Absent) }
    }),
];

fn numbered(number: libc::c_long, arguments: Vec<Argument<'_>>) -> Outcome {
    call(number, arguments)?;
    Ok(())
}

fn prctl(option: i32, first: i64, second: i64) -> Outcome {
    numbered(libc::SYS_prctl, vec![option.into(), first.into(), second.into(), 0.into(), 0.into()])
}

/// A line of /proc/self/status.
fn status(name: &str) -> Result<String, Refused> {
    let text = fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.map(|value| value.trim().to_owned()).ok_or_else(|| Refused::Odd(format!("no {name} in /proc/self/status")))
}

/// Succeeds, as an escape would, where the line differs.
fn is(name: &str, wanted: &str) -> Outcome {
    if status(name)? == wanted { Err(Refused::Absent) } else { Ok(()) }
}

fn limits(resource: i32) -> Result<(u64, u64), Refused> {
    let mut both = [0u8; 16];
    call(libc::SYS_prlimit64, vec![0.into(), resource.into(), 0.into(), Argument::Buffer(&mut both)])?;
    let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|index| both[at + index]));
    Ok((word(0), word(8)))
}

fn limit(resource: i32, change: fn(u64) -> u64) -> Outcome {
    let (_, hard) = limits(resource)?;
    let wanted = [change(hard).to_ne_bytes(); 2].concat();
    numbered(libc::SYS_prlimit64, vec![0.into(), resource.into(), Argument::Bytes(&wanted), 0.into()])
}
