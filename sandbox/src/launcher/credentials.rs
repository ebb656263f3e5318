//! Keys and secrets from the service manager (systemd.exec(5), LoadCredential=). It lets root alone read them. What a tool
//! names as its secret stays with the launcher, which gives it to that tool, and so does the receipt key; the rest, such as keys of models, is for the
//! daemon, which gets a directory of copies that its group can read, in the socket's directory (below /run, so in memory).

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};

/// Where the service manager put them, for this process.
pub const VARIABLE: &str = "CREDENTIALS_DIRECTORY";
/// The daemon's directory, beside the socket.
const DIRECTORY: &str = "credentials";

/// The daemon's credentials cannot be given to it.
#[derive(Debug, thiserror::Error)]
#[error("failed to hand on the credentials: {}", path.display())]
pub struct CredentialsError {
    /// On what it failed.
    pub path: PathBuf,
    /// Why.
    source: io::Error,
}

/// The daemon's copies; they go with this value.
#[derive(Debug)]
pub struct Credentials {
    path: PathBuf,
}

impl Credentials {
    /// Copies what lies in `from`, without what is in `kept`, into a directory beside the socket for a group to read.
    ///
    /// # Errors
    /// When something cannot be read or written.
    pub fn hand_on(from: &Path, socket: &Path, kept: &BTreeSet<&str>, group: u32) -> Result<Self, CredentialsError> {
        let path = socket.with_file_name(DIRECTORY);
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source: io::Error| CredentialsError { path, source }
        };
        match fs::remove_dir_all(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(at(&path)(error)),
        }
        fs::DirBuilder::new().mode(0o700).create(&path).map_err(at(&path))?;
        let own = Self { path };
        for entry in fs::read_dir(from).map_err(at(from))? {
            let entry = entry.map_err(at(from))?;
            if entry.file_name().to_str().is_some_and(|name| kept.contains(name)) {
                continue;
            }
            let content = fs::read(entry.path()).map_err(at(&entry.path()))?;
            let copy = own.path.join(entry.file_name());
            let mut file =
                fs::OpenOptions::new().write(true).create_new(true).mode(0o400).open(&copy).map_err(at(&copy))?;
            file.write_all(&content).map_err(at(&copy))?;
            open_to(&copy, group, 0o440).map_err(at(&copy))?;
        }
        open_to(&own.path, group, 0o750).map_err(at(&own.path))?;
        Ok(own)
    }

    /// Their directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Credentials {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the daemon's credentials stay");
        }
    }
}

/// The group first: nobody gets what the old group could read.
fn open_to(path: &Path, group: u32, mode: u32) -> io::Result<()> {
    chown(path, None, Some(group))?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn tools_secrets_stay_and_the_rest_is_the_groups() {
        let top = tempfile::tempdir().unwrap();
        let from = top.path().join("from");
        fs::create_dir(&from).unwrap();
        fs::write(from.join("MODEL_KEY"), "m").unwrap();
        fs::write(from.join("TOOL_TOKEN"), "t").unwrap();
        let socket = top.path().join("agentd.sock");
        let stale = top.path().join("credentials");
        fs::create_dir(&stale).unwrap();
        fs::write(stale.join("OLD"), "o").unwrap();

        let handed = Credentials::hand_on(&from, &socket, &BTreeSet::from(["TOOL_TOKEN"]), 1234).unwrap();
        let names: Vec<_> = fs::read_dir(handed.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["MODEL_KEY"]);
        let found = fs::metadata(handed.path().join("MODEL_KEY")).unwrap();
        assert_eq!((found.gid(), found.mode() & 0o7777), (1234, 0o440));
        let folder = fs::metadata(handed.path()).unwrap();
        assert_eq!((folder.gid(), folder.mode() & 0o7777), (1234, 0o750));
        drop(handed);
        assert!(!stale.exists());
    }
}
