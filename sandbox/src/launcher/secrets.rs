//! The secrets that tools are given: read from systemd's credentials (systemd.exec(5), `LoadCredential=`) or from files that
//! root alone can read, once at start and at each reload.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::catalog::Catalog;
use crate::config::Directories;
use crate::protocol::{KnownSecret, SecretText};
use crate::trusted::{Owners, TrustedDir};

/// Where systemd puts credentials.
const CREDENTIALS: &str = "CREDENTIALS_DIRECTORY";
/// A shorter value stands in too much text by chance to be taken out of it.
const SHORTEST: usize = 6;

/// All secrets that the catalogue's tools name, or why one is not there.
#[derive(Debug, Default)]
pub struct Secrets(BTreeMap<String, Result<SecretText, String>>);

impl Secrets {
    /// Reads what the tools name. A secret that cannot be had fails the calls that need it, and nothing else.
    #[must_use]
    pub fn read(catalog: &Catalog, directories: &Directories) -> Self {
        let credentials = std::env::var_os(CREDENTIALS).map(PathBuf::from);
        let places: Vec<&Path> = credentials.iter().chain(&directories.list).map(PathBuf::as_path).collect();
        let names: BTreeSet<&String> = catalog.programs().flat_map(|program| &program.secrets).collect();
        Self(names.into_iter().map(|name| (name.clone(), look_up(name, &places))).collect())
    }

    /// A secret's value.
    ///
    /// # Errors
    /// With the reason, and what to do, when it is not there.
    pub fn get(&self, name: &str) -> Result<&SecretText, String> {
        match self.0.get(name) {
            Some(Ok(value)) => Ok(value),
            Some(Err(reason)) => Err(format!("secret `{name}` cannot be had: {reason}")),
            None => Err(format!("secret `{name}` was not read; reload agentd")),
        }
    }

    /// Those that are there, for agentd to take out of text.
    #[must_use]
    pub fn known(&self) -> Vec<KnownSecret> {
        let there = self.0.iter().filter_map(|(name, value)| Some((name, value.as_ref().ok()?)));
        there.map(|(name, value)| KnownSecret { name: name.clone(), value: value.clone() }).collect()
    }
}

fn look_up(name: &str, places: &[&Path]) -> Result<SecretText, String> {
    for place in places {
        let read = TrustedDir::open(place, Owners::RootOnly).and_then(|folder| folder.read_private(OsStr::new(name)));
        match read {
            Ok(text) => return value(text),
            Err(error) if error.is_missing() => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    let searched: Vec<_> = places.iter().map(|place| place.join(name).display().to_string()).collect();
    Err(format!("none of {} is there (systemd: LoadCredential={name}:FILE)", searched.join(", ")))
}

/// Editors end a file with a line break that nobody means.
fn value(text: String) -> Result<SecretText, String> {
    let trimmed = text.strip_suffix('\n').unwrap_or(&text);
    if trimmed.contains('\0') {
        return Err("it holds a zero byte, which no environment variable can".to_owned());
    }
    if trimmed.len() < SHORTEST {
        return Err(format!(
            "it has {} bytes; at least {SHORTEST} are needed to tell it from other text",
            trimmed.len()
        ));
    }
    Ok(SecretText::new(trimmed.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_secret_is_roots_alone_and_long_enough() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str, mode: u32| {
            fs::write(folder.path().join(name), text).unwrap();
            fs::set_permissions(folder.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
        };
        put("GOOD", "sesame open\n", 0o600);
        put("SHOWN", "sesame open\n", 0o640);
        put("SHORT", "abc\n", 0o600);
        put("ZERO", "sesame\0open", 0o400);
        let look_up = |name: &str| look_up(name, &[Path::new("/no/such/place"), folder.path()]);
        assert_eq!(look_up("GOOD").unwrap().reveal(), "sesame open");
        for (name, expected) in [
            ("SHOWN", "read by others"),
            ("SHORT", "at least 6"),
            ("ZERO", "zero byte"),
            ("NONE", "LoadCredential=NONE"),
        ] {
            let reason = look_up(name).unwrap_err();
            assert!(reason.contains(expected), "{name}: {reason}");
            assert!(!reason.contains("sesame"), "{reason}");
        }
        assert_eq!(format!("{:?}", look_up("GOOD")), "Ok([secret])");
    }
}
