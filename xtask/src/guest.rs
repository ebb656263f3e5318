//! A virtual machine with a kernel and control groups that this host may not have. One at a time; emulated, so that it runs
//! wherever QEMU does.
//!
//! ```text
//!   xtask ── commands, one per line ──▶ virtio port ──▶ control.sh in the guest
//!         ◀── their output, then `@@agentd status N` ──
//! ```
//!
//! The checkout and the build are shared read-only under their own paths, so test programs run as they were built. Everything
//! that the guest writes goes to a temporary layer above its disk.

pub(crate) mod debian;
mod image;
mod kernel;
pub(crate) mod limits;
pub(crate) mod package;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use data_encoding::BASE64;

use self::debian::Suite;
use crate::process::Conversation;
use crate::project;

const MARK: &str = "@@agentd ";
/// How long a guest may take to start. Emulated and beside other work, a system with systemd took more than a minute.
const START: Duration = Duration::from_secs(420);
const MEMORY: &str = "3072M";

/// What runs in the guest besides what it is told.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum System {
    /// Nothing.
    Bare,
    /// systemd as PID 1.
    Systemd,
}

/// Installs and makes what a guest starts from, where it is missing.
pub(crate) fn prepare(suite: Suite) -> Result<()> {
    debian::install_host_programs()?;
    image::disk()?;
    kernel::kernel(suite)?;
    Ok(())
}

/// A running guest; it goes with this value.
pub(crate) struct Guest {
    qemu: Conversation,
    console: PathBuf,
}

impl Guest {
    /// Starts a guest and waits until it listens. Installs and makes what is missing for that.
    pub(crate) fn start(suite: Suite, system: System) -> Result<Self> {
        debian::install_host_programs()?;
        let disk = image::disk()?;
        let kernel = kernel::kernel(suite)?;
        let (checkout, target) = (project::root(), project::target()?);
        let console = debian::folder()?.join("console.log");
        let mut line = format!(
            // Emulation at unsteady speed makes the kernel believe that its timer is broken.
            "console=ttyS0 no_timer_check panic=-1 loglevel=4 agentd.checkout={} agentd.start={}",
            checkout.display(),
            if system == System::Systemd { "systemd systemd.show_status=false" } else { "bare" },
        );
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none"]);
        qemu.args(["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off", "-smp", "2", "-m", MEMORY]);
        qemu.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(&kernel.initramfs);
        qemu.arg("-serial").arg(format!("file:{}", console.display()));
        qemu.args(["-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]);
        qemu.args(["-chardev", "stdio,id=control,signal=off"]);
        qemu.args(["-device", "virtserialport,chardev=control,name=agentd.control"]);
        qemu.arg("-drive").arg(format!("file={},if=virtio,format=raw,snapshot=on,cache=unsafe", disk.display()));
        let mut share = |tag: &str, path: &std::path::Path| {
            let path = path.display();
            qemu.arg("-virtfs").arg(format!("local,path={path},mount_tag={tag},security_model=none,readonly=on"));
        };
        share("modules", &kernel.modules);
        share("checkout", &checkout);
        if !target.starts_with(&checkout) {
            share("target", &target);
            line.push_str(&format!(" agentd.target={}", target.display()));
        }
        qemu.arg("-append").arg(line);
        eprintln!("starting a guest with kernel {}", kernel.release);
        let mut guest = Self { qemu: Conversation::start(&mut qemu)?, console };
        guest.wait_until_ready()?;
        Ok(guest)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let ready = format!("{MARK}ready");
        self.read_until(START, |line| (line == ready).then_some(())).context("the guest does not start")
    }

    /// Starts it anew, as an administrator does, and waits until it listens again. What its disk holds stays.
    pub(crate) fn reboot(&mut self) -> Result<()> {
        self.qemu.say(&BASE64.encode(b"systemctl reboot")).context("telling the guest")?;
        self.wait_until_ready()
    }

    /// Runs a script and hands over each line that it writes as it comes. Its status.
    pub(crate) fn stream(&mut self, script: &str, patience: Duration, mut each: impl FnMut(&str)) -> Result<i32> {
        self.qemu.say(&BASE64.encode(script.as_bytes())).context("telling the guest")?;
        let mut before: Option<String> = None;
        let status = self.read_until(patience, |line| {
            let status = line.strip_prefix(MARK).and_then(|rest| rest.strip_prefix("status ")?.parse().ok());
            // The line before the mark is the mark's own line break, unless a script's last line had none.
            if let Some(held) = before.take()
                && !(status.is_some() && held.is_empty())
            {
                each(&held);
            }
            before = status.is_none().then(|| line.to_owned());
            status
        })?;
        Ok(status)
    }

    fn read_until<T>(&mut self, patience: Duration, mut look: impl FnMut(&str) -> Option<T>) -> Result<T> {
        loop {
            match self.qemu.hear(patience)? {
                Some(line) => {
                    if let Some(found) = look(line.trim_end_matches('\r')) {
                        return Ok(found);
                    }
                }
                None => bail!(
                    "the guest has said nothing for {} s or has ended; its console:\n{}",
                    patience.as_secs(),
                    self.console_end()
                ),
            }
        }
    }

    fn console_end(&self) -> String {
        let text = std::fs::read(&self.console).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}
