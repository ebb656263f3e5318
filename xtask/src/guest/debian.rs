//! Debian's packages: those that this host lacks are installed, those for guests are fetched with lists of their own, so that
//! the host's sources stay as they are.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::process;
use crate::project;

/// Names the archive where the host's own sources name none.
const MIRROR: &str = "AGENTD_DEBIAN_MIRROR";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Programs that guests are made and run with, and the packages that hold them.
const HOST_PROGRAMS: [(&str, &str); 7] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("debootstrap", "debootstrap"),
    ("mke2fs", "e2fsprogs"),
    ("cpio", "cpio"),
    ("depmod", "kmod"),
    ("xz", "xz-utils"),
    ("unshare", "util-linux"),
];

/// A release of Debian that a kernel or a whole guest is taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Suite {
    /// Debian 12, kernel 6.1.
    Bookworm,
    /// Debian 13, kernel 6.12.
    Trixie,
    /// Debian 13's backports, kernel 7.
    #[value(name = "trixie-backports")]
    TrixieBackports,
}

impl Suite {
    /// Debian's name for it.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
            Self::TrixieBackports => "trixie-backports",
        }
    }
}

/// Installs what guests need and this host lacks.
pub(crate) fn install_host_programs() -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let is_there =
        |name: &str| std::env::split_paths(&path).chain(system.clone()).any(|folder| folder.join(name).is_file());
    let missing = HOST_PROGRAMS.iter().filter(|(program, _)| !is_there(program)).map(|(_, package)| *package);
    install(missing.collect())
}

/// Installs packages, and the keys of Debian's archive.
fn install(mut missing: Vec<&str>) -> Result<()> {
    if !Path::new(KEYRING).exists() {
        missing.push("debian-archive-keyring");
    }
    if missing.is_empty() {
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        bail!("packages are missing: apt-get install {}", missing.join(" "));
    }
    eprintln!("installing {}", missing.join(" "));
    process::run(Command::new("apt-get").args(["update", "-qq"]))?;
    let mut install = Command::new("apt-get");
    install.args(["install", "-y", "-qq", "--no-install-recommends"]).args(&missing);
    // It tells each package's name several times.
    process::run(install.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null()).stdout(Stdio::null()))
}

/// The archive that this host installs from.
pub(crate) fn mirror() -> Result<String> {
    if let Ok(named) = std::env::var(MIRROR) {
        return Ok(named);
    }
    let format = "$(ORIGIN)|$(CODENAME)|$(REPO_URI)";
    let targets = process::output(Command::new("apt-get").args(["indextargets", "--format", format]))?;
    let found = targets.lines().find_map(|line| {
        let mut fields = line.split('|');
        let (origin, codename, address) = (fields.next()?, fields.next()?, fields.next()?);
        // Security and updates have repositories and names of their own.
        (origin == "Debian" && !codename.contains('-')).then(|| address.to_owned())
    });
    found.with_context(|| format!("no archive of Debian among this host's sources; name one in {MIRROR}"))
}

/// Where everything about guests is kept.
pub(crate) fn folder() -> Result<PathBuf> {
    let folder = project::target()?.join("guest");
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    Ok(folder)
}

/// The packages of one release, apart from the host's.
pub(crate) struct Archive {
    folder: PathBuf,
}

impl Archive {
    /// Fetches the lists of a release.
    pub(crate) fn open(suite: Suite) -> Result<Self> {
        install(Vec::new())?;
        let folder = folder()?.join("apt").join(suite.as_str());
        for part in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(folder.join(part))?;
        }
        let line = format!("deb [signed-by={KEYRING}] {} {} main\n", mirror()?, suite.as_str());
        fs::write(folder.join("sources.list"), line)?;
        let archive = Self { folder };
        process::run(archive.apt("apt-get").args(["update", "-qq"]))?;
        Ok(archive)
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let at = |part: &str| self.folder.join(part).display().to_string();
        command.arg("-o").arg(format!("Dir::Etc::sourcelist={}", at("sources.list")));
        command.args(["-o", "Dir::Etc::sourceparts=/dev/null"]);
        command.arg("-o").arg(format!("Dir::State::lists={}", at("lists")));
        command.arg("-o").arg(format!("Dir::Cache={}", at("cache")));
        // The host's pins are about the host.
        command.args(["-o", "Dir::Etc::preferences=/dev/null", "-o", "Dir::Etc::preferencesparts=/dev/null"]);
        command.stdin(Stdio::null());
        command
    }

    /// The packages that a metapackage stands for today, directly or by one another, whose names begin with one of these: a
    /// kernel, for instance, is one package in some releases and several in others.
    pub(crate) fn behind(&self, metapackage: &str, prefixes: &[&str]) -> Result<BTreeSet<String>> {
        let mut found = BTreeSet::new();
        let mut open = vec![metapackage.to_owned()];
        while let Some(package) = open.pop() {
            let depends = process::output(self.apt("apt-cache").args(["depends", "--important", &package]))?;
            for needed in needed(&depends, prefixes) {
                if found.insert(needed.clone()) {
                    open.push(needed);
                }
            }
        }
        if found.is_empty() {
            bail!("{metapackage} stands for no package");
        }
        Ok(found)
    }

    /// Unpacks a package's files into a folder.
    pub(crate) fn unpack(&self, package: &str, into: &Path) -> Result<()> {
        let scratch = tempfile::tempdir_in(&self.folder)?;
        // apt fetches as a user of its own where it can.
        process::run(
            self.apt("apt-get")
                .args(["-o", "APT::Sandbox::User=root", "download", "-qq", package])
                .current_dir(scratch.path()),
        )?;
        let file = fs::read_dir(scratch.path())?.next().with_context(|| format!("{package} was not fetched"))??;
        fs::create_dir_all(into)?;
        process::run(Command::new("dpkg-deb").arg("--extract").arg(file.path()).arg(into))
    }
}

/// What `apt-cache depends` says a package needs, of these names.
fn needed(depends: &str, prefixes: &[&str]) -> Vec<String> {
    let names = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    names.filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix))).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_package_needs_is_read_by_name() {
        let depends = "linux-image-7.3.4+deb13-amd64\n  PreDepends: linux-base\n |Depends: <dracut>\n  \
                       Depends: <linux-initramfs-tool>\n  Depends: linux-base-7.3.4+deb13-amd64\n  \
                       Depends: linux-binary-7.3.4+deb13-amd64\n  Depends: linux-modules-7.3.4+deb13-amd64\n";
        let needed = needed(depends, &["linux-binary-", "linux-modules-"]);
        assert_eq!(needed, ["linux-binary-7.3.4+deb13-amd64", "linux-modules-7.3.4+deb13-amd64"]);
    }
}
