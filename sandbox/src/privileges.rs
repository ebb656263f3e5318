//! Giving up privileges for good: capabilities, identity, new privileges by exec (capabilities(7), credentials(7)).

use std::io;

use caps::{CapSet, Capability, CapsHashSet};
use rustix::process::{Gid, Pid, Signal, Uid, set_parent_process_death_signal};
use rustix::thread::{
    CapabilitiesSecureBits, set_capabilities_secure_bits, set_no_new_privs, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

/// Empties the bounding set, so that no exec can ever bring a capability back, and locks the bits that would treat uid 0
/// specially. Needs CAP_SETPCAP, so it comes before the change of uid.
pub(crate) fn drop_bounding_set() -> io::Result<()> {
    set_capabilities_secure_bits(
        CapabilitiesSecureBits::NO_ROOT
            | CapabilitiesSecureBits::NO_ROOT_LOCKED
            | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
            | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED,
    )?;
    caps::clear(None, CapSet::Bounding).map_err(io::Error::other)
}

/// Becomes another user with no groups but its own. The last uid 0 goes, and with it every capability in effect.
pub(crate) fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    set_thread_groups(&[])?;
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    Ok(())
}

/// Empties the remaining capability sets, whatever uid the process had.
pub(crate) fn drop_capabilities() -> io::Result<()> {
    caps::clear(None, CapSet::Ambient).map_err(io::Error::other)?;
    for set in [CapSet::Effective, CapSet::Permitted, CapSet::Inheritable] {
        caps::set(None, set, &CapsHashSet::new()).map_err(io::Error::other)?;
    }
    Ok(())
}

/// What the launcher needs once everything is set up, and nothing else: it does not load modules, set clocks, touch devices,
/// reboot or read the kernel's log.
const LAUNCHERS: [Capability; 18] = [
    // Owners and modes of what it makes for others; mounts, namespaces, cgroups, overlays.
    Capability::CAP_CHOWN,
    Capability::CAP_DAC_OVERRIDE,
    Capability::CAP_DAC_READ_SEARCH,
    Capability::CAP_FOWNER,
    Capability::CAP_FSETID,
    Capability::CAP_SYS_ADMIN,
    Capability::CAP_SYS_CHROOT,
    Capability::CAP_MKNOD,
    // Becoming the caller, a sandbox's uid; id mappings.
    Capability::CAP_SETUID,
    Capability::CAP_SETGID,
    Capability::CAP_SETPCAP,
    Capability::CAP_SETFCAP,
    // Ending what runs under other uids; limits above its own.
    Capability::CAP_KILL,
    // setns(2) into the PID namespace of an init that is not dumpable.
    Capability::CAP_SYS_PTRACE,
    Capability::CAP_SYS_RESOURCE,
    // SIOCUNIXFILE, the sandboxes' network namespaces and ports.
    Capability::CAP_NET_ADMIN,
    Capability::CAP_NET_BIND_SERVICE,
    // Packet sockets that see what is refused there.
    Capability::CAP_NET_RAW,
];

/// Gives up every capability that the launcher does not need, for itself and for everything it will start.
pub(crate) fn keep_only_the_launchers() -> io::Result<()> {
    let held = caps::read(None, CapSet::Permitted).map_err(io::Error::other)?;
    let kept: CapsHashSet = held.intersection(&LAUNCHERS.into()).copied().collect();
    // Nothing that it starts is given a capability, so it empties this set once for all of them: each capability that is
    // dropped takes the kernel a new set of credentials.
    caps::clear(None, CapSet::Bounding).map_err(io::Error::other)?;
    caps::clear(None, CapSet::Ambient).map_err(io::Error::other)?;
    caps::set(None, CapSet::Inheritable, &CapsHashSet::new()).map_err(io::Error::other)?;
    caps::set(None, CapSet::Effective, &kept).map_err(io::Error::other)?;
    caps::set(None, CapSet::Permitted, &kept).map_err(io::Error::other)
}

/// Dies with its parent. After the change of uid, which clears it.
///
/// A parent that ended before sends no signal (PR_SET_PDEATHSIG(2const)), so whoever calls this must have another way to
/// hear of that: in a PID namespace of its own, where the parent has no number, the namespace's PID 1. All others use
/// [`die_with`].
pub(crate) fn die_with_parent() -> io::Result<()> {
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// Dies with `parent`, even if that ended before this call. After the change of uid, as above.
///
/// # Errors
/// ESRCH when `parent` has ended.
pub(crate) fn die_with(parent: Pid) -> io::Result<()> {
    die_with_parent()?;
    if rustix::process::getppid() == Some(parent) { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
}

/// No exec grants anything any more: setuid bits and file capabilities are without effect.
pub(crate) fn forbid_new_privileges() -> io::Result<()> {
    Ok(set_no_new_privs(true)?)
}
