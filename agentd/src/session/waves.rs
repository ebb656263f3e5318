//! Which calls of a batch run at the same time.

use super::{Approval, BatchCall, Progress};

/// The calls that run now. The model's order is kept: consecutive calls that may run beside others do so, at most
/// `max_parallel`; anything else runs alone, after everything before it and before everything after it.
pub(super) fn next(batch: &[BatchCall], max_parallel: usize) -> impl Iterator<Item = &BatchCall> {
    let open = || batch.iter().filter(|one| !matches!(one.progress, Progress::Done(_)));
    let beside = |one: &&BatchCall| one.planned.concurrent || one.planned.refusal.is_some();
    let together = open().take_while(beside).count();
    // A call that waits for a person holds its place; those that may run beside it do.
    let may_run = |one: &&BatchCall| matches!(one.approval, Approval::NotNeeded | Approval::Given);
    open().take(together.clamp(1, max_parallel.max(1))).filter(may_run)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde_json::{Value, json};
    use toolproto::ids::CallId;

    use super::*;
    use crate::model::transcript::Arguments;
    use crate::session::event::{CallRecord, PlannedCall};

    #[derive(Clone, Copy, Debug)]
    struct Drawn {
        is_concurrent: bool,
        /// After how many of the others' ends a person lets it run; at once without one.
        asked: Option<u8>,
    }

    fn drawn() -> impl Strategy<Value = Drawn> {
        (prop::bool::weighted(0.7), prop::option::weighted(0.2, 0_u8..4))
            .prop_map(|(is_concurrent, asked)| Drawn { is_concurrent, asked })
    }

    fn planned(number: usize, drawn: Drawn) -> BatchCall {
        let planned = PlannedCall {
            call: CallId::from_u128(number as u128),
            wire_id: number.to_string(),
            tool: "t".to_owned(),
            arguments: Arguments::Object(json!({})),
            concurrent: drawn.is_concurrent,
            approval: drawn.asked.is_some(),
            repeatable: false,
            outside_effects: false,
            question: false,
            built_in: None,
            refusal: None,
        };
        let approval = if drawn.asked.is_some() { Approval::Needed } else { Approval::NotNeeded };
        BatchCall { planned, progress: Progress::Pending, approval, waiting: None }
    }

    fn done() -> Progress {
        let record = CallRecord {
            code: None,
            content: Value::Null,
            receipt: None,
            usage: None,
            workspace_after: None,
            written: Vec::new(),
            deleted: Vec::new(),
            unproven: false,
        };
        Progress::Done(Box::new(record))
    }

    /// When each call began and ended, in steps; the calls end in an order that `ends` picks.
    fn played(drawn: &[Drawn], most: usize, ends: &[prop::sample::Index]) -> (BTreeMap<usize, (usize, usize)>, usize) {
        let mut batch: Vec<_> = drawn.iter().enumerate().map(|(number, one)| planned(number, *one)).collect();
        let (mut began, mut times, mut step, mut most_running) = (BTreeMap::new(), BTreeMap::new(), 0, 0);
        let mut ends = ends.iter().cycle();
        while times.len() < batch.len() {
            let chosen: Vec<usize> = next(&batch, most).map(|one| one.planned.call.as_u128() as usize).collect();
            for number in chosen {
                batch[number].progress = Progress::Started;
                began.entry(number).or_insert(step);
            }
            let running: Vec<usize> = began.keys().copied().filter(|number| !times.contains_key(number)).collect();
            most_running = most_running.max(running.len());
            step += 1;
            if !running.is_empty() {
                let ended = *ends.next().unwrap().get(&running);
                batch[ended].progress = done();
                times.insert(ended, (began[&ended], step));
            }
            for (one, drawn) in batch.iter_mut().zip(drawn) {
                if drawn.asked.is_some_and(|after| step > usize::from(after)) && one.approval == Approval::Needed {
                    one.approval = Approval::Given;
                }
            }
            assert!(step < 1000, "the batch does not end");
        }
        (times, most_running)
    }

    proptest! {
        #[test]
        fn no_call_overtakes_one_that_runs_alone(
            drawn in prop::collection::vec(drawn(), 1..12),
            most in 1_usize..6,
            ends in prop::collection::vec(any::<prop::sample::Index>(), 12),
        ) {
            let (times, most_running) = played(&drawn, most, &ends);
            prop_assert!(most_running <= most);
            for (later, (began, _)) in &times {
                for (earlier, (_, ended)) in times.range(..later) {
                    if !(drawn[*earlier].is_concurrent && drawn[*later].is_concurrent) {
                        prop_assert!(ended <= began, "{later} began before {earlier} had ended: {drawn:?} {times:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn neighbours_that_may_run_beside_each_other_do() {
        let concurrent = Drawn { is_concurrent: true, asked: None };
        let batch: Vec<_> = (0..5).map(|number| planned(number, concurrent)).collect();
        assert_eq!(next(&batch, 8).count(), 5);
        assert_eq!(next(&batch, 3).count(), 3);
    }
}
