//! Several clients at once.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::samples::Samples;
use crate::process;

/// What several clients did together.
pub(super) struct Together {
    /// From the first one's begin to the last one's end.
    pub(super) took: Duration,
    /// How long each single piece of work took.
    pub(super) samples: Samples,
}

impl Together {
    /// Pieces of work per second.
    pub(super) fn rate(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
        let done = self.samples.len() as f64;
        done / self.took.as_secs_f64()
    }
}

/// Lets so many clients do so many pieces of work each. A piece is told which client does it.
pub(super) fn together<T>(clients: usize, each: usize, piece: impl Fn(usize) -> Result<T> + Sync) -> Result<Together> {
    let start = Instant::now();
    let samples = std::thread::scope(|scope| {
        let piece = &piece;
        let work = move |client: usize| -> Result<Samples> {
            let mut samples = Samples::default();
            for _ in 0..each {
                process::check_interrupt()?;
                let start = Instant::now();
                piece(client)?;
                samples.push(start.elapsed());
            }
            Ok(samples)
        };
        let clients: Vec<_> = (0..clients).map(|client| scope.spawn(move || work(client))).collect();
        let mut all = Samples::default();
        for client in clients {
            match client.join() {
                Ok(samples) => all.extend(samples?),
                Err(_) => bail!("a client panicked"),
            }
        }
        Ok(all)
    })?;
    Ok(Together { took: start.elapsed(), samples })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_client_does_its_share_and_a_failure_is_told() {
        let done = AtomicUsize::new(0);
        let all = together(3, 4, |client| Ok(done.fetch_add(client, Ordering::Relaxed))).unwrap();
        assert_eq!((done.into_inner(), all.samples.len()), (12, 12));
        assert!(together(2, 1, |client| if client == 1 { bail!("no") } else { Ok(()) }).is_err());
    }
}
