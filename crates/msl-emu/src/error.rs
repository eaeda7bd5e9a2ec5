//! Typed errors: what a kernel did wrong, to what, by which thread, and on which line.

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::emulator::Order;

/// Which part of the source a line belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The header given with the kernel.
    Header,
    /// The template line and parameters that MLX writes.
    Signature,
    /// The kernel's body.
    Body,
}

/// A line of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The part it belongs to.
    pub part: Part,
    /// The line's number in that part, from 1.
    pub line: u32,
    /// The line itself.
    pub text: String,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = match self.part {
            Part::Header => "header",
            Part::Signature => "signature",
            Part::Body => "body",
        };
        write!(f, "{part} line {}: `{}`", self.line, self.text)
    }
}

/// Reading or writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
    /// One or the other: this processor does not tell.
    Unknown,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Access::Read => "read",
            Access::Write => "write",
            Access::Unknown => "access",
        })
    }
}

/// An element of a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Element {
    /// The buffer's name in the kernel's body.
    pub buffer: String,
    /// The element's index, counted over the flattened array; negative before its start.
    pub index: i64,
    /// How many elements the buffer has.
    pub len: usize,
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`[{}] (of {} elements)", self.buffer, self.index, self.len)
    }
}

/// Where one lane was when lanes that should have met did not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lane {
    /// The thread's index in its threadgroup.
    pub thread: u32,
    /// What it waited at: an operation's name, "an early return" or "the end of the body".
    pub at: String,
    /// The line of the operation.
    pub location: Option<Location>,
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "thread {} of the threadgroup is at {}", self.thread, self.at)?;
        if let Some(location) = &self.location {
            write!(f, " ({location})")?;
        }
        Ok(())
    }
}

/// What a kernel did wrong.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum FaultKind {
    /// An access outside a buffer.
    #[error("{access} outside a buffer: {element}")]
    OutOfBounds {
        /// Reading or writing.
        access: Access,
        /// The element that is not there.
        element: Element,
    },
    /// A vector access at an address that is not a multiple of its size.
    #[error("misaligned access of {size} bytes at byte {byte} of {element}")]
    Misaligned {
        /// The element that the address falls into.
        element: Element,
        /// The byte offset in the buffer.
        byte: i64,
        /// Bytes accessed.
        size: usize,
    },
    /// A vector access to memory of a threadgroup or thread at an address that is not a multiple of its size.
    #[error("misaligned access of {size} bytes to threadgroup or thread memory")]
    MisalignedLocal {
        /// The alignment it needs, in bytes.
        size: usize,
    },
    /// A write to an input.
    #[error("write to the input {0}")]
    InputWrite(Element),
    /// Output elements that no thread wrote.
    #[error("{count} elements were not written, the first is {element}")]
    Unwritten {
        /// The first of them.
        element: Element,
        /// How many.
        count: usize,
    },
    /// A read of an output element before anything was written to it.
    #[error("read of unset memory: {0}")]
    UninitialisedOutput(Element),
    /// Two threads wrote one output element.
    #[error(
        "{element} was written by two threads (the other: thread {other_in_group} of threadgroup {other_group})"
    )]
    DoubleWrite {
        /// The element.
        element: Element,
        /// The other thread's threadgroup, counted x first.
        other_group: u64,
        /// The other thread's index in its threadgroup.
        other_in_group: u64,
    },
    /// A thread read an output element that another wrote with no barrier between.
    #[error(
        "{element} was read with no barrier after another thread's write (thread {other_in_group} of threadgroup {other_group})"
    )]
    OutputRace {
        /// The element.
        element: Element,
        /// The other thread's threadgroup, counted x first.
        other_group: u64,
        /// The other thread's index in its threadgroup.
        other_in_group: u64,
    },
    /// An access outside a threadgroup variable.
    #[error("{access} of {size} bytes at byte {byte} of the threadgroup variable `{variable}`, outside it")]
    ThreadgroupOutOfBounds {
        /// The variable.
        variable: String,
        /// Reading or writing.
        access: Access,
        /// The byte offset in the variable.
        byte: i64,
        /// Bytes accessed; 0 where unknown.
        size: usize,
    },
    /// A read of threadgroup memory that no thread of this threadgroup wrote.
    #[error("read of unset threadgroup memory: byte {byte} of `{variable}`")]
    UninitialisedThreadgroup {
        /// The variable.
        variable: String,
        /// The byte offset in the variable.
        byte: i64,
    },
    /// Two threads accessed the same threadgroup memory with no barrier between, one of them writing.
    #[error(
        "race on byte {byte} of the threadgroup variable `{variable}`: {access} against the {other_access} by thread {other_in_group} of the threadgroup{}",
        .other_location.as_ref().map(|l| format!(" ({l})")).unwrap_or_default()
    )]
    Race {
        /// The variable.
        variable: String,
        /// The byte offset in the variable.
        byte: i64,
        /// What the later thread did.
        access: Access,
        /// The earlier thread's index in the threadgroup.
        other_in_group: u32,
        /// What the earlier thread did.
        other_access: Access,
        /// Where the earlier thread did it.
        other_location: Option<Location>,
    },
    /// A barrier or SIMD operation that not all threads reached.
    #[error("divergence: {0}, {1}")]
    Divergence(Lane, Lane),
    /// A SIMD operation that reads a lane that is not there.
    #[error("{op} in lane {lane} names lane {named}, which is not among the active lanes")]
    BadLane {
        /// The operation.
        op: String,
        /// The lane that asked.
        lane: u32,
        /// The lane it named.
        named: i64,
    },
    /// An operand that must be the same in all lanes and is not.
    #[error("{op}: {what} differs between lanes")]
    NotUniform {
        /// The operation.
        op: String,
        /// Which operand.
        what: String,
    },
    /// An index outside an array whose size the compiler knows.
    #[error("index {index} is outside its array")]
    ArrayIndex {
        /// The index.
        index: i64,
    },
    /// A shift by a negative amount or by at least the width.
    #[error("shift by {by}, not less than the operand's width")]
    Shift {
        /// The shift amount.
        by: i64,
    },
    /// An integer division by zero.
    #[error("integer division by zero")]
    Division,
    /// A thread used more stack than it has.
    #[error("a thread used more than {bytes} bytes of stack")]
    StackOverflow {
        /// The size of a thread's stack.
        bytes: usize,
    },
    /// The kernel ran too long.
    #[error("still running after {seconds} s")]
    Timeout {
        /// The limit.
        seconds: u32,
    },
    /// An access far from every buffer.
    #[error("access to address {address:#x}, far from every buffer (signal {signal})")]
    WildAccess {
        /// The address.
        address: u64,
        /// The signal it raised.
        signal: i32,
    },
    /// The result depends on the order of threads or on memory that was never set.
    #[error(
        "{count} elements differ between two orders of threads ({first_order:?}, {second_order:?}), the first is {element}"
    )]
    Unstable {
        /// The first of them.
        element: Element,
        /// How many.
        count: usize,
        /// One order.
        first_order: Order,
        /// The other order.
        second_order: Order,
    },
}

/// Something a kernel did wrong, and where.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    /// The kernel's name.
    pub kernel: String,
    /// What it did.
    pub kind: FaultKind,
    /// The thread's position in the grid.
    pub thread: Option<[u32; 3]>,
    /// Its threadgroup's position in the grid of threadgroups.
    pub threadgroup: Option<[u32; 3]>,
    /// Its index in the threadgroup.
    pub in_threadgroup: Option<u32>,
    /// The order of threads in which it happened.
    pub order: Order,
    /// The line that did it.
    pub location: Option<Location>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel `{}`: {}", self.kernel, self.kind)?;
        if let Some([x, y, z]) = self.thread {
            write!(f, "; thread ({x}, {y}, {z}) of the grid")?;
        }
        if let Some([x, y, z]) = self.threadgroup {
            write!(f, ", threadgroup ({x}, {y}, {z})")?;
        }
        if let Some(index) = self.in_threadgroup {
            write!(f, ", thread {index} in it")?;
        }
        if let Some(location) = &self.location {
            write!(f, "; {location}")?;
        }
        write!(f, " [{:?} order]", self.order)
    }
}

/// Why a kernel did not run to its end.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EmuError {
    /// The kernel broke a rule.
    #[error("{0}")]
    Fault(Box<Fault>),
    /// What was given is not a kernel and one launch of it.
    #[error("kernel `{kernel}`: {reason}")]
    Invalid {
        /// The kernel's name.
        kernel: String,
        /// What is wrong.
        reason: String,
    },
    /// No C++ compiler was found.
    #[error("no C++ compiler found, looked for {}; set CXX to one", tried.join(", "))]
    NoCompiler {
        /// The commands tried.
        tried: Vec<String>,
    },
    /// The compiler refused the kernel.
    #[error("kernel `{kernel}` does not compile:\n{message}")]
    Compile {
        /// The kernel's name.
        kernel: String,
        /// What the compiler said, with lines counted in the kernel's header and body.
        message: String,
    },
    /// The emulator itself failed.
    #[error("kernel `{kernel}`: the emulator failed: {reason}")]
    Runner {
        /// The kernel's name.
        kernel: String,
        /// What happened.
        reason: String,
    },
    /// A file could not be read or written, or a program not started.
    #[error("{}: {reason}", path.display())]
    Io {
        /// The file or program.
        path: PathBuf,
        /// Why.
        reason: io::Error,
    },
}

impl EmuError {
    /// The fault, if the kernel broke a rule.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            EmuError::Fault(fault) => Some(fault),
            _ => None,
        }
    }
}
