//! What is lost without a mechanism, and how to get it.

/// For a finding's kind: what its absence costs, and what to do about it.
pub(super) fn advice(kind: &str) -> (&'static str, &'static str) {
    match kind {
        "mount_namespace" | "pid_namespace" => (
            "No call runs at all: without it there is no sandbox to speak of.",
            "Run agentd outside of a container, or give the container CAP_SYS_ADMIN; the kernel needs CONFIG_NAMESPACES.",
        ),
        "net_namespace" => (
            "Tools could reach the host's network, so policies that forbid it are refused unless Landlock keeps them from it.",
            "The kernel needs CONFIG_NET_NS; in a container, CAP_SYS_ADMIN.",
        ),
        "egress" => (
            "Calls that list hosts are refused; without listed hosts nothing changes.",
            "The kernel needs CONFIG_NET_NS and CONFIG_PACKET; in a container, CAP_SYS_ADMIN, CAP_NET_ADMIN and CAP_NET_RAW.",
        ),
        "ipc_namespace" | "uts_namespace" => (
            "Tools share System V IPC, or the host's name, with the host.",
            "The kernel needs CONFIG_IPC_NS and CONFIG_UTS_NS.",
        ),
        "cgroup_namespace" => (
            "Runtimes cannot find their limits, and the JVM sizes its heap for the whole host.",
            "The kernel needs CONFIG_CGROUPS and cgroup2 mounted.",
        ),
        "landlock_files" => (
            "Files are confined by the mount namespace alone.",
            "Kernel 5.13 with CONFIG_SECURITY_LANDLOCK and `landlock` in the lsm= list of the kernel's command line.",
        ),
        "landlock_tcp" => (
            "TCP inside a sandbox is confined by its network namespace alone. Under --limits required, calls that list hosts \
                 under a policy with loopback = false are refused.",
            "Kernel 6.7 with Landlock.",
        ),
        "landlock_abstract_sockets" | "landlock_signals" => {
            ("Abstract sockets and signals are confined by namespaces alone.", "Kernel 6.12 with Landlock.")
        }
        "seccomp" => (
            "No call runs at all: tools would reach every system call.",
            "The kernel needs CONFIG_SECCOMP_FILTER; an outer container must allow seccomp(2).",
        ),
        "seccomp_notify" => (
            "Refused system calls are refused all the same, but receipts do not name them.",
            "Kernel 5.5 with CONFIG_SECCOMP_FILTER.",
        ),
        "cgroup_kill" => (
            "The processes of a call are killed through its PID namespace, one mechanism instead of two.",
            "Kernel 5.14 with cgroup2.",
        ),
        "cgroup_memory" | "cgroup_cpu" | "cgroup_pids" | "cgroup_io" => (
            "Limits of that kind are not enforced: under --limits required calls whose policy names them are refused, under \
             best-effort they run and receipts say so.",
            "Boot with cgroup2 alone (systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all) and let systemd delegate the \
             controllers (Delegate=yes in agentd's unit).",
        ),
        "cgroups" => (
            "Calls have no cgroup: nothing is limited or counted by it, and leftovers are killed by PID namespace only.",
            "Mount cgroup2 (mount -t cgroup2 none /sys/fs/cgroup/unified), or boot with it.",
        ),
        "rlimit_pids" => {
            ("Processes are not limited where cgroups do not do it.", "Any Linux has it; look at the reason.")
        }
        "workspace_idmap" => (
            "Workspaces below that directory cannot be used.",
            "Keep workspaces on a file system with id-mapped mounts: ext4, xfs or btrfs, or tmpfs from kernel 6.3; not NFS, \
             9p or FUSE.",
        ),
        "workspace_overlay" => (
            "Calls that see a workspace below that directory read-only are refused.",
            "The kernel needs CONFIG_OVERLAY_FS; keep workspaces on ext4, xfs or btrfs.",
        ),
        "clock" => (
            "Times in receipts may be wrong, and cannot be compared with those of other hosts.",
            "Run a time service (systemd-timesyncd, chrony).",
        ),
        "runtime" => (
            "Tools that need it answer with TOOL_UNAVAILABLE.",
            "Install it where the reason says, or name its program in agentd.toml.",
        ),
        _ => ("Calls whose policy requires it are refused under --limits required.", "See docs/operating.md."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Mechanism;

    #[test]
    fn every_mechanism_has_its_own_advice() {
        for mechanism in Mechanism::ALL {
            assert!(!advice(mechanism.as_str()).1.contains("operating.md"), "{mechanism}");
        }
    }
}
