//! Calls into C++ that give a status and, on failure, a message.

use std::ffi::{CStr, c_char, c_int};

/// Where C++ writes why it failed.
pub(crate) struct Message {
    pub(crate) text: *mut c_char,
    pub(crate) len: u64,
}

/// Runs a call that returns 0 or has written a message.
pub(crate) fn status(f: impl FnOnce(Message) -> c_int) -> Result<(), String> {
    // A compiler's log can be long, and what matters stands at its start.
    let mut message = [0 as c_char; 2048];
    if f(Message { text: message.as_mut_ptr(), len: message.len() as u64 }) == 0 {
        return Ok(());
    }
    // SAFETY: `message` was zeroed and C++ writes with snprintf within its length, so a NUL ends it.
    Err(unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy().into_owned())
}
