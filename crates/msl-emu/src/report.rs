//! What the runner writes when it ends, read back.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::cost::Cost;
use crate::emulator::Order;
use crate::error::{Access, Element, EmuError, Fault, FaultKind, Lane, Location};
use crate::kernel::Kernel;
use crate::wrapper::{self, Argument};

/// A run that ended well.
#[derive(Debug, Default)]
pub(crate) struct Success {
    pub(crate) times: Vec<Duration>,
    pub(crate) cost: Cost,
    pub(crate) blocks: HashMap<u64, u64>,
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// The innermost line of the kernel's own text at a return address in a compiled kernel.
fn line_of(library: &Path, return_address: u64) -> Option<u32> {
    let address = format!("{:#x}", return_address.checked_sub(1)?);
    let output = Command::new("addr2line").arg("-i").arg("-e").arg(library).arg(address).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines().find_map(|frame| {
        let (file, line) = frame.rsplit_once(':')?;
        let digits: String = line.chars().take_while(char::is_ascii_digit).collect();
        if file.ends_with("kernel.metal") { digits.parse().ok() } else { None }
    })
}

pub(crate) struct Context<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) library: &'a Path,
    pub(crate) orders: &'a [Order],
}

struct Fields<'a> {
    context: &'a Context<'a>,
    fields: HashMap<&'a str, &'a str>,
}

impl Fields<'_> {
    fn text(&self, name: &str) -> String {
        self.fields.get(name).map(|v| (*v).to_owned()).unwrap_or_default()
    }

    fn number<T: std::str::FromStr + Default>(&self, name: &str) -> T {
        self.fields.get(name).and_then(|v| v.parse().ok()).unwrap_or_default()
    }

    fn triple(&self, name: &str) -> Option<[u32; 3]> {
        let all: Vec<u32> = self.fields.get(name)?.split(' ').filter_map(|v| v.parse().ok()).collect();
        all.try_into().ok()
    }

    fn locate(&self, line_field: &str, pc_field: &str) -> Option<Location> {
        let line = match self.fields.get(line_field) {
            Some(line) => line.parse().ok(),
            None => line_of(self.context.library, hexadecimal(self.fields.get(pc_field)?)?),
        };
        wrapper::locate(self.context.kernel, line?)
    }

    fn element(&self) -> Element {
        let kernel = self.context.kernel;
        let (buffer, len) = match wrapper::arguments(kernel).get(self.number::<usize>("buffer")) {
            Some(Argument::Input(i)) => (kernel.inputs[*i].name.clone(), kernel.inputs[*i].len()),
            Some(Argument::Shape(i)) => {
                (format!("{}_shape", kernel.inputs[*i].name), kernel.inputs[*i].shape.len())
            }
            Some(Argument::Strides(i)) => {
                (format!("{}_strides", kernel.inputs[*i].name), kernel.inputs[*i].shape.len())
            }
            Some(Argument::Ndim(i)) => (format!("{}_ndim", kernel.inputs[*i].name), 1),
            Some(Argument::Output(i)) => (kernel.outputs[*i].name.clone(), kernel.outputs[*i].len()),
            None => ("?".to_owned(), 0),
        };
        Element { buffer, index: self.number("element"), len }
    }

    fn lane(&self, who: &str) -> Lane {
        Lane {
            thread: self.number(&format!("{who}_thread")),
            at: self.text(&format!("{who}_at")),
            location: self.locate(&format!("{who}_line"), ""),
        }
    }

    fn order(&self, name: &str) -> Order {
        self.context.orders.get(self.number::<usize>(name)).copied().unwrap_or(Order::Forward)
    }

    fn kind(&self, name: &str) -> Option<FaultKind> {
        let access = if name.ends_with("_read") {
            Access::Read
        } else if name.ends_with("_write") {
            Access::Write
        } else {
            Access::Unknown
        };
        let local = || (self.text("variable"), self.number("byte"));
        Some(match name {
            "out_of_bounds" | "out_of_bounds_read" | "out_of_bounds_write" => {
                FaultKind::OutOfBounds { access, element: self.element() }
            }
            "misaligned" => FaultKind::Misaligned {
                element: self.element(),
                byte: self.number("byte"),
                size: self.number("size"),
            },
            "misaligned_local" => FaultKind::MisalignedLocal { size: self.number("size") },
            "input_write" => FaultKind::InputWrite(self.element()),
            "unwritten" => FaultKind::Unwritten { element: self.element(), count: self.number("count") },
            "uninitialised_output" => FaultKind::UninitialisedOutput(self.element()),
            "double_write" => FaultKind::DoubleWrite {
                element: self.element(),
                other_group: self.number("other_group"),
                other_in_group: self.number("other_in_group"),
            },
            "output_race" => FaultKind::OutputRace {
                element: self.element(),
                other_group: self.number("other_group"),
                other_in_group: self.number("other_in_group"),
            },
            "threadgroup_out_of_bounds"
            | "threadgroup_out_of_bounds_read"
            | "threadgroup_out_of_bounds_write" => {
                let (variable, byte) = local();
                FaultKind::ThreadgroupOutOfBounds { variable, access, byte, size: self.number("size") }
            }
            "uninitialised_threadgroup" => {
                let (variable, byte) = local();
                FaultKind::UninitialisedThreadgroup { variable, byte }
            }
            "race_read" | "race_write" => {
                let (variable, byte) = local();
                FaultKind::Race {
                    variable,
                    byte,
                    access,
                    other_in_group: self.number("other_in_group"),
                    other_access: if self.text("other_did") == "read" { Access::Read } else { Access::Write },
                    other_location: self.locate("other_line", "other_pc"),
                }
            }
            "divergence" => FaultKind::Divergence(self.lane("a"), self.lane("b")),
            "bad_lane" => FaultKind::BadLane {
                op: self.text("op"),
                lane: self.number("lane"),
                named: self.number("named"),
            },
            "not_uniform" => FaultKind::NotUniform { op: self.text("op"), what: self.text("what") },
            "array_index" => FaultKind::ArrayIndex { index: self.number("value") },
            "shift" => FaultKind::Shift { by: self.number("value") },
            "division" => FaultKind::Division,
            "stack_overflow" => FaultKind::StackOverflow { bytes: self.number("bytes") },
            "timeout" => FaultKind::Timeout { seconds: self.number("seconds") },
            "wild_access" => FaultKind::WildAccess {
                address: hexadecimal(&self.text("address")).unwrap_or(0),
                signal: self.number("signal"),
            },
            "unstable" => FaultKind::Unstable {
                element: self.element(),
                count: self.number("count"),
                first_order: self.order("first_run"),
                second_order: self.order("second_run"),
            },
            _ => return None,
        })
    }
}

/// Reads a report: what a good run counted, or what went wrong.
pub(crate) fn read(context: &Context<'_>, text: &str) -> Result<Success, EmuError> {
    let runner = |reason: String| EmuError::Runner { kernel: context.kernel.name.clone(), reason };
    let mut lines = text.lines();
    let first = lines.next().unwrap_or_default();
    if first == "ok" {
        let mut success = Success::default();
        for line in lines {
            let Some((name, value)) = line.split_once(' ') else { continue };
            if name == "block" {
                if let Some((at, n)) = value.split_once(' ')
                    && let (Some(at), Ok(n)) = (hexadecimal(at), n.parse())
                {
                    success.blocks.insert(at, n);
                }
            } else if let Ok(value) = value.parse() {
                if name == "time" {
                    success.times.push(Duration::from_nanos(value));
                } else {
                    success.cost.set(name, value);
                }
            }
        }
        return Ok(success);
    }
    let fields = Fields { context, fields: lines.filter_map(|line| line.split_once(' ')).collect() };
    let name = first.strip_prefix("error ").unwrap_or(first);
    let Some(kind) = fields.kind(name) else {
        let reason = if name == "runner" { fields.text("what") } else { format!("unknown report `{text}`") };
        return Err(runner(reason));
    };
    let location = match kind {
        FaultKind::Divergence(..) => fields.locate("a_line", ""),
        _ => fields.locate("line", "pc"),
    };
    Err(EmuError::Fault(Box::new(Fault {
        kernel: context.kernel.name.clone(),
        kind,
        thread: fields.triple("thread"),
        threadgroup: fields.triple("group"),
        in_threadgroup: fields.fields.get("in_group").and_then(|v| v.parse().ok()),
        order: fields.order("run"),
        location,
    })))
}
