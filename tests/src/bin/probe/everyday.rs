//! What honest programs do all day, and must be able to do here.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, symlink};
use std::process::{Command, Stdio};
use std::sync::mpsc;

use crate::raw::{Argument, call};
use crate::{Attempt, Outcome, Refused, allowed};

pub(crate) const ALL: &[Attempt] = &[
    allowed("start_threads", |_| {
        let (sender, receiver) = mpsc::channel();
        let threads: Vec<_> = (0..8)
            .map(|number| {
                let sender = sender.clone();
                std::thread::Builder::new().spawn(move || sender.send(number))
            })
            .collect::<Result<_, _>>()?;
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(Ok(())) => Ok(()),
            other => Err(Refused::Odd(format!("{other:?}"))),
        })?;
        if receiver.try_iter().sum::<i32>() == 28 { Ok(()) } else { Err(Refused::Odd("threads lost".to_owned())) }
    }),
    allowed("run_a_shell", |_| succeeds("sh", &["-c", "echo a | tr a b | grep -q b"])),
    allowed("run_python", |_| succeeds("/usr/bin/python3", &["-c", "import json, threading, hashlib"])),
    allowed("pass_bytes_through_a_pipe", |_| {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        if let Some(stdin) = &mut child.stdin {
            stdin.write_all(b"hello")?;
        }
        let output = child.wait_with_output()?;
        if output.stdout == b"hello" { Ok(()) } else { Err(Refused::Odd(format!("{output:?}"))) }
    }),
    allowed("open_pty", |_| {
        let main = OpenOptions::new().read(true).write(true).open("/dev/ptmx")?;
        let mut unlocked = [0u8; 4];
        // TIOCSPTLCK, TIOCGPTN
        call(libc::SYS_ioctl, vec![main.as_raw_fd().into(), 0x4004_5431.into(), Argument::Buffer(&mut unlocked)])?;
        let mut number = [0u8; 4];
        call(
            libc::SYS_ioctl,
            vec![main.as_raw_fd().into(), 0x8004_5430u32.cast_signed().into(), Argument::Buffer(&mut number)],
        )?;
        OpenOptions::new().read(true).write(true).open(format!("/dev/pts/{}", u32::from_ne_bytes(number)))?;
        Ok(())
    }),
    allowed("make_an_anonymous_file", |_| {
        call(libc::SYS_memfd_create, vec![c"probe".into(), 0.into()])?;
        Ok(())
    }),
    allowed("rename_in_tmp", |_| {
        fs::create_dir_all("/tmp/from/below")?;
        fs::write("/tmp/from/below/file", "x")?;
        let _ = fs::remove_dir_all("/tmp/to");
        fs::rename("/tmp/from", "/tmp/to")?;
        Ok(fs::write("/tmp/to/below/file", "y")?)
    }),
    allowed("lock_a_file", |_| {
        let file = fs::File::create("/tmp/locked")?;
        call(libc::SYS_flock, vec![file.as_raw_fd().into(), libc::LOCK_EX.into()])?;
        Ok(())
    }),
    allowed("use_offsets_and_sparse_files", |_| {
        let file = fs::File::create("/tmp/sparse")?;
        file.set_len(1 << 30)?;
        Ok(file.write_all_at(b"x", 1 << 29)?)
    }),
    allowed("copy_a_file", |_| {
        fs::copy("/etc/passwd", "/tmp/copied")?;
        Ok(())
    }),
    allowed("allocate_space", |_| {
        let file = fs::File::create("/tmp/allocated")?;
        call(libc::SYS_fallocate, vec![file.as_raw_fd().into(), 0.into(), 0.into(), 65536.into()])?;
        Ok(())
    }),
    allowed("make_symlinks", |_| {
        let _ = fs::remove_file("/tmp/dangling");
        Ok(symlink("/nowhere", "/tmp/dangling")?)
    }),
    allowed("use_timers_and_events", |_| {
        call(libc::SYS_timerfd_create, vec![libc::CLOCK_MONOTONIC.into(), 0.into()])?;
        call(libc::SYS_eventfd2, vec![0.into(), 0.into()])?;
        let mask = [0u8; 8];
        call(libc::SYS_signalfd4, vec![(-1).into(), Argument::Bytes(&mask), 8.into(), 0.into()])?;
        Ok(())
    }),
    allowed("ask_for_processors", |_| {
        std::thread::available_parallelism()?;
        Ok(())
    }),
    allowed("ask_for_memory", |_| {
        if fs::read_to_string("/proc/meminfo")?.contains("MemTotal") { Ok(()) } else { Err(Refused::Absent) }
    }),
    allowed("flush_a_file", |_| {
        let mut file = fs::File::create("/tmp/flushed")?;
        file.write_all(b"x")?;
        Ok(file.sync_all()?)
    }),
    allowed("find_the_loader", |_| succeeds("ldd", &["/usr/bin/env"])),
    allowed("workspace:write", |_| Ok(fs::write("/workspace/probe-wrote", "x")?)),
    allowed("workspace:rename_across_directories", |_| {
        fs::create_dir_all("/workspace/probe-one")?;
        fs::create_dir_all("/workspace/probe-two")?;
        fs::write("/workspace/probe-one/file", "x")?;
        Ok(fs::rename("/workspace/probe-one/file", "/workspace/probe-two/file")?)
    }),
    allowed("workspace:remove", |_| {
        fs::write("/workspace/probe-passing", "x")?;
        Ok(fs::remove_file("/workspace/probe-passing")?)
    }),
];

fn succeeds(program: &str, arguments: &[&str]) -> Outcome {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(Refused::Odd(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr))))
}
