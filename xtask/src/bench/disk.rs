//! The disk alone: how long a block takes until it is durable.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::samples::{Samples, milliseconds};

/// How often a direct call waits for the disk: for its begin, and for its receipts and its end together.
const WRITES_PER_CALL: u32 = 2;
/// What each of these appends, about.
pub(super) const BLOCK_OF_CALL: usize = 4 << 10;

/// What a direct call waits for the disk, by samples of a block's durable append.
pub(super) fn waited_by_call(append: &Samples) -> Duration {
    append.p50() * WRITES_PER_CALL
}

/// The same in words.
pub(super) fn waited_by_call_text(append: &Samples) -> String {
    format!("{WRITES_PER_CALL} durable writes, {:.2} ms", milliseconds(waited_by_call(append)))
}

/// A file that blocks are appended to; gone with this value.
pub(super) struct Disk {
    path: PathBuf,
    file: File,
    block: Vec<u8>,
}

impl Disk {
    /// The disk of this directory's file system, with blocks of so many bytes.
    pub(super) fn of(directory: &Path, block: usize) -> Result<Self> {
        let path = directory.join("disk");
        let file = File::create(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Self { path, file, block: vec![1; block] })
    }

    /// Appends a block, and how long it took until that was durable.
    pub(super) fn append(&mut self) -> Result<Duration> {
        let start = Instant::now();
        self.file.write_all(&self.block)?;
        self.file.sync_data()?;
        Ok(start.elapsed())
    }

    /// How often per second a block is appended and durable, measured for so long.
    pub(super) fn rate(&mut self, during: Duration) -> Result<f64> {
        let start = Instant::now();
        let mut count = 0_u32;
        while start.elapsed() < during {
            self.append()?;
            count += 1;
        }
        Ok(f64::from(count) / start.elapsed().as_secs_f64())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The directory may have gone before it.
        let _ = fs::remove_file(&self.path);
    }
}
