//! The names in directories of the host that a policy's rules look for beginnings in: `/etc` has hundreds, and every call asks.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::io::Errno;

use crate::workspace::tree::Stamp;

/// What was listed before. A directory is listed again when its times say that something was made, removed or renamed in it,
/// or are so young that they prove nothing.
#[derive(Debug, Default)]
pub struct Listings(RefCell<BTreeMap<PathBuf, Listing>>);

#[derive(Debug)]
struct Listing {
    stamp: Stamp,
    /// In seconds of the real-time clock.
    listed_at: i64,
    names: Vec<OsString>,
}

impl Listings {
    /// The paths in a directory whose names begin so, sorted; none where there is no directory.
    pub(crate) fn beginning_with(&self, directory: &Path, prefix: &str) -> io::Result<Vec<PathBuf>> {
        let mut known = self.0.borrow_mut();
        let stamp = match rustix::fs::stat(directory) {
            Ok(stat) => Stamp::of(&stat),
            Err(Errno::NOENT) => {
                known.remove(directory);
                return Ok(Vec::new());
            }
            Err(error) => return Err(error.into()),
        };
        let is_still = |listing: &Listing| listing.stamp == stamp && stamp.is_settled(listing.listed_at);
        if !known.get(directory).is_some_and(is_still) {
            let listed_at = now();
            let names = fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<_>>()?;
            known.insert(directory.to_owned(), Listing { stamp, listed_at, names });
        }
        let names = known.get(directory).map_or(&[][..], |listing| &listing.names);
        let matching = names.iter().filter(|name| name.as_encoded_bytes().starts_with(prefix.as_bytes()));
        let mut found: Vec<_> = matching.map(|name| directory.join(name)).collect();
        found.sort();
        Ok(found)
    }
}

fn now() -> i64 {
    // A clock that stands before the epoch settles nothing.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::fs::{File, FileTimes};
    use std::time::Duration;

    use super::*;

    fn names(listings: &Listings, directory: &Path) -> Vec<String> {
        let found = listings.beginning_with(directory, "a").unwrap();
        found.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn what_is_made_removed_and_renamed_is_seen_at_once() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("directory");
        let listings = Listings::default();
        assert!(names(&listings, &directory).is_empty(), "there is none");
        fs::create_dir(&directory).unwrap();
        assert!(names(&listings, &directory).is_empty());
        for name in ["ab", "b", "aa"] {
            fs::write(directory.join(name), "").unwrap();
        }
        assert_eq!(names(&listings, &directory), ["aa", "ab"]);
        fs::rename(directory.join("aa"), directory.join("ac")).unwrap();
        assert_eq!(names(&listings, &directory), ["ab", "ac"]);
        fs::remove_file(directory.join("ac")).unwrap();
        assert_eq!(names(&listings, &directory), ["ab"]);
        fs::rename(&directory, place.path().join("away")).unwrap();
        assert!(names(&listings, &directory).is_empty());
    }

    #[test]
    fn a_directory_that_has_rested_is_listed_once_until_it_changes() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("a"), "").unwrap();
        let listings = Listings::default();
        assert_eq!(names(&listings, directory.path()), ["a"]);
        // A change of times cannot be made to lie in the past, so the reading is put into the future.
        let mut known = listings.0.borrow_mut();
        let listing = known.get_mut(directory.path()).unwrap();
        listing.listed_at += 60;
        listing.names.push("a made up".into());
        drop(known);
        assert_eq!(names(&listings, directory.path()), ["a", "a made up"], "it was not listed again");
        let later = FileTimes::new().set_modified(SystemTime::now() + Duration::from_secs(1));
        File::open(directory.path()).unwrap().set_times(later).unwrap();
        assert_eq!(names(&listings, directory.path()), ["a"]);
    }
}
