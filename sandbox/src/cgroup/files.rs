//! The files and directories of the control group file system.

use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::CgroupError;

pub(super) fn keyed(file: &Path, key: &str) -> Option<u64> {
    let text = read(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

pub(super) fn is_empty(directory: &Path) -> bool {
    keyed(&directory.join("cgroup.events"), "populated") == Some(0)
}

pub(super) fn wait_until_empty(directory: &Path, longest: Duration) -> Result<(), CgroupError> {
    let deadline = Instant::now() + longest;
    while !is_empty(directory) {
        if Instant::now() >= deadline {
            let source = io::Error::from(io::ErrorKind::TimedOut);
            return Err(CgroupError::Remove { path: directory.to_owned(), source });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

pub(super) fn entries(path: &Path) -> Result<Vec<PathBuf>, CgroupError> {
    let failed = |source| CgroupError::Read { path: path.to_owned(), source };
    fs::read_dir(path).map_err(failed)?.map(|entry| Ok(entry.map_err(failed)?.path())).collect()
}

pub(super) fn directories(path: &Path) -> Result<Vec<PathBuf>, CgroupError> {
    let failed = |source| CgroupError::Read { path: path.to_owned(), source };
    let mut found = Vec::new();
    for entry in fs::read_dir(path).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_type().map_err(failed)?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Readable for everybody, whatever the launcher's umask: runtimes read their limits in their own cgroup.
pub(super) fn create(path: &Path) -> Result<(), CgroupError> {
    let made = match fs::create_dir(path) {
        Ok(()) => fs::set_permissions(path, fs::Permissions::from_mode(0o755)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    };
    made.map_err(|source| CgroupError::Create { path: path.to_owned(), source })
}

pub(super) fn remove_recursively(path: &Path) -> Result<(), CgroupError> {
    // A slice is mostly empty by the time that it is removed.
    if fs::remove_dir(path).is_ok() {
        return Ok(());
    }
    for child in directories(path)? {
        remove_recursively(&child)?;
    }
    remove(path)
}

pub(super) fn remove(path: &Path) -> Result<(), CgroupError> {
    fs::remove_dir(path).map_err(|source| CgroupError::Remove { path: path.to_owned(), source })
}

/// Reads one of the kernel's own files, which says no length.
pub(super) fn read(path: &Path) -> Result<String, CgroupError> {
    let failed = |source| CgroupError::Read { path: path.to_owned(), source };
    let mut file = fs::File::open(path).map_err(failed)?;
    let (mut bytes, mut room) = (Vec::new(), [0; 4096]);
    loop {
        // Less than there is room for is not the end: the kernel gives whole lines.
        match file.read(&mut room) {
            Ok(0) => return String::from_utf8(bytes).map_err(|error| failed(io::Error::other(error))),
            Ok(length) => bytes.extend_from_slice(&room[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
    }
}

pub(super) fn write(path: &Path, value: &str) -> Result<(), CgroupError> {
    fs::write(path, value).map_err(|source| CgroupError::Write {
        path: path.to_owned(),
        value: value.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_the_kernel_gives_in_pieces_are_read_whole() {
        let long = Path::new("/proc/kallsyms");
        let read = read(long).unwrap();
        assert!(read.len() > 1 << 16, "it is long");
        assert_eq!(read.lines().count(), fs::read_to_string(long).unwrap().lines().count());
    }
}
