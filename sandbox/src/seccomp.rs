//! The system call filter: an allow-list, compiled once when a policy is loaded (seccomp(2)).
//!
//! One program in parts, each of which hands on what it has no verdict for:
//!
//! | part | verdict |
//! |---|---|
//! | architecture | calls of another architecture's interface, such as i386's, are killed |
//! | guard | calls of the x32 interface fail with ENOSYS |
//! | quick | allowed calls pass, if the policy allows them with any arguments |
//! | conditions | other allowed calls pass, or fail with EPERM when their arguments are not allowed |
//! | refusals | all other calls that are known by name fail with EPERM |
//! | end | what is left, so every call newer than this program, fails with ENOSYS |
//!
//! With a listener, conditions and refusals do not answer themselves, and where the network may serve again it is told of
//! every socket that is more than local: see [`crate::denials`].
//!
//! clone3 fails with ENOSYS: its flags lie in memory
//! that no filter can read, and C libraries then use clone.

mod groups;
mod names;
mod quick;
mod rules;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::mount::UnmountFlags;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, sock_filter,
};

pub use self::rules::{Allow, Compare, Condition};
use crate::host::Mechanism;
use crate::namespaces::try_in_child;
use crate::sys::clone::{Birth, fork};
use crate::{denials, descriptors, sys};

/// Calls that programs try first and that they do without only when told ENOSYS.
const NEVER_HEARD_OF: &[&str] = &["clone3"];

/// A policy's rules cannot become a filter.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// No system call and no group has this name.
    #[error("`{0}` is no system call and no group (@base, @files, @processes, @ipc, @sockets)")]
    Unknown(String),
    /// The compiler refuses.
    #[error("failed to compile the system call filter")]
    Filter(#[source] seccompiler::BackendError),
}

/// The permissions behind a name: a call's, or those of all members of a group.
///
/// # Errors
/// When nothing has that name.
pub fn expand(name: &str) -> Result<Vec<Allow>, CompileError> {
    if let Some(group) = groups::GROUPS.iter().find(|group| group.name == name) {
        let mut allowed: Vec<Allow> = group.plain.iter().map(|call| Allow::always(call)).collect();
        allowed.extend((group.conditional)());
        return Ok(allowed);
    }
    if names::number(name).is_none() {
        return Err(CompileError::Unknown(name.to_owned()));
    }
    Ok(vec![Allow::always(name)])
}

/// Every name that [`expand`] knows.
pub fn known_names() -> impl Iterator<Item = &'static str> {
    names::all().map(|(name, _)| name).chain(groups::GROUPS.iter().map(|group| group.name))
}

/// What every tool's process calls between the filter and its exec, and at its end.
const LAUNCH: &[&str] = &["sendmsg", "write", "execve", "exit_group"];

/// A compiled filter, in three forms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Answers by itself.
    silent: BpfProgram,
    /// Leaves refusals to a listener.
    naming: BpfProgram,
    /// Leaves to it sockets that are not local, too.
    telling: BpfProgram,
    /// The conditions under which such a socket may be made: all of one.
    sockets: Vec<Vec<Condition>>,
    /// Whether nothing but socket(2) makes such a socket.
    tells_of_sockets: bool,
}

impl Program {
    /// Compiles permissions. A call that is listed twice is allowed when either listing allows it.
    ///
    /// # Errors
    /// When the filter would be too large or a condition is not valid.
    pub fn compile(allow: &[Allow]) -> Result<Self, CompileError> {
        let architecture = architecture().map_err(CompileError::Filter)?;
        let mut conditional: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
        let mut local_sockets: Vec<SeccompRule> = Vec::new();
        let mut sockets: Vec<Vec<Condition>> = Vec::new();
        let mut unconditional: BTreeSet<i64> = LAUNCH.iter().filter_map(|name| names::number(name)).collect();
        for permission in allow {
            // A call that this architecture does not have needs no permission.
            let Some(number) = names::number(&permission.call) else { continue };
            if number == libc::SYS_socket {
                if permission.conditions.iter().any(|condition| condition.is_first(libc::AF_UNIX as u64)) {
                    local_sockets.push(rule(&permission.conditions).map_err(CompileError::Filter)?);
                } else {
                    sockets.push(permission.conditions.clone());
                }
            }
            if permission.conditions.is_empty() {
                unconditional.insert(number);
            } else {
                let rule = rule(&permission.conditions).map_err(CompileError::Filter)?;
                conditional.entry(number).or_default().push(rule);
            }
        }
        let refused: BTreeMap<i64, Vec<SeccompRule>> = names::all()
            .filter(|(_, number)| !conditional.contains_key(number) && !unconditional.contains(number))
            .map(|(_, number)| (number, Vec::new()))
            .collect();
        conditional.retain(|number, _| !unconditional.contains(number));
        let compile = |rules, otherwise, verdict| {
            SeccompFilter::new(rules, otherwise, verdict, architecture)
                .and_then(BpfProgram::try_from)
                .map_err(CompileError::Filter)
        };
        let eperm = || SeccompAction::Errno(libc::EPERM as u32);
        let enosys = SeccompAction::Errno(libc::ENOSYS as u32);
        // Without rules there is only the check of the architecture, which numbers mean nothing without.
        let checked = without_end(compile(BTreeMap::new(), eperm(), SeccompAction::Allow)?);
        let passing =
            |allowed: &BTreeSet<i64>| quick::pass(allowed.iter().filter_map(|number| u32::try_from(*number).ok()));
        let mut silent = [checked.clone(), guard(), passing(&unconditional)].concat();
        silent.extend(without_end(compile(conditional.clone(), eperm(), SeccompAction::Allow)?));
        silent.extend(compile(refused, enosys, eperm())?);
        let naming = |unconditional: &BTreeSet<i64>, conditional: BTreeMap<_, _>| {
            let mut program = [checked.clone(), guard(), passing(unconditional)].concat();
            program.extend(compile(conditional, ASK, SeccompAction::Allow)?);
            ask_a_listener(&mut program);
            Ok(program)
        };
        let with_all_sockets = naming(&unconditional, conditional.clone())?;
        unconditional.remove(&libc::SYS_socket);
        conditional.remove(&libc::SYS_socket);
        if !local_sockets.is_empty() {
            conditional.insert(libc::SYS_socket, local_sockets);
        }
        Ok(Self {
            silent,
            naming: with_all_sockets,
            telling: naming(&unconditional, conditional)?,
            sockets,
            tells_of_sockets: !allow.iter().any(makes_sockets_untold),
        })
    }
}

impl Program {
    /// Whether the listener is told of every socket that is more than local.
    pub(crate) const fn tells_of_sockets(&self) -> bool {
        self.tells_of_sockets
    }

    /// Whether this call, of which the listener is told, makes a socket that the silent form would let it make.
    pub(crate) fn lets_make_socket(&self, call: i64, arguments: &[u64; 6]) -> bool {
        let holds = |conditions: &Vec<Condition>| conditions.iter().all(|condition| condition.holds(arguments));
        call == libc::SYS_socket && self.sockets.iter().any(holds)
    }
}

/// Whether a permission lets sockets be made that are more than local, by another call than socket(2).
fn makes_sockets_untold(permission: &Allow) -> bool {
    let is_local = || permission.conditions.iter().any(|condition| condition.is_first(libc::AF_UNIX as u64));
    match permission.call.as_str() {
        // IORING_OP_SOCKET (io_uring_enter(2)) is no call that a filter sees.
        "io_uring_setup" => true,
        "socketpair" => !is_local(),
        _ => false,
    }
}

/// Proof that the calling process is confined: made by installing the filter, which is the last restriction.
pub(crate) struct Confined(());

/// What a listener is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// Of what is refused.
    Refusals,
    /// And of sockets that are more than local.
    Sockets,
}

/// Installs the filter on the calling process. Needs no_new_privs. `listener` is the tool's end of a
/// [`Channel`](denials::Channel).
pub(crate) fn install(program: &Program, listener: Option<(BorrowedFd<'_>, Told)>) -> io::Result<Confined> {
    match listener {
        Some((socket, told)) => {
            let form = match told {
                Told::Refusals => &program.naming,
                Told::Sockets => &program.telling,
            };
            let listener = sys::seccomp::install_with_listener(form)?;
            descriptors::send(socket, &[listener.as_fd()])?;
        }
        None => sys::seccomp::install(&program.silent)?,
    }
    Ok(Confined(()))
}

/// The errno that the silent form gives to a call that is not allowed.
pub(crate) fn errno_for(call: i64) -> i32 {
    if names::name(call).is_some() { libc::EPERM } else { libc::ENOSYS }
}

/// The name of a call.
pub(crate) fn call_name(call: i64) -> Option<&'static str> {
    names::name(call)
}

/// Whether a group allows the call with some arguments only.
pub(crate) fn is_conditional(name: &str) -> bool {
    groups::GROUPS.iter().any(|group| (group.conditional)().iter().any(|allow| allow.call == name))
}

/// Tries both forms in children.
pub(crate) fn probe() -> [(Mechanism, Result<(), String>); 2] {
    let allowed = ["@base", "@files"].map(expand).into_iter().collect::<Result<Vec<_>, _>>();
    let program = allowed.and_then(|allowed| Program::compile(&allowed.concat())).map_err(|error| error.to_string());
    // The kernel itself would find no such mount.
    let is_refused = || match rustix::mount::unmount("", UnmountFlags::empty()) {
        Err(rustix::io::Errno::PERM) => Ok(()),
        _ => Err(io::ErrorKind::Unsupported.into()),
    };
    let silent = |program: &Program| {
        try_in_child(Birth::default(), || {
            rustix::thread::set_no_new_privs(true)?;
            install(program, None)?;
            is_refused()
        })
    };
    let naming = |program: &Program| {
        try_in_child(Birth::default(), || {
            let channel = denials::Channel::new()?;
            let tool = fork(Birth::default(), || {
                let confined = rustix::thread::set_no_new_privs(true)
                    .map_err(io::Error::from)
                    .and_then(|()| install(program, Some((channel.tool.as_fd(), Told::Sockets))).map(drop));
                i32::from(confined.and_then(|()| is_refused()).is_err())
            })?;
            drop(channel.tool);
            let listener = descriptors::receive(channel.init.as_fd())?.pop().ok_or(io::ErrorKind::Unsupported)?;
            denials::Recorder::new(channel.records.as_fd(), program).answer(listener.as_fd())?;
            drop(listener);
            let status = rustix::process::waitpid(Some(tool.pid), rustix::process::WaitOptions::empty())?;
            let succeeded = status.is_some_and(|(_, status)| status.exit_status() == Some(0));
            if succeeded { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
        })
    };
    [
        (Mechanism::Seccomp, program.as_ref().map_err(String::clone).and_then(silent)),
        (Mechanism::SeccompNotify, program.as_ref().map_err(String::clone).and_then(naming)),
    ]
}

fn architecture() -> Result<TargetArch, seccompiler::BackendError> {
    TargetArch::try_from(std::env::consts::ARCH)
}

fn rule(conditions: &[Condition]) -> Result<SeccompRule, seccompiler::BackendError> {
    let conditions = conditions.iter().map(|condition| {
        let length = if condition.low_bits_only { SeccompCmpArgLen::Dword } else { SeccompCmpArgLen::Qword };
        let (operator, value) = match condition.compare {
            Compare::Equals(value) => (SeccompCmpOp::Eq, value),
            Compare::Differs(value) => (SeccompCmpOp::Ne, value),
            Compare::MaskedEquals(mask, value) => (SeccompCmpOp::MaskedEq(mask), value),
        };
        SeccompCondition::new(condition.argument, length, operator, value)
    });
    SeccompRule::new(conditions.collect::<Result<_, _>>()?)
}

// Classic BPF (linux/filter.h) and seccomp's return values (linux/seccomp.h).
const LOAD_WORD: u16 = 0x20;
const JUMP: u16 = 0x05;
const JUMP_IF_AT_LEAST: u16 = 0x35;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;
const ALLOW: u32 = 0x7fff_0000;
const RETURN_ERRNO: u32 = 0x0005_0000;
const RETURN_TRACE: u32 = 0x7ff0_0000;
/// Bit 30 of a call's number marks the x32 interface, which x86-64 kernels may offer beside their own.
const X32: u32 = 0x4000_0000;

/// x32 shares its architecture with x86-64, so seccompiler knows nothing of it. Everything else goes on to the instruction after
/// this part, with the call's number in the accumulator.
fn guard() -> BpfProgram {
    let never_heard_of = sock_filter { code: RETURN, jt: 0, jf: 0, k: RETURN_ERRNO | libc::ENOSYS as u32 };
    let mut program = vec![
        sock_filter { code: LOAD_WORD, jt: 0, jf: 0, k: 0 },
        sock_filter { code: JUMP_IF_AT_LEAST, jt: 0, jf: 1, k: X32 },
        never_heard_of.clone(),
    ];
    for number in NEVER_HEARD_OF.iter().filter_map(|name| u32::try_from(names::number(name)?).ok()) {
        program.push(sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: 1, k: number });
        program.push(never_heard_of.clone());
    }
    program
}

/// Stands for "ask the listener", which seccompiler has no word for.
const ASK: SeccompAction = SeccompAction::Trace(0x7abc);

fn ask_a_listener(program: &mut BpfProgram) {
    for instruction in program {
        if instruction.code == RETURN && instruction.k == RETURN_TRACE | 0x7abc {
            instruction.k = libc::SECCOMP_RET_USER_NOTIF;
        }
    }
}

/// seccompiler ends a program with the verdict for what matched nothing. Without it, that goes on to whatever follows:
/// all jumps are relative, and the last call's comparison jumps just past the call's own rules.
fn without_end(mut program: BpfProgram) -> BpfProgram {
    program.pop();
    program
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A call as the filter sees it (struct seccomp_data).
    #[derive(Clone, Copy, Debug)]
    pub(super) struct Call {
        pub(super) number: u32,
        pub(super) arguments: [u64; 6],
    }

    const X86_64: u32 = 0xc000_003e;
    const I386: u32 = 0x4000_0003;

    pub(super) fn verdict(program: &[sock_filter], call: Call) -> u32 {
        verdict_on(program, X86_64, call)
    }

    /// Runs a program as the kernel's interpreter would, with the few instructions that are used.
    fn verdict_on(program: &[sock_filter], architecture: u32, call: Call) -> u32 {
        let word = |offset: u32| match offset {
            0 => call.number,
            4 => architecture,
            offset => {
                let (index, upper) = ((offset - 16) / 8, (offset - 16) % 8 == 4);
                let argument = call.arguments[index as usize];
                if upper { (argument >> 32) as u32 } else { argument as u32 }
            }
        };
        let (mut accumulator, mut at) = (0_u32, 0_usize);
        loop {
            let instruction = &program[at];
            at += 1;
            let mut branch = |taken: bool| at += usize::from(if taken { instruction.jt } else { instruction.jf });
            match instruction.code {
                0x20 => accumulator = word(instruction.k),
                0x54 => accumulator &= instruction.k,
                0x05 => at += instruction.k as usize,
                0x15 => branch(accumulator == instruction.k),
                0x25 => branch(accumulator > instruction.k),
                0x35 => branch(accumulator >= instruction.k),
                0x06 => return instruction.k,
                code => panic!("instruction {code:#x}"),
            }
        }
    }

    const EPERM: u32 = RETURN_ERRNO | libc::EPERM as u32;
    const ENOSYS: u32 = RETURN_ERRNO | libc::ENOSYS as u32;

    fn allows(program: &Program, call: Call) -> bool {
        verdict(&program.silent, call) == ALLOW
    }

    fn compiled(names: &[&str]) -> Program {
        let allowed: Vec<_> = names.iter().flat_map(|name| expand(name).unwrap()).collect();
        Program::compile(&allowed).unwrap()
    }

    #[test]
    fn every_name_of_every_group_exists() {
        for group in groups::GROUPS {
            for name in group.plain {
                // The forms that only some architectures have are the ones that this test cannot judge elsewhere.
                assert!(cfg!(not(target_arch = "x86_64")) || names::number(name).is_some(), "{name} in {}", group.name);
            }
        }
    }

    #[test]
    fn no_number_counts_on_another_architecture() {
        let program = compiled(&["@base", "@files"]);
        for form in [&program.silent, &program.naming, &program.telling] {
            for number in (0..600).chain([X32 + 1, u32::MAX]) {
                let call = Call { number, arguments: [0; 6] };
                assert_eq!(verdict_on(form, I386, call), libc::SECCOMP_RET_KILL_PROCESS, "{number}");
            }
        }
    }

    /// Its length is time at each launch: see [`quick`].
    #[test]
    fn a_filter_of_everything_is_short() {
        let program = compiled(&["@base", "@files", "@processes", "@ipc", "@sockets"]);
        assert!(program.naming.len() < 400, "{} instructions", program.naming.len());
    }

    #[test]
    fn the_forms_agree() {
        let program = compiled(&["@base", "@files", "@processes", "@ipc", "@sockets"]);
        for number in 0..600 {
            for argument in [0, 1, 2, 16, 38, 40, 0x5412, libc::CLONE_NEWUSER as u64] {
                let call = Call { number, arguments: [argument; 6] };
                let silent = verdict(&program.silent, call);
                for form in [&program.naming, &program.telling] {
                    let verdict = verdict(form, call);
                    if verdict == libc::SECCOMP_RET_USER_NOTIF {
                        let answered = if program.lets_make_socket(number.into(), &call.arguments) {
                            ALLOW
                        } else {
                            RETURN_ERRNO | errno_for(number.into()) as u32
                        };
                        assert_eq!(silent, answered, "{call:?}");
                    } else {
                        assert_eq!(silent, verdict, "{call:?}");
                    }
                }
                let is_told = verdict(&program.naming, call) == libc::SECCOMP_RET_USER_NOTIF;
                assert!(!is_told || silent != ALLOW, "{call:?}");
            }
        }
    }

    #[test]
    fn what_is_not_listed_is_refused() {
        let program = compiled(&["read", "@sockets"]);
        let call = |number: i64, first: u64| Call { number: number as u32, arguments: [first, 1, 0, 0, 0, 0] };
        assert_eq!(verdict(&program.silent, call(libc::SYS_read, 0)), ALLOW);
        assert_eq!(verdict(&program.silent, call(libc::SYS_open, 0)), EPERM);
        assert_eq!(verdict(&program.silent, call(libc::SYS_clone3, 0)), ENOSYS);
        assert_eq!(verdict(&program.silent, call(4000, 0)), ENOSYS);
        assert_eq!(verdict(&program.silent, call(i64::from(X32) + libc::SYS_read, 0)), ENOSYS);
        assert_eq!(verdict(&program.silent, call(libc::SYS_socket, libc::AF_UNIX as u64)), ALLOW);
        assert_eq!(verdict(&program.silent, call(libc::SYS_socket, libc::AF_ALG as u64)), EPERM);
    }

    fn names_of_policies() -> impl Strategy<Value = Vec<&'static str>> {
        let known: Vec<&'static str> = known_names().collect();
        proptest::collection::vec(proptest::sample::select(known), 0..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// A policy that lists less allows no call that the longer one refuses.
        #[test]
        fn a_shorter_list_never_allows_more(
            names in names_of_policies(),
            keep in 0_usize..12,
            calls in proptest::collection::vec((0_u32..500, proptest::array::uniform6(0_u64..64)), 40),
        ) {
            let longer = compiled(&names);
            let shorter = compiled(&names[..keep.min(names.len())]);
            for (number, arguments) in calls {
                let call = Call { number, arguments };
                prop_assert!(!allows(&shorter, call) || allows(&longer, call), "{call:?} of {names:?}");
            }
        }

        /// PID 1 lets those sockets be made that the silent form would, and is told of all that are not local.
        #[test]
        fn sockets_are_made_as_without_a_listener(
            names in names_of_policies(),
            domain in 0_u64..45,
            kind in 0_u64..8,
            flags in proptest::sample::select(vec![0_u64, 0o2_000_000, 0o4000, 1 << 32]),
            protocol in 0_u64..20,
        ) {
            for names in [names, vec!["@sockets"], vec!["socket"]] {
                let program = compiled(&names);
                let arguments = [domain, kind | flags, protocol, 0, 0, 0];
                let call = Call { number: libc::SYS_socket as u32, arguments };
                let is_told = verdict(&program.telling, call) == libc::SECCOMP_RET_USER_NOTIF;
                let is_local = domain == libc::AF_UNIX as u64;
                prop_assert!(is_told || is_local, "{:?}", call);
                if is_told {
                    prop_assert_eq!(program.lets_make_socket(libc::SYS_socket, &arguments), allows(&program, call), "{:?}", call);
                }
            }
        }

        /// A condition only takes away.
        #[test]
        fn a_condition_never_allows_more(
            name in proptest::sample::select(names::all().map(|(name, _)| name).collect::<Vec<_>>()),
            argument in 0_u8..6,
            value in 0_u64..8,
            mask in 0_u64..8,
            arguments in proptest::array::uniform6(0_u64..8),
        ) {
            prop_assume!(!LAUNCH.contains(&name));
            let number = names::number(name).unwrap() as u32;
            for compare in [Compare::Equals(value), Compare::Differs(value), Compare::MaskedEquals(mask, value & mask)] {
                let condition = Condition { argument, low_bits_only: true, compare };
                let limited = Program::compile(&[Allow::when(name, [condition])]).unwrap();
                let call = Call { number, arguments };
                let given = arguments[usize::from(argument)];
                let holds = match compare {
                    Compare::Equals(value) => given == value,
                    Compare::Differs(value) => given != value,
                    Compare::MaskedEquals(mask, value) => given & mask == value,
                };
                let expected = holds && !NEVER_HEARD_OF.contains(&name);
                prop_assert_eq!(allows(&limited, call), expected, "{} {:?}", name, call);
            }
        }
    }
}
