//! Files of the host, of the kernel and of others.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, symlink};

use crate::raw::{Argument, call};
use crate::{Attempt, CLOSED, FILTERED, Outcome, Refused, allowed, refused};

const NO_DEVICE: &[i32] = &[libc::ENOENT, libc::EACCES, libc::EPERM, libc::ENXIO];

pub(crate) const ALL: &[Attempt] = &[
    refused("read_shadow", CLOSED, "read_passwd", |_| read("/etc/shadow")),
    refused("read_host_secret", CLOSED, "read_own_temporary", |facts| read(facts.get("secret")?)),
    refused("read_secret_by_dots", CLOSED, "read_passwd_by_dots", |facts| {
        read(&format!("/workspace/../../../..{}", facts.get("secret")?))
    }),
    refused("read_through_symlink_to_host", CLOSED, "read_through_own_symlink", |facts| {
        symlink(facts.get("secret")?, "/tmp/link-out")?;
        read("/tmp/link-out")
    }),
    refused("read_through_planted_symlink", CLOSED, "read_workspace_file", |facts| read(facts.get("planted_symlink")?)),
    refused("read_through_magic_root", CLOSED, "read_passwd_by_magic_root", |facts| {
        read(&format!("/proc/self/root{}", facts.get("secret")?))
    }),
    refused("read_through_cwd_of_pid_one", CLOSED, "read_own_cwd_link", |_| read("/proc/1/cwd/etc/shadow")),
    refused("list_root_home", CLOSED, "list_usr", |_| list("/root")),
    refused("list_homes", CLOSED, "list_usr", |_| list("/home")),
    refused("list_host_state", CLOSED, "list_usr", |facts| list(facts.get("state_dir")?)),
    refused("write_usr", CLOSED, "write_own_temporary", |_| write("/usr/bin/agentd-probe")),
    refused("overwrite_a_program", CLOSED, "write_own_temporary", |_| open_to_write("/usr/bin/env")),
    refused("write_etc", CLOSED, "write_own_temporary", |_| write("/etc/agentd-probe")),
    refused("write_at_the_root", CLOSED, "write_own_temporary", |_| write("/agentd-probe")),
    refused("make_directory_at_the_root", CLOSED, "make_own_directory", |_| Ok(fs::create_dir("/agentd-probe")?)),
    refused("chmod_a_program", CLOSED, "chmod_own_file", |_| {
        Ok(fs::set_permissions("/usr/bin/env", fs::Permissions::from_mode(0o777))?)
    }),
    refused("remove_a_program", &[libc::EPERM, libc::EACCES, libc::EROFS], "remove_own_file", |_| {
        Ok(fs::remove_file("/usr/bin/env")?)
    }),
    refused("give_a_file_to_root", &[libc::EPERM], "chown_to_self", |_| {
        write("/tmp/to-root")?;
        Ok(std::os::unix::fs::chown("/tmp/to-root", Some(0), Some(0))?)
    }),
    refused("hard_link_to_a_program", &[libc::EXDEV, libc::EPERM, libc::EACCES], "hard_link_to_own_file", |_| {
        Ok(fs::hard_link("/usr/bin/env", "/tmp/linked-program")?)
    }),
    refused(
        "hard_link_into_the_workspace",
        &[libc::EXDEV, libc::EPERM, libc::EACCES, libc::EROFS],
        "hard_link_to_own_file",
        |_| Ok(fs::hard_link("/usr/bin/env", "/workspace/linked-program")?),
    ),
    refused("make_character_device", FILTERED, "make_fifo", |_| make_node(libc::S_IFCHR, "/tmp/null-device")),
    refused("make_block_device", FILTERED, "make_fifo", |_| make_node(libc::S_IFBLK, "/tmp/disk-device")),
    refused("make_whiteout", FILTERED, "make_fifo", |_| {
        call(libc::SYS_mknod, vec![c"/tmp/whiteout".into(), (libc::S_IFCHR as i32).into(), 0.into()])?;
        Ok(())
    }),
    refused("open_by_handle", FILTERED, "open_by_name", |_| {
        let handle = [8u8, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0];
        call(
            libc::SYS_open_by_handle_at,
            vec![libc::AT_FDCWD.into(), Argument::Bytes(&handle), libc::O_RDONLY.into()],
        )?;
        Ok(())
    }),
    refused("read_kernel_memory_image", CLOSED, "read_kernel_type", |_| read("/proc/kcore")),
    refused("read_kernel_log_file", CLOSED, "read_kernel_type", |_| read("/proc/kmsg")),
    refused("press_sysrq", CLOSED, "read_own_comm", |_| open_to_write("/proc/sysrq-trigger")),
    refused("set_core_pattern", CLOSED, "read_own_comm", |_| open_to_write("/proc/sys/kernel/core_pattern")),
    refused("set_modprobe_path", CLOSED, "read_own_comm", |_| open_to_write("/proc/sys/kernel/modprobe")),
    refused("set_host_name_file", CLOSED, "read_own_comm", |_| open_to_write("/proc/sys/kernel/hostname")),
    refused("allow_more_user_namespaces", CLOSED, "read_own_comm", |_| {
        open_to_write("/proc/sys/user/max_user_namespaces")
    }),
    refused("register_a_binary_format", CLOSED, "read_own_comm", |_| {
        open_to_write("/proc/sys/fs/binfmt_misc/register")
    }),
    refused("set_uevent_helper", CLOSED, "read_own_comm", |_| open_to_write("/sys/kernel/uevent_helper")),
    refused("make_cgroup", CLOSED, "read_own_cgroup", |_| Ok(fs::create_dir("/sys/fs/cgroup/agentd-probe")?)),
    refused("move_to_another_cgroup", CLOSED, "read_own_cgroup", |_| open_to_write("/sys/fs/cgroup/cgroup.procs")),
    refused("raise_own_memory_limit", CLOSED, "read_own_cgroup", |_| open_to_write("/sys/fs/cgroup/memory.max")),
    refused("set_release_agent", CLOSED, "read_own_cgroup", |_| open_to_write("/sys/fs/cgroup/release_agent")),
    refused("thaw_or_kill_own_cgroup", CLOSED, "read_own_cgroup", |_| open_to_write("/sys/fs/cgroup/cgroup.kill")),
    refused("see_cgroups_of_the_host", &[], "read_own_cgroup", |_| {
        let text = fs::read_to_string("/proc/self/cgroup")?;
        // In a cgroup namespace of its own, a process is at the root of every hierarchy, or beside it.
        let outside =
            text.lines().any(|line| line.contains("agentd") || line.contains("call-") || line.contains(".slice"));
        if outside { Ok(()) } else { Err(Refused::Absent) }
    }),
    refused("open_memory_device", NO_DEVICE, "open_null", |_| open("/dev/mem")),
    refused("open_kernel_messages", NO_DEVICE, "open_null", |_| open("/dev/kmsg")),
    refused("open_a_disk", NO_DEVICE, "open_null", |_| open("/dev/vda").or_else(|_| open("/dev/sda"))),
    refused("open_kvm", NO_DEVICE, "open_null", |_| open("/dev/kvm")),
    refused("open_fuse", NO_DEVICE, "open_null", |_| open("/dev/fuse")),
    refused("open_tun", NO_DEVICE, "open_null", |_| open("/dev/net/tun")),
    refused("open_loop_control", NO_DEVICE, "open_null", |_| open("/dev/loop-control")),
    refused("open_vsock_device", NO_DEVICE, "open_null", |_| open("/dev/vsock")),
    refused("open_controlling_terminal", NO_DEVICE, "open_pty", |_| open("/dev/tty")),
    refused("see_devices_beyond_the_usual", &[], "open_null", |_| {
        const USUAL: [&str; 9] = ["null", "zero", "full", "random", "urandom", "tty", "ptmx", "console", "pts"];
        for entry in fs::read_dir("/dev")? {
            let entry = entry?;
            let kind = entry.file_type()?;
            let name = entry.file_name();
            let usual = USUAL.iter().any(|usual| name == *usual);
            if (kind.is_char_device() || kind.is_block_device()) && !usual {
                return Ok(());
            }
        }
        Err(Refused::Absent)
    }),
    refused("read_shared_memory_of_the_host", CLOSED, "use_own_shared_memory", |facts| read(facts.get("shm_file")?)),
    refused("see_files_of_another_call", CLOSED, "read_own_temporary", |_| read("/tmp/of-another-call")),
    refused("see_shared_memory_of_another_call", CLOSED, "use_own_shared_memory", |_| read("/dev/shm/of-another-call")),
    allowed("leave_files_for_the_next_call", |_| {
        write("/tmp/of-another-call")?;
        write("/dev/shm/of-another-call")
    }),
    allowed("read_passwd", |_| read("/etc/passwd")),
    allowed("read_passwd_by_dots", |_| read("/workspace/../../../../etc/passwd")),
    allowed("read_passwd_by_magic_root", |_| read("/proc/self/root/etc/passwd")),
    allowed("read_own_cwd_link", |_| {
        let place = fs::read_link("/proc/self/cwd")?;
        if ["/workspace", "/job/workspace"].iter().any(|own| place.starts_with(own)) {
            Ok(())
        } else {
            Err(Refused::Odd(format!("the cwd is {}", place.display())))
        }
    }),
    allowed("read_own_temporary", |_| {
        write("/tmp/own")?;
        read("/tmp/own")
    }),
    allowed("read_through_own_symlink", |_| {
        write("/tmp/target")?;
        symlink("/tmp/target", "/tmp/link-in")?;
        read("/tmp/link-in")
    }),
    allowed("read_workspace_file", |facts| read(facts.get("workspace_file")?)),
    allowed("list_usr", |_| list("/usr")),
    allowed("write_own_temporary", |_| write("/tmp/written")),
    allowed("make_own_directory", |_| Ok(fs::create_dir_all("/tmp/directory/below")?)),
    allowed("chmod_own_file", |_| {
        write("/tmp/modes")?;
        Ok(fs::set_permissions("/tmp/modes", fs::Permissions::from_mode(0o700))?)
    }),
    allowed("remove_own_file", |_| {
        write("/tmp/removed")?;
        Ok(fs::remove_file("/tmp/removed")?)
    }),
    allowed("chown_to_self", |_| {
        write("/tmp/kept")?;
        let uid = call(libc::SYS_getuid, vec![])?;
        Ok(std::os::unix::fs::chown("/tmp/kept", u32::try_from(uid).ok(), None)?)
    }),
    allowed("hard_link_to_own_file", |_| {
        write("/tmp/first-name")?;
        Ok(fs::hard_link("/tmp/first-name", "/tmp/second-name")?)
    }),
    allowed("make_fifo", |_| make_node(libc::S_IFIFO, "/tmp/fifo")),
    allowed("open_by_name", |_| {
        let name = CString::new("/etc/passwd").map_err(|error| Refused::Odd(error.to_string()))?;
        call(libc::SYS_openat, vec![libc::AT_FDCWD.into(), name.as_c_str().into(), libc::O_RDONLY.into()])?;
        Ok(())
    }),
    allowed("read_kernel_type", |_| read("/proc/sys/kernel/ostype")),
    allowed("read_own_comm", |_| read("/proc/self/comm")),
    allowed("read_own_cgroup", |_| read("/proc/self/cgroup")),
    allowed("open_null", |_| {
        for name in ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"] {
            open(name)?;
        }
        Ok(fs::write("/dev/null", "x")?)
    }),
    allowed("meet_a_full_device", |_| match fs::write("/dev/full", "x") {
        Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => Ok(()),
        other => Err(Refused::Odd(format!("{other:?}"))),
    }),
    allowed("use_own_shared_memory", |_| {
        write("/dev/shm/own")?;
        read("/dev/shm/own")
    }),
];

fn read(path: &str) -> Outcome {
    let mut first = [0];
    let length =
        File::open(path)?.read(&mut first).map_err(|error| Refused::Odd(format!("opened {path}, but: {error}")))?;
    // An empty file that stands in its place shows nothing of it.
    if length == 1 { Ok(()) } else { Err(Refused::Absent) }
}

fn list(path: &str) -> Outcome {
    // An empty directory that stands where the host's would be shows nothing of it.
    if fs::read_dir(path)?.next().is_some() { Ok(()) } else { Err(Refused::Absent) }
}

fn open(path: &str) -> Outcome {
    File::open(path)?;
    Ok(())
}

/// Opens for writing and writes nothing, so that success would do no harm.
fn open_to_write(path: &str) -> Outcome {
    OpenOptions::new().write(true).open(path)?;
    Ok(())
}

fn write(path: &str) -> Outcome {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    Ok(file.write_all(b"x")?)
}

fn make_node(kind: libc::mode_t, path: &str) -> Outcome {
    let path = CString::new(path).map_err(|error| Refused::Odd(error.to_string()))?;
    let device = if kind == libc::S_IFBLK { 0xfe00 } else { 0x103 };
    call(libc::SYS_mknod, vec![path.as_c_str().into(), ((kind | 0o600) as i32).into(), device.into()])?;
    Ok(())
}
