//! Read-only memory maps: the one unsafe call of this crate, because no check can make it true.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;

use memmap2::Mmap;

/// Maps the whole of `file` for reading. The map outlives the file handle, a rename and an unlink.
pub(crate) fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: this rests on an assumption about other processes, not on a check: while the map lives, nobody
    // truncates the file (that would raise SIGBUS on access) or writes into it (that would change bytes behind a
    // shared reference). Model files are replaced by rename, as this crate's writer does, which keeps a mapped
    // file as it was. Everything read from a map is validated as untrusted bytes all the same.
    unsafe { Mmap::map(file) }
}
