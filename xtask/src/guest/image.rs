//! The guest's disk: a small Debian with systemd and the runtimes that tools use. Made once and kept by its recipe's hash;
//! each guest writes to a layer of its own, which is thrown away.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use data_encoding::HEXLOWER;
use sha2::{Digest as _, Sha256};

use super::debian::{self, Suite};
use crate::process;

const SUITE: Suite = Suite::Trixie;
/// What debootstrap itself installs: without it the rest cannot be installed.
const FIRST: &str = "systemd,systemd-sysv,dbus,udev,kmod,procps,iproute2,passwd,util-linux";
/// What the tests use inside.
const FURTHER: [&str; 9] = [
    "python3",
    "default-jre-headless",
    "nodejs",
    "adduser",
    "curl",
    "ca-certificates",
    "man-db",
    "bash-completion",
    "logrotate",
];
/// Of the disk, most of it unused and so never written.
const SIZE: &str = "6G";

/// In the new root, before its packages run their scripts: nothing is started, and caches are not kept.
const INSTALL: &str = r#"
set -eu
root=$1; shift
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
printf 'path-exclude=/usr/share/doc/*\npath-exclude=/usr/share/locale/*\n' > "$root/etc/dpkg/dpkg.cfg.d/small"
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
chroot "$root" apt-get update -qq
chroot "$root" apt-get install -y -qq --no-install-recommends "$@"
chroot "$root" apt-get clean
rm -rf "$root"/var/lib/apt/lists/* "$root/usr/sbin/policy-rc.d"
echo guest > "$root/etc/hostname"
printf '127.0.0.1 localhost guest\n' > "$root/etc/hosts"
: > "$root/etc/fstab"
: > "$root/etc/machine-id"
mkdir -p "$root/lib/modules"
# Nothing that a test asks for; each costs seconds of a slow machine's start.
for unit in systemd-timesyncd.service apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer fstrim.timer man-db.timer \
    e2scrub_reap.service systemd-networkd.service systemd-pstore.service getty@tty1.service dpkg-db-backup.timer; do
    ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
"#;

/// The disk's image, made if it is not there.
pub(crate) fn disk() -> Result<PathBuf> {
    let mut recipe = Sha256::new();
    for part in [SUITE.as_str(), FIRST, &FURTHER.join(" "), SIZE, INSTALL] {
        recipe.update(part);
        recipe.update([0]);
    }
    let digest = HEXLOWER.encode(&recipe.finalize()[..8]);
    let folder = debian::folder()?;
    let image = folder.join(format!("{}-{digest}.img", SUITE.as_str()));
    if !image.exists() {
        eprintln!("making {}", image.display());
        make(&folder, &image).context("making the guest's disk")?;
    }
    Ok(image)
}

fn make(folder: &Path, image: &Path) -> Result<()> {
    let scratch = tempfile::tempdir_in(folder)?;
    let root = scratch.path().join("root");
    let mirror = debian::mirror()?;
    process::run(
        Command::new("debootstrap")
            .args(["--variant=minbase", &format!("--include={FIRST}"), SUITE.as_str()])
            .arg(&root)
            .arg(mirror)
            .stdin(Stdio::null())
            .stdout(Stdio::null()),
    )?;
    // In a mount namespace of its own: whatever happens, nothing stays mounted on the host.
    process::run(
        Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", INSTALL, "install"])
            .arg(&root)
            .args(FURTHER)
            .stdin(Stdio::null())
            .stdout(Stdio::null()),
    )?;
    // Sites and workspaces lie below /tmp on this disk, and others than root look at them.
    fs::set_permissions(&root, fs::Permissions::from_mode(0o755))?;
    let fresh = scratch.path().join("fresh.img");
    process::run(
        Command::new("mke2fs").args(["-q", "-t", "ext4", "-L", "guest", "-d"]).arg(&root).arg(&fresh).arg(SIZE),
    )?;
    fs::rename(&fresh, image)?;
    Ok(())
}
