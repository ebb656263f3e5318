//! Kernel interfaces that no tool needs, and tricks to reach them past a filter. The arguments are such that success would
//! do no harm, and such that a call which is let through fails otherwise than one that is refused.

use crate::raw::{Argument, call, getpid_by_the_old_gate};
use crate::{Attempt, FILTERED, Outcome, Refused, allowed, refused};

const NO_CAPABILITY: &[i32] = &[libc::EPERM];

pub(crate) const ALL: &[Attempt] = &[
    refused("mount", FILTERED, "ask_about_a_file_system", |_| {
        numbered(
            libc::SYS_mount,
            vec![c"none".into(), c"/agentd-probe/nowhere".into(), c"tmpfs".into(), 0.into(), 0.into()],
        )
    }),
    refused("bind_mount", FILTERED, "ask_about_a_file_system", |_| {
        numbered(
            libc::SYS_mount,
            vec![c"/tmp".into(), c"/agentd-probe/nowhere".into(), 0.into(), (libc::MS_BIND as i64).into(), 0.into()],
        )
    }),
    refused("remount_writable", FILTERED, "ask_about_a_file_system", |_| {
        let flags = (libc::MS_REMOUNT | libc::MS_BIND) as i64;
        numbered(libc::SYS_mount, vec![c"none".into(), c"/usr".into(), 0.into(), flags.into(), 0.into()])
    }),
    refused("unmount", FILTERED, "ask_about_a_file_system", |_| {
        numbered(libc::SYS_umount2, vec![c"/proc".into(), (libc::MNT_DETACH).into()])
    }),
    refused("open_a_file_system", FILTERED, "ask_about_a_file_system", |_| {
        numbered(libc::SYS_fsopen, vec![c"tmpfs".into(), 0.into()])
    }),
    refused("configure_a_file_system", FILTERED, "ask_about_a_file_system", |_| {
        numbered(libc::SYS_fsconfig, vec![(-1).into(), 6.into(), 0.into(), 0.into(), 0.into()])
    }),
    refused("make_a_mount", FILTERED, "ask_about_a_file_system", |_| {
        numbered(libc::SYS_fsmount, vec![(-1).into(), 0.into(), 0.into()])
    }),
    refused("pick_a_mount", FILTERED, "ask_about_a_file_system", |_| {
        numbered(libc::SYS_fspick, vec![libc::AT_FDCWD.into(), c"/tmp".into(), 0.into()])
    }),
    refused("clone_a_tree", FILTERED, "ask_about_a_file_system", |_| {
        numbered(libc::SYS_open_tree, vec![libc::AT_FDCWD.into(), c"/tmp".into(), 1.into()])
    }),
    refused("move_a_mount", FILTERED, "ask_about_a_file_system", |_| {
        numbered(libc::SYS_move_mount, vec![(-1).into(), c"".into(), (-1).into(), c"".into(), 0.into()])
    }),
    refused("change_a_mount", FILTERED, "ask_about_a_file_system", |_| {
        numbered(
            libc::SYS_mount_setattr,
            vec![libc::AT_FDCWD.into(), c"/usr".into(), 0.into(), Argument::Bytes(&[0; 32]), 32.into()],
        )
    }),
    refused("pivot_root", FILTERED, "change_directory", |_| {
        numbered(libc::SYS_pivot_root, vec![c"/tmp".into(), c"/tmp".into()])
    }),
    refused("chroot", FILTERED, "change_directory", |_| numbered(libc::SYS_chroot, vec![c"/tmp".into()])),
    refused("load_bpf", FILTERED, "use_a_futex", |_| {
        numbered(libc::SYS_bpf, vec![0.into(), Argument::Bytes(&[0; 64]), 64.into()])
    }),
    refused("measure_performance", FILTERED, "use_a_futex", |_| {
        numbered(
            libc::SYS_perf_event_open,
            vec![Argument::Bytes(&[0; 128]), 0.into(), (-1).into(), (-1).into(), 0.into()],
        )
    }),
    refused("set_up_io_uring", FILTERED, "wait_by_epoll", |_| {
        numbered(libc::SYS_io_uring_setup, vec![1.into(), Argument::Bytes(&[0; 120])])
    }),
    refused("enter_io_uring", FILTERED, "wait_by_epoll", |_| {
        numbered(libc::SYS_io_uring_enter, vec![(-1).into(), 0.into(), 0.into(), 0.into(), 0.into(), 0.into()])
    }),
    refused("handle_page_faults", FILTERED, "use_a_futex", |_| numbered(libc::SYS_userfaultfd, vec![1.into()])),
    refused("use_the_keyring", FILTERED, "get_random_bytes", |_| {
        numbered(libc::SYS_keyctl, vec![0.into(), (-3).into(), 1.into()])
    }),
    refused("add_a_key", FILTERED, "get_random_bytes", |_| {
        numbered(
            libc::SYS_add_key,
            vec![c"user".into(), c"agentd".into(), Argument::Bytes(b"x"), 1.into(), (-3).into()],
        )
    }),
    refused("request_a_key", FILTERED, "get_random_bytes", |_| {
        numbered(libc::SYS_request_key, vec![c"user".into(), c"agentd".into(), 0.into(), 0.into()])
    }),
    refused("load_a_kernel", FILTERED, "ask_about_the_kernel", |_| {
        numbered(libc::SYS_kexec_load, vec![0.into(), 0.into(), 0.into(), 0.into()])
    }),
    refused("load_a_kernel_file", FILTERED, "ask_about_the_kernel", |_| {
        numbered(libc::SYS_kexec_file_load, vec![(-1).into(), (-1).into(), 0.into(), 0.into(), 0.into()])
    }),
    refused("load_a_module", FILTERED, "ask_about_the_kernel", |_| {
        numbered(libc::SYS_init_module, vec![0.into(), 0.into(), c"".into()])
    }),
    refused("load_a_module_file", FILTERED, "ask_about_the_kernel", |_| {
        numbered(libc::SYS_finit_module, vec![(-1).into(), c"".into(), 0.into()])
    }),
    refused("remove_a_module", FILTERED, "ask_about_the_kernel", |_| {
        numbered(libc::SYS_delete_module, vec![c"agentd-probe".into(), 0.into()])
    }),
    refused("switch_swap_on", FILTERED, "ask_about_the_kernel", |_| {
        numbered(libc::SYS_swapon, vec![c"/tmp/swap".into(), 0.into()])
    }),
    refused("switch_swap_off", FILTERED, "ask_about_the_kernel", |_| {
        numbered(libc::SYS_swapoff, vec![c"/tmp/swap".into()])
    }),
    refused("reboot", FILTERED, "ask_about_the_kernel", |_| {
        numbered(libc::SYS_reboot, vec![0.into(), 0.into(), 0.into(), 0.into()])
    }),
    refused("read_the_kernel_log", FILTERED, "ask_about_the_kernel", |_| {
        numbered(libc::SYS_syslog, vec![10.into(), 0.into(), 0.into()])
    }),
    refused("account_processes", FILTERED, "ask_about_the_kernel", |_| {
        numbered(libc::SYS_acct, vec![c"/tmp/acct".into()])
    }),
    refused("set_quotas", FILTERED, "ask_about_a_file_system", |_| {
        numbered(libc::SYS_quotactl, vec![0x80000000u32.cast_signed().into(), 0.into(), 0.into(), 0.into()])
    }),
    refused("set_the_time", FILTERED, "read_clocks", |_| numbered(libc::SYS_settimeofday, vec![0.into(), 0.into()])),
    refused("set_a_clock", FILTERED, "read_clocks", |_| {
        numbered(libc::SYS_clock_settime, vec![0.into(), Argument::Bytes(&[0xff; 16])])
    }),
    refused("adjust_a_clock", FILTERED, "read_clocks", |_| {
        let mut change = [0u8; 208];
        change[0] = 1;
        numbered(libc::SYS_clock_adjtime, vec![0.into(), Argument::Buffer(&mut change)])
    }),
    refused("set_the_host_name", FILTERED, "ask_about_the_kernel", |_| {
        numbered(libc::SYS_sethostname, vec![c"x".into(), 1.into()])
    }),
    refused("set_the_domain_name", FILTERED, "ask_about_the_kernel", |_| {
        numbered(libc::SYS_setdomainname, vec![c"x".into(), 1.into()])
    }),
    refused("watch_whole_file_systems", FILTERED, "watch_a_directory", |_| {
        numbered(libc::SYS_fanotify_init, vec![0.into(), 0.into()])
    }),
    refused("change_segments", FILTERED, "run_made_code", |_| {
        numbered(libc::SYS_modify_ldt, vec![0.into(), 0.into(), 0.into()])
    }),
    refused("use_ports", FILTERED, "run_made_code", |_| numbered(libc::SYS_iopl, vec![3.into()])),
    refused("use_a_port", FILTERED, "run_made_code", |_| {
        numbered(libc::SYS_ioperm, vec![0x80.into(), 1.into(), 1.into()])
    }),
    refused("move_pages_of_others", FILTERED, "run_made_code", |_| {
        numbered(libc::SYS_migrate_pages, vec![0.into(), 0.into(), 0.into(), 0.into()])
    }),
    refused("make_all_memory_executable", FILTERED, "ask_for_the_persona", |_| {
        numbered(libc::SYS_personality, vec![libc::READ_IMPLIES_EXEC.into()])
    }),
    refused("map_page_zero", FILTERED, "ask_for_the_persona", |_| {
        numbered(libc::SYS_personality, vec![libc::MMAP_PAGE_ZERO.into()])
    }),
    refused("push_terminal_input", NO_CAPABILITY, "ask_how_much_can_be_read", |_| {
        on_a_pipe(i64::from(libc::TIOCSTI as i32))
    }),
    refused("push_terminal_input_with_high_bits", NO_CAPABILITY, "ask_with_high_bits", |_| {
        on_a_pipe(i64::from(libc::TIOCSTI as i32) | 1 << 32)
    }),
    refused("paste_on_the_console", NO_CAPABILITY, "ask_how_much_can_be_read", |_| {
        on_a_pipe(i64::from(libc::TIOCLINUX as i32))
    }),
    refused("paste_on_the_console_with_high_bits", NO_CAPABILITY, "ask_with_high_bits", |_| {
        on_a_pipe(i64::from(libc::TIOCLINUX as i32) | 0x7fff_ffff << 32)
    }),
    refused("call_by_the_x32_table", FILTERED, "call_by_the_native_table", |_| {
        numbered(0x4000_0000 | libc::SYS_getpid, vec![])
    }),
    refused("open_by_the_x32_table", FILTERED, "call_by_the_native_table", |_| {
        numbered(0x4000_0000 | libc::SYS_ptrace, vec![])
    }),
    refused("call_by_the_old_gate", FILTERED, "call_by_the_native_table", |_| {
        getpid_by_the_old_gate()?;
        Ok(())
    }),
    refused("call_what_does_not_exist_yet", &[libc::ENOSYS], "call_by_the_native_table", |_| {
        for number in 470..=600 {
            match call(number, vec![(-1).into(), 0.into(), 0.into(), 0.into(), 0.into(), 0.into()]) {
                Err(libc::ENOSYS) => {}
                other => return Err(Refused::Odd(format!("{number}: {other:?}"))),
            }
        }
        Err(Refused::Errno(libc::ENOSYS))
    }),
    allowed("ask_about_a_file_system", |_| {
        numbered(libc::SYS_statfs, vec![c"/tmp".into(), Argument::Buffer(&mut [0; 256])])
    }),
    allowed("change_directory", |_| numbered(libc::SYS_chdir, vec![c"/tmp".into()])),
    // The value differs from the expected one: EAGAIN is the call's own answer.
    allowed("use_a_futex", |_| {
        match call(libc::SYS_futex, vec![Argument::Bytes(&[0; 4]), 0.into(), 1.into(), 0.into()]) {
            Err(libc::EAGAIN) => Ok(()),
            other => Err(Refused::Odd(format!("{other:?}"))),
        }
    }),
    allowed("wait_by_epoll", |_| numbered(libc::SYS_epoll_create1, vec![0.into()])),
    allowed("get_random_bytes", |_| {
        numbered(libc::SYS_getrandom, vec![Argument::Buffer(&mut [0; 16]), 16.into(), 0.into()])
    }),
    allowed("ask_about_the_kernel", |_| numbered(libc::SYS_uname, vec![Argument::Buffer(&mut [0; 400])])),
    allowed("read_clocks", |_| {
        for clock in [libc::CLOCK_REALTIME, libc::CLOCK_MONOTONIC, libc::CLOCK_BOOTTIME] {
            numbered(libc::SYS_clock_gettime, vec![clock.into(), Argument::Buffer(&mut [0; 16])])?;
        }
        Ok(())
    }),
    allowed("watch_a_directory", |_| {
        let watch = call(libc::SYS_inotify_init1, vec![0.into()])?;
        numbered(libc::SYS_inotify_add_watch, vec![watch.into(), c"/tmp".into(), 0x100.into()])
    }),
    allowed("ask_for_the_persona", |_| numbered(libc::SYS_personality, vec![0xffff_ffffi64.into()])),
    allowed("ask_how_much_can_be_read", |_| on_a_pipe(i64::from(libc::FIONREAD as i32))),
    allowed("ask_with_high_bits", |_| on_a_pipe(i64::from(libc::FIONREAD as i32) | 1 << 32)),
    allowed("call_by_the_native_table", |_| numbered(libc::SYS_getpid, vec![])),
    allowed("run_made_code", |_| match crate::raw::run_made_code()? {
        42 => Ok(()),
        other => Err(Refused::Odd(other.to_string())),
    }),
];

fn numbered(number: libc::c_long, arguments: Vec<Argument<'_>>) -> Outcome {
    call(number, arguments)?;
    Ok(())
}

/// An ioctl on a pipe, which is no terminal: let through, terminal requests fail with ENOTTY.
fn on_a_pipe(request: i64) -> Outcome {
    let mut ends = [0u8; 8];
    call(libc::SYS_pipe2, vec![Argument::Buffer(&mut ends), 0.into()])?;
    let end = i32::from_ne_bytes([ends[0], ends[1], ends[2], ends[3]]);
    let mut answer = [0u8; 8];
    numbered(libc::SYS_ioctl, vec![end.into(), request.into(), Argument::Buffer(&mut answer)])
}
