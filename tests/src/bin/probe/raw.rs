//! System calls as a hostile program makes them: by number, with whatever arguments, past every library.
#![expect(unsafe_code, reason = "what the sandbox refuses can only be tried by calls that no safe wrapper makes")]

use std::ffi::{CStr, c_long};

/// An argument of a system call.
pub(crate) enum Argument<'a> {
    /// A number, a flag, a descriptor, or a pointer to nowhere.
    Number(i64),
    /// A string that the kernel reads.
    Text(&'a CStr),
    /// Bytes that the kernel reads.
    Bytes(&'a [u8]),
    /// Bytes that the kernel writes.
    Buffer(&'a mut [u8]),
}

impl From<i64> for Argument<'_> {
    fn from(number: i64) -> Self {
        Self::Number(number)
    }
}

impl From<i32> for Argument<'_> {
    fn from(number: i32) -> Self {
        Self::Number(number.into())
    }
}

impl<'a> From<&'a CStr> for Argument<'a> {
    fn from(text: &'a CStr) -> Self {
        Self::Text(text)
    }
}

impl Argument<'_> {
    fn word(&mut self) -> i64 {
        match self {
            Self::Number(number) => *number,
            Self::Text(text) => text.as_ptr() as i64,
            Self::Bytes(bytes) => bytes.as_ptr() as i64,
            Self::Buffer(buffer) => buffer.as_mut_ptr() as i64,
        }
    }
}

/// Makes a system call; the error is the errno.
pub(crate) fn call(number: c_long, mut arguments: Vec<Argument<'_>>) -> Result<i64, i32> {
    let mut words = [0i64; 6];
    for (word, argument) in words.iter_mut().zip(&mut arguments) {
        *word = argument.word();
    }
    // SAFETY: pointers are those of the borrowed arguments, which outlive the call, and every attempt gives buffers as long as
    // the call wants; each attempt runs in a process of its own that ends right after, so nothing else relies on the memory.
    let result = unsafe { libc::syscall(number, words[0], words[1], words[2], words[3], words[4], words[5]) };
    if result >= 0 { Ok(result) } else { Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) }
}

/// getpid by the 32-bit system call gate. Whoever filters only 64-bit calls lets this pass.
#[cfg(target_arch = "x86_64")]
pub(crate) fn getpid_by_the_old_gate() -> Result<i64, i32> {
    let result: i32;
    // SAFETY: call 20 of the i386 table takes no arguments and touches no memory; the gate may change these registers only.
    unsafe {
        std::arch::asm!("int 0x80", inlateout("eax") 20i32 => result, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    if result >= 0 { Ok(result.into()) } else { Err(-result) }
}

/// Runs a few bytes of machine code from fresh memory, as a just-in-time compiler does, and returns what they return.
#[cfg(target_arch = "x86_64")]
pub(crate) fn run_made_code() -> Result<i64, i32> {
    // mov eax, 42; ret
    const CODE: [u8; 6] = [0xb8, 42, 0, 0, 0, 0xc3];
    // SAFETY: an anonymous mapping at an address of the kernel's choice overlaps nothing.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    let failed = || std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    if page == libc::MAP_FAILED {
        return Err(failed());
    }
    // SAFETY: the page was mapped writable just now and is longer than the code.
    unsafe { std::ptr::copy_nonoverlapping(CODE.as_ptr(), page.cast::<u8>(), CODE.len()) };
    // SAFETY: the page is ours alone.
    if unsafe { libc::mprotect(page, 4096, libc::PROT_READ | libc::PROT_EXEC) } != 0 {
        return Err(failed());
    }
    // SAFETY: the page holds a whole function of this signature that uses no stack.
    let function: extern "C" fn() -> i32 = unsafe { std::mem::transmute(page) };
    Ok(function().into())
}
