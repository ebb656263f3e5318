//! The part of a filter that lets pass what passes whatever its arguments: a search by halves over the calls' numbers.
//!
//! A kernel asks a new filter about each number of its table (seccomp_cache_prepare), checks it and translates it, all at every
//! launch. Calls by the hundred, one comparison after the other, make that the dearest of a launch's restrictions.

use seccompiler::{BpfProgram, sock_filter};

use super::{ALLOW, JUMP, JUMP_IF_AT_LEAST, RETURN};

/// Where numbers begin to pass and cease to, in turns and in order.
struct Borders(Vec<u32>);

impl Borders {
    fn around(numbers: impl IntoIterator<Item = u32>) -> Self {
        let mut numbers: Vec<u32> = numbers.into_iter().collect();
        numbers.sort_unstable();
        let mut borders: Vec<u32> = Vec::new();
        for number in numbers {
            match borders.last_mut() {
                Some(end) if *end > number => {}
                Some(end) if *end == number => *end += 1,
                _ => borders.extend([number, number + 1]),
            }
        }
        Self(borders)
    }
}

/// Instructions that expect a call's number in the accumulator, let the given ones pass, and hand everything else on to whatever
/// follows them.
pub(super) fn pass(numbers: impl IntoIterator<Item = u32>) -> BpfProgram {
    search(&Borders::around(numbers).0, false, 0)
}

/// The search between borders, before the first of which numbers pass or not, with so many instructions of the whole behind it.
fn search(borders: &[u32], passes: bool, behind: usize) -> BpfProgram {
    let (lower, rest) = borders.split_at(borders.len() / 2);
    let Some((border, upper)) = rest.split_first() else {
        return vec![if passes { instruction(RETURN, ALLOW) } else { instruction(JUMP, count(behind)) }];
    };
    let passes_at_border = passes == (lower.len() % 2 == 1);
    let upper = search(upper, passes_at_border, behind);
    let lower = search(lower, passes, upper.len() + behind);
    let mut program = match u8::try_from(lower.len()) {
        Ok(skipped) => vec![sock_filter { code: JUMP_IF_AT_LEAST, jt: skipped, jf: 0, k: *border }],
        // A conditional jump reaches 255 instructions.
        Err(_) => vec![
            sock_filter { code: JUMP_IF_AT_LEAST, jt: 0, jf: 1, k: *border },
            instruction(JUMP, count(lower.len())),
        ],
    };
    program.extend(lower);
    program.extend(upper);
    program
}

const fn instruction(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}

/// A filter has 4,096 instructions at most (bpf_check_classic), so that more are refused when it is installed.
fn count(instructions: usize) -> u32 {
    u32::try_from(instructions).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::super::tests::{Call, verdict};
    use super::*;

    const HANDED_ON: u32 = 1;

    fn passing(program: &BpfProgram, number: u32) -> bool {
        let mut whole = program.clone();
        whole.insert(0, instruction(super::super::LOAD_WORD, 0));
        whole.push(instruction(RETURN, HANDED_ON));
        verdict(&whole, Call { number, arguments: [0; 6] }) == ALLOW
    }

    proptest! {
        #[test]
        fn exactly_the_given_numbers_pass(numbers in proptest::collection::btree_set(0_u32..600, 0..400)) {
            let program = pass(numbers.iter().copied());
            for number in 0..640 {
                prop_assert_eq!(passing(&program, number), numbers.contains(&number), "{}", number);
            }
        }
    }

    #[test]
    fn jumps_that_are_too_far_for_one_instruction_are_made_by_two() {
        let every_other: BTreeSet<u32> = (0..600).step_by(2).collect();
        let program = pass(every_other.iter().copied());
        assert!(program.len() > 4 * 255);
        for number in 0..600 {
            assert_eq!(passing(&program, number), every_other.contains(&number), "{number}");
        }
    }

    #[test]
    fn numbers_may_come_twice_and_in_any_order() {
        let program = pass([7, 3, 3, 4, 7]);
        let passed: Vec<u32> = (0..20).filter(|number| passing(&program, *number)).collect();
        assert_eq!(passed, [3, 4, 7]);
        assert_eq!(program.len(), pass([3, 4, 7]).len());
    }
}
