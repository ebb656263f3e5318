//! The namespaces of a sandbox: which there are, and leaving the host's for new ones (namespaces(7)).
//!
//! The PID namespace is made by the launcher for the sandbox's PID 1; the tool is born in it and makes the others itself.
//! There is no user namespace: the tool's uid is a real one that owns nothing, and seccomp keeps it from making any.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::system::sethostname;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use crate::host::Mechanism;
use crate::sys::clone::{Birth, fork};
use crate::sys::net::loopback_up;
use crate::sys::process::unshare;
use crate::sys::wait::{Ended, reap};

/// The namespaces that the tool makes for itself.
const OWN: [(Mechanism, UnshareFlags); 5] = [
    (Mechanism::MountNamespace, UnshareFlags::NEWNS),
    (Mechanism::NetNamespace, UnshareFlags::NEWNET),
    (Mechanism::IpcNamespace, UnshareFlags::NEWIPC),
    (Mechanism::UtsNamespace, UnshareFlags::NEWUTS),
    (Mechanism::CgroupNamespace, UnshareFlags::NEWCGROUP),
];

/// The namespaces to leave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Namespaces {
    left: UnshareFlags,
    loopback: bool,
}

impl Namespaces {
    /// Those of the mechanisms that work.
    pub(crate) fn where_possible(has: impl Fn(Mechanism) -> bool) -> Self {
        let chosen = OWN.into_iter().filter(|(mechanism, _)| has(*mechanism)).map(|(_, flag)| flag);
        Self { left: chosen.fold(UnshareFlags::empty(), UnshareFlags::union), loopback: true }
    }

    /// The same, with the loopback interface of a new network up or down.
    pub(crate) const fn with_loopback(self, loopback: bool) -> Self {
        Self { loopback, ..self }
    }

    /// Whether a network is among them in which loopback is up and nothing else is.
    pub(crate) const fn have_bare_network(self) -> bool {
        self.left.contains(UnshareFlags::NEWNET) && self.loopback
    }

    /// Leaves them for new ones. A network that was made ahead is entered as it is.
    pub(crate) fn enter(self, network: Option<BorrowedFd<'_>>) -> io::Result<()> {
        if let Some(network) = network {
            move_into_link_name_space(network, Some(LinkNameSpaceType::Network))?;
            return unshare(self.left - UnshareFlags::NEWNET);
        }
        unshare(self.left)?;
        if self.have_bare_network() {
            loopback_up()?;
        }
        Ok(())
    }

    /// Names the sandbox's host, where that does not name the real one.
    pub(crate) fn set_hostname(self, name: &str) -> io::Result<()> {
        if self.left.contains(UnshareFlags::NEWUTS) {
            sethostname(name.as_bytes())?;
        }
        Ok(())
    }
}

/// Makes each namespace once, in a child.
pub(crate) fn probe() -> Vec<(Mechanism, Result<(), String>)> {
    let mut found: Vec<_> = OWN
        .into_iter()
        .map(|(mechanism, flag)| {
            (mechanism, try_in_child(Birth::default(), || Namespaces { left: flag, loopback: true }.enter(None)))
        })
        .collect();
    let born = Birth { new_pid_namespace: true, cgroup: None };
    let is_first = || if std::process::id() == 1 { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) };
    found.push((Mechanism::PidNamespace, try_in_child(born, is_first)));
    found
}

/// Runs a trial in a child and waits for it.
pub(crate) fn try_in_child(birth: Birth<'_>, trial: impl FnOnce() -> io::Result<()>) -> Result<(), String> {
    const UNKNOWN: i32 = 255;
    let child = fork(birth, || match trial() {
        Ok(()) => 0,
        Err(error) => error.raw_os_error().filter(|errno| (1..UNKNOWN).contains(errno)).unwrap_or(UNKNOWN),
    })
    .map_err(|error| error.to_string())?;
    let mut ready = [rustix::event::PollFd::new(&child.pidfd, rustix::event::PollFlags::IN)];
    loop {
        match reap(std::os::fd::AsFd::as_fd(&child.pidfd)) {
            Ok(Some(reaped)) => {
                return match reaped.ended {
                    Ended::Exited(0) => Ok(()),
                    Ended::Exited(UNKNOWN) => Err("it had no effect".to_owned()),
                    Ended::Exited(errno) => Err(io::Error::from_raw_os_error(errno).to_string()),
                    Ended::Signalled(signal) => Err(format!("the trial was killed by signal {signal}")),
                };
            }
            Ok(None) => {
                if let Err(error) = rustix::event::poll(&mut ready, None)
                    && error != rustix::io::Errno::INTR
                {
                    return Err(error.to_string());
                }
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}
