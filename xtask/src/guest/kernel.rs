//! A guest's kernel, from Debian, and the initramfs that brings it to its disk.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use data_encoding::HEXLOWER;
use sha2::{Digest as _, Sha256};

use super::debian::{self, Archive, Suite};
use crate::process;

/// What is needed before the disk and the shared folders are there.
const EARLY_MODULES: [&str; 7] =
    ["virtio_pci", "virtio_blk", "virtio_console", "ext4", "9p", "9pnet_virtio", "overlay"];
/// ext4 asks for its checksum by an alias, which nothing here resolves. Newer kernels have it built in.
const CHECKSUMS: [&str; 1] = ["crc32c_generic"];
/// What the packages of a kernel are called: its image, its modules and their lists, which newer releases pack apart.
const PARTS: [&str; 4] = ["linux-image-", "linux-binary-", "linux-modules-", "linux-base-"];
const INIT: &str = include_str!("init.sh");
const CONTROL: &str = include_str!("control.sh");

/// A kernel that can be started.
pub(crate) struct Kernel {
    /// The compressed image.
    pub(crate) image: PathBuf,
    /// The first root file system.
    pub(crate) initramfs: PathBuf,
    /// All its modules, as in /lib/modules.
    pub(crate) modules: PathBuf,
    /// Its version.
    pub(crate) release: String,
}

/// The kernel of a release, fetched if it is not there.
pub(crate) fn kernel(suite: Suite) -> Result<Kernel> {
    let folder = debian::folder()?.join(format!("kernel-{}", suite.as_str()));
    if !folder.exists() {
        eprintln!("fetching the kernel of {}", suite.as_str());
        fetch(suite, &folder).with_context(|| format!("fetching the kernel of {}", suite.as_str()))?;
    }
    let modules = folder.join("lib/modules");
    let release = fs::read_dir(&modules)?.next().context("the kernel has no modules")??.file_name();
    let release = release.into_string().ok().context("the kernel's version is no text")?;
    let mut recipe = Sha256::new();
    for part in [INIT, CONTROL, &EARLY_MODULES.join(" "), &CHECKSUMS.join(" ")] {
        recipe.update(part);
        recipe.update([0]);
    }
    let digest = HEXLOWER.encode(&recipe.finalize()[..8]);
    let initramfs = folder.join(format!("initramfs-{digest}"));
    if !initramfs.exists() {
        pack(&folder, &release, &initramfs).context("packing the initramfs")?;
    }
    Ok(Kernel { image: folder.join("vmlinuz"), initramfs, modules, release })
}

fn fetch(suite: Suite, folder: &Path) -> Result<()> {
    let scratch = tempfile::tempdir_in(debian::folder()?)?;
    let fresh = scratch.path().join("kernel");
    let archive = Archive::open(suite)?;
    for package in archive.behind("linux-image-amd64", &PARTS)? {
        archive.unpack(&package, &fresh)?;
    }
    // Debian merged /lib into /usr/lib in between.
    for place in ["lib/modules", "usr/lib/modules"] {
        let found = fresh.join(place);
        if found.exists() && place != "lib/modules" {
            fs::create_dir_all(fresh.join("lib"))?;
            fs::rename(found, fresh.join("lib/modules"))?;
        }
    }
    let release = fs::read_dir(fresh.join("lib/modules"))?.next().context("the package has no modules")??;
    let name = release.file_name();
    let name = name.to_string_lossy();
    // Newer releases keep the image beside the modules.
    let images = [format!("boot/vmlinuz-{name}"), format!("lib/modules/{name}/vmlinuz")];
    let image = images.iter().map(|place| fresh.join(place)).find(|image| image.is_file());
    fs::rename(image.context("the packages hold no image")?, fresh.join("vmlinuz"))?;
    process::run(Command::new("depmod").arg("--basedir").arg(&fresh).arg(release.file_name()))?;
    Archive::open(Suite::Trixie)?.unpack("busybox-static", &fresh.join("busybox"))?;
    fs::rename(&fresh, folder)?;
    Ok(())
}

/// busybox, the early modules, and two scripts.
fn pack(folder: &Path, release: &str, into: &Path) -> Result<()> {
    let scratch = tempfile::tempdir_in(folder)?;
    let root = scratch.path().join("root");
    for part in ["bin", "dev", "proc", "sys", "run", "disk", "modules"] {
        fs::create_dir_all(root.join(part))?;
    }
    let busybox = ["bin/busybox", "usr/bin/busybox"].map(|place| folder.join("busybox").join(place));
    let busybox = busybox.iter().find(|file| file.is_file()).context("the package holds no busybox")?;
    fs::copy(busybox, root.join("bin/busybox"))?;
    symlink("busybox", root.join("bin/sh"))?;
    for (name, text) in [("init", INIT), ("control", CONTROL)] {
        fs::write(root.join(name), text)?;
        fs::set_permissions(root.join(name), fs::Permissions::from_mode(0o755))?;
    }
    let mut order = String::new();
    for (number, file) in early(&folder.join("lib/modules").join(release))?.into_iter().enumerate() {
        let plain = format!("{number:02}.ko");
        let target = root.join("modules").join(&plain);
        if file.extension().is_some_and(|extension| extension == "xz") {
            let unpacked = Command::new("xz").args(["--decompress", "--stdout"]).arg(&file).output()?;
            if !unpacked.status.success() {
                bail!("{} cannot be unpacked", file.display());
            }
            fs::write(target, unpacked.stdout)?;
        } else {
            fs::copy(&file, target)?;
        }
        order.push_str(&plain);
        order.push('\n');
    }
    fs::write(root.join("modules/order"), order)?;
    let fresh = scratch.path().join("initramfs");
    let script = "find . -print0 | cpio --null --create --format=newc --quiet | gzip -1 > \"$1\"";
    process::run(Command::new("sh").args(["-c", script, "pack"]).arg(&fresh).current_dir(&root))?;
    fs::rename(&fresh, into)?;
    Ok(())
}

/// The files of the early modules and of all that they need, in the order in which they can be loaded.
fn early(modules: &Path) -> Result<Vec<PathBuf>> {
    let table = fs::read_to_string(modules.join("modules.dep"))?;
    let builtin = fs::read_to_string(modules.join("modules.builtin"))?;
    let dependencies: BTreeMap<&str, Vec<&str>> = table
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(file, needs)| (file, needs.split_whitespace().collect()))
        .collect();
    let mut done = BTreeSet::new();
    let mut order = Vec::new();
    for name in CHECKSUMS.into_iter().chain(EARLY_MODULES) {
        match dependencies.keys().find(|file| module_name(file) == name) {
            Some(file) => {
                let needs = &dependencies[*file];
                // modules.dep names the nearest first.
                for one in needs.iter().rev().chain(std::iter::once(file)) {
                    if done.insert(*one) {
                        order.push(modules.join(one));
                    }
                }
            }
            None if builtin.lines().any(|file| module_name(file) == name) => {}
            None if EARLY_MODULES.contains(&name) => bail!("this kernel has no module {name}"),
            None => {}
        }
    }
    Ok(order)
}

fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split('.').next().unwrap_or(name).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_loaded_after_what_they_need() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write(
            "modules.dep",
            "k/virtio_pci.ko.xz: k/virtio_ring.ko.xz k/virtio.ko.xz\nk/virtio.ko.xz:\nk/virtio_ring.ko.xz: k/virtio.ko.xz\n\
             k/virtio_blk.ko.xz: k/virtio_ring.ko.xz k/virtio.ko.xz\nk/ext4.ko.xz:\nk/crc32c-generic.ko.xz:\n\
             k/9p.ko.xz:\nk/9pnet_virtio.ko.xz:\n",
        );
        write("modules.builtin", "kernel/virtio_console.ko\nkernel/overlay.ko\n");
        let order = early(folder.path()).unwrap();
        let names: Vec<String> =
            order.iter().map(|file| module_name(&file.file_name().unwrap().to_string_lossy())).collect();
        assert_eq!(
            names,
            ["crc32c_generic", "virtio", "virtio_ring", "virtio_pci", "virtio_blk", "ext4", "9p", "9pnet_virtio"]
        );
        write("modules.builtin", "");
        assert!(early(folder.path()).unwrap_err().to_string().contains("no module virtio_console"));
    }
}
